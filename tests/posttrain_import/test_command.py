"""`posttrain import-flags` on launch scripts in the layouts of slime and miles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.support.forked_programs import run_posttrain
from tests.support.rejections import assert_rejected

from posttrain.config.command_line import read_request
from posttrain.config.load import Resolved, merge
from posttrain.plan.flags.megatron_flags import megatron_flags
from posttrain.plan.flags.sglang_flags import engine_flags
from posttrain.plan.sizing.layout_choice import choose_layout

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "fixtures" / "launch_scripts"
# Of each script, what Megatron and SGLang are to get: the values as they stand in it.
ROUND_TRIPS = {
    "run-qwen3-4B.sh": {
        "num_layers": 36, "hidden_size": 2560, "ffn_hidden_size": 9728, "num_attention_heads": 32,
        "num_query_groups": 8, "kv_channels": 128, "layernorm_epsilon": 1e-6, "qk_layernorm": True,
        "add_bias_linear": False, "tensor_model_parallel_size": 2, "sequence_parallel": True,
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1, "lr": 2e-6,
        "weight_decay": 0.01, "adam_beta2": 0.999, "attention_dropout": 0.0, "grad_reduce_in_fp32": True,
        "optimizer_cpu_offload": False, "--tp-size": 2, "--mem-fraction-static": 0.6,
    },
    "run-qwen3-30B-A3B.sh": {
        "tensor_model_parallel_size": 4, "expert_model_parallel_size": 16, "expert_tensor_parallel_size": 1,
        "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "moe_token_dispatcher_type": "flex",
        "lr": 1e-6, "weight_decay": 0.1, "adam_beta2": 0.98, "--tp-size": 8, "--ep-size": 8, "--attn-dp-size": 8,
        "--enable-dp-lm-head": True, "--mem-fraction-static": 0.5, "--moe-a2a-backend": "deepep",
        "--max-running-requests": 256, "--watchdog-timeout": 1800,
    },
    "run_glm5.py": {
        "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4, "context_parallel_size": 2,
        "num_layers_in_last_pipeline_stage": 18, "expert_model_parallel_size": 32, "optimizer_cpu_offload": True,
        "overlap_cpu_optimizer_d2h_h2d": True, "moe_token_dispatcher_type": "flex", "--tp-size": 64,
        "--attn-dp-size": 64, "--moe-dense-tp-size": 1, "--attention-backend": "dsa", "--page-size": 64,
        "--dsa-decode-backend": "flashmla_sparse", "--kv-cache-dtype": "bf16", "--chunked-prefill-size": 131072,
        "--speculative-num-steps": 3, "--speculative-num-draft-tokens": 4, "--moe-a2a-backend": "deepep",
    },
}  # fmt: skip


def run(folder: Path, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_posttrain(*words, folder=folder)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def resolved(path: Path) -> Resolved:
    return merge(read_request(ROOT / "config", [path], []), ROOT / "config", choose_layout)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Each script's configuration, and what was told."""
    folder = tmp_path_factory.mktemp("imported")
    found = {}
    for name in ROUND_TRIPS:
        words = ["nodes=16"] if name.endswith(".py") else []
        told = run(folder, "import-flags", SCRIPTS / name, "--output", f"{name}.yaml", *words).stdout
        found[name] = (folder / f"{name}.yaml", told)
    return found


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_the_planner_gives_what_the_script_gives(imported: dict[str, tuple[Path, str]], name: str) -> None:
    config = resolved(imported[name][0]).config
    flags = {}
    for items in (megatron_flags(config) | engine_flags(config)).values():
        flags |= {item.name: item.value for item in items}
    assert {key: flags.get(key) for key in ROUND_TRIPS[name]} == ROUND_TRIPS[name]


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_it_can_be_planned(imported: dict[str, tuple[Path, str]], name: str, tmp_path: Path) -> None:
    assert run(tmp_path, "plan", "--configfile", imported[name][0]).stdout.splitlines()[-1].startswith("plan: ")


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_only_what_differs_is_written_with_its_flag_and_line(imported: dict[str, tuple[Path, str]], name: str) -> None:
    path = imported[name][0]
    written, lines = yaml.safe_load(path.read_text()), path.read_text().splitlines()
    base = merge({"site": "local", **{key: written[key] for key in ("model", "nodes")}}, ROOT / "config", choose_layout)
    for key, value in resolved(path).origins.items():
        if value == "--configfile" and not key.endswith("name"):
            assert getattr_dotted(resolved(path), key) != getattr_dotted(base, key), key
    values = [line for line in lines if line.startswith("  ") and not line.endswith(":") and "name:" not in line]
    assert all(f"({name}:" in line or ", as without the flag" in line for line in values)


def getattr_dotted(found: Resolved, key: str) -> object:
    value: object = found.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def test_the_experiment_is_the_scripts(imported: dict[str, tuple[Path, str]]) -> None:
    path, told = imported["run-qwen3-4B.sh"]
    config = resolved(path).config
    assert config.data.train_file == "/data/prompts/math.jsonl"
    assert (config.data.kind, config.data.heldout_file) == ("files", "/data/prompts/heldout.jsonl")
    assert (config.data.prompt_key, config.data.label_key, config.data.reward) == ("question", "answer", "math")
    assert (config.rollout.rollout_batch_size, config.rollout.num_samples_per_prompt) == (32, 16)
    assert (config.training.num_steps, config.training.global_batch_size) == (400, 256)
    assert (config.rollout.max_response_tokens, config.rollout.temperature) == (4096, 0.9)
    assert (config.algorithm.preset, config.algorithm.ratio_level) == ("gspo", "geometric")
    assert (config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high) == (3e-4, 4e-4)
    assert (config.algorithm.correction, config.algorithm.correction_high) == ("truncate", 3.0)
    assert (config.optimizer.lr_schedule, config.optimizer.lr_warmup_steps) == ("cosine", 10)
    assert config.optimizer.lr_floor == pytest.approx(0.1)
    assert "not taken over" not in told
    assert "0123456789abcdef" not in told + path.read_text()


def test_what_is_not_taken_over_is_listed_with_its_line(imported: dict[str, tuple[Path, str]]) -> None:
    path, told = imported["run-qwen3-30B-A3B.sh"]
    listed = path.read_text().partition("# Not taken over:")[2]
    for line in (
        "--actor-num-gpus-per-node ${GPUS} (run-qwen3-30B-A3B.sh:36): it depends on the branch in line 5",
        "--prompt-data $BASE_DIR/prompts.jsonl (run-qwen3-30B-A3B.sh:12): the script does not set BASE_DIR; stays",
        "--kl-loss-coef 0.001",
        "--sglang-cuda-graph-bs 1 2 4 $(seq 8 8 64) (run-qwen3-30B-A3B.sh:28): $(seq 8 8 64) is the output",
        "--dynamic-sampling-filter-path filters.check",
        "--lr-warmup-itres 10 (run-qwen3-30B-A3B.sh:33): not known here; did you mean '--lr-warmup-iters'?",
        "--num-rollout 3 (run-qwen3-30B-A3B.sh:35): it depends on the command before && in line 35",
        "${EXTRA_ARGS[@]}",
        "source models/not-there.sh",
    ):
        assert line in listed
    assert f"not taken over: {listed.count(chr(10)) - 1}" in told
    path, _ = imported["run_glm5.py"]
    listed = path.read_text().partition("# Not taken over:")[2]
    assert "--rollout-max-prompt-len {os.environ[LONGEST]} (run_glm5.py:45)" in listed
    assert "{logging_args(args)} (run_glm5.py:" in listed


def test_a_launcher_that_asks_for_its_nodes_leaves_branches_open(tmp_path: Path) -> None:
    told = run(tmp_path, "import-flags", SCRIPTS / "run_glm5.py").stdout
    assert "it depends on `args.num_nodes >= 16`" in told
    assert "--tensor-model-parallel-size 4 (run_glm5.py:" in told


def test_nothing_of_a_hostile_script_is_run_or_shown(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "hostile.sh", tmp_path)
    (tmp_path / "precious").mkdir()
    done = run(tmp_path, "import-flags", "hostile.sh", "--output", "my.yaml")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hostile.sh", "my.yaml", "precious"]
    written = (tmp_path / "my.yaml").read_text()
    assert "\x1b" not in done.stdout + written
    assert "0123456789abcdef" not in done.stdout + written
    config = resolved(tmp_path / "my.yaml").config
    assert config.data.label_key == 'a"; touch executed; echo "b'
    assert (config.optimizer.lr, config.rollout.max_response_tokens) == (1e-6, 1024)
    assert "/etc/passwd" in written
    assert "root:" not in written


def test_it_is_printed_where_no_file_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "import-flags", SCRIPTS / "run-qwen3-4B.sh", "model=qwen3_0.6b", "hardware=h200")
    written = yaml.safe_load(done.stdout)
    assert (written["model"], written["hardware"]) == ("qwen3_0.6b", "h200")
    assert "num_hidden_layers is 28 here" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_is_refused_is_written_and_told(tmp_path: Path) -> None:
    text = "python3 train.py --hf-checkpoint /x/Qwen3-4B --tensor-model-parallel-size 3 --rollout-batch-size 8"
    (tmp_path / "run.sh").write_text(text)
    done = run(tmp_path, "import-flags", "run.sh", "--output", "my.yaml", code=1)
    assert "parallel" in done.stderr
    assert "tensor_model_parallel_size: 3" in (tmp_path / "my.yaml").read_text()
    again = run(tmp_path, "import-flags", "run.sh", "--output", "my.yaml", code=1)
    assert_rejected(again.stderr, "file-exists", key="--output")


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        (None, (), "no such file"),
        (b"\x7fELF\0\0\xff", (), "it is not UTF-8"),
        (b"#!/bin/bash\necho hello --world\n", (), "no flag that is known here"),
        (b"", (), "no flag that is known here"),
        (b"python3 -m verl.trainer.main_ppo data.train_batch_size=8", (), "a script of verl"),
        (b"# as before\ntrl grpo --learning_rate 1e-6", (), "TRL's settings are not read"),
        (b"python3 train.py --loss-type sft_loss --lr 1e-6", (), "begin with recipe=sft"),
        (b"python3 train.py --lr 1e-6", (), "say which with model=NAME"),
        (b"python3 train.py --lr 1e-6 --hf-checkpoint /x/Qwen3-5B", (), "did you mean 'qwen3.5_4b'?"),
        (b"python3 train.py --lr 1e-6", ("model=tyni",), "did you mean 'tiny'?"),
        (b"python3 train.py --lr 1e-6", ("model=qwen3_4b", "nodse=2"), "did you mean 'nodes'?"),
    ],
)
def test_bad_input_is_one_clear_problem(
    tmp_path: Path, content: bytes | None, words: tuple[str, ...], expected: str
) -> None:
    if content is not None:
        (tmp_path / "run.sh").write_bytes(content)
    done = run(tmp_path, "import-flags", "run.sh", *words, code=1)
    assert "1 problem in the configuration" in done.stderr
    assert expected in done.stderr
    assert done.stdout == ""
