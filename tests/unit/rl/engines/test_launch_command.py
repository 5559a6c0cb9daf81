import sys
from pathlib import Path

import pytest

from posttrain.plan.flags.sglang_flags import DECODE, PREFILL, UNIFIED
from posttrain.plan.resolve import resolve
from posttrain.rl.engines import sglang_server
from posttrain.rl.engines.launch_command import nodes_per_engine, render_engine_command
from posttrain.rl.engines.responses import NO_WEIGHTS

CONFIG = Path(__file__).parents[4] / "config"


def command(model, overrides="", **place):
    config = resolve({"model": model, "site": "local", "set": overrides}, CONFIG).config
    return render_engine_command(config, 1, Path("/models/x"), "127.0.0.1", 30001, **place)


def flags(argv):
    """Return option -> value; options without one have True."""
    found = {}
    for here, after in zip(argv, [*argv[1:], "--"], strict=True):
        if here.startswith("--"):
            found[here] = True if after.startswith("--") else after
    return found


def test_the_embedded_engine():
    rendered = command("tiny", "engine.num_threads=2")
    assert rendered.argv[:3] == (sys.executable, "-m", "posttrain.rl.engines.embedded")
    assert flags(rendered.argv) == {
        "--dtype": "float32",
        "--served-threads": "2",
        "--max-running-requests": "512",
        "--deterministic": True,
        "--model-path": "/models/x",
        "--host": "127.0.0.1",
        "--port": "30001",
    }
    assert rendered.url == "http://127.0.0.1:30001"
    assert rendered.env["OMP_NUM_THREADS"] == "2"
    assert rendered.env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "--no-deterministic" in command("tiny", merge_requests=True).argv


def test_no_thread_count_leaves_torch_its_choice():
    assert "OMP_NUM_THREADS" not in command("tiny", "engine.num_threads=0").env


def test_sglang_on_a_cpu_runs_in_its_own_environment():
    rendered = command("tiny", "engine.kind=sglang engine.python=/envs/sglang/bin/python")
    given = flags(rendered.argv)
    assert rendered.argv[:3] == ("/envs/sglang/bin/python", "-P", sglang_server.__file__)
    assert (given["--device"], given["--attention-backend"], given["--dtype"]) == (
        "cpu",
        "torch_native",
        "float32",
    )
    assert given["--enable-deterministic-inference"]
    assert given["--disable-radix-cache"]
    assert given["--random-seed"] == "43"
    assert given["--sleep-on-idle"]
    assert rendered.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert rendered.private_folders == ("TMPDIR", "SGLANG_CACHE_DIR")
    assert rendered.env["HF_HUB_OFFLINE"] == "1"
    assert not any("deepep" in word or "dsa" in word for word in rendered.argv)


def test_the_recipe_of_16_nodes():
    rendered = command("glm5", node_rank=3, first_node="node8:5000")
    given = flags(rendered.argv)
    assert {name: given[name] for name in given if name not in ("--host", "--port", "--model-path")} == {
        "--served-model-name": "glm5",
        "--dtype": "bfloat16",
        "--max-running-requests": "512",
        "--random-seed": "43",
        "--mem-fraction-static": "0.7",
        "--enable-memory-saver": True,
        "--tp-size": "64",
        "--ep-size": "64",
        "--attn-dp-size": "64",
        "--moe-dense-tp-size": "1",
        "--enable-dp-lm-head": True,
        "--page-size": "64",
        "--kv-cache-dtype": "bf16",
        "--chunked-prefill-size": "131072",
        "--cuda-graph-max-bs-decode": "256",
        "--watchdog-timeout": "3600",
        "--attention-backend": "dsa",
        "--dsa-prefill-backend": "flashmla_sparse",
        "--dsa-decode-backend": "flashmla_sparse",
        "--moe-a2a-backend": "deepep",
        "--deepep-mode": "auto",
        "--nnodes": "8",
        "--node-rank": "3",
        "--dist-init-addr": "node8:5000",
    }
    assert rendered.env["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] == "256"


def test_an_engine_on_one_node_with_bf16_weights_needs_neither_nodes_nor_deepep():
    rendered = command("glm5", "engine.gpus_per_engine=8 rollout.fp8=false")
    given = flags(rendered.argv)
    assert given["--tp-size"] == "8"
    assert given["--chunked-prefill-size"] == "16384"
    assert "--nnodes" not in given
    assert "--moe-a2a-backend" not in given
    assert "NVSHMEM_DISABLE_NCCL" not in rendered.env


def test_an_engine_over_several_nodes_must_know_where_they_meet():
    config = resolve({"model": "glm5", "site": "local"}, CONFIG).config
    assert nodes_per_engine(config) == 8
    with pytest.raises(AssertionError, match="spans 8 nodes"):
        render_engine_command(config, 0, Path("/x"), "0.0.0.0", 1)


@pytest.mark.parametrize("model", ["tiny", "glm5"])
def test_an_engine_that_gets_its_weights_from_the_trainer_reads_none(model):
    with_weights, without = (command(model, first_node="n:1", without_weights=empty) for empty in (False, True))
    assert flags(without.argv).items() - flags(with_weights.argv).items() == {
        ("--load-format", "dummy"),
        ("--weight-version", NO_WEIGHTS),
    }


def test_caches_are_asked_for_where_an_engine_listens():
    """With prefill apart; the address that SGLang would find for itself is one that others reach."""
    roles = (DECODE, PREFILL, UNIFIED)
    addresses = [command("glm5", first_node="n:1", role=role).env.get("SGLANG_HOST_IP") for role in roles]
    assert addresses == ["127.0.0.1", "127.0.0.1", None]


def test_nothing_secret_is_on_the_command_line(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    monkeypatch.setenv("HF_TOKEN", "canary")
    for model in ("tiny", "glm5"):
        rendered = command(model, first_node="n:1")
        assert "canary" not in " ".join([*rendered.argv, *rendered.env.values()])
