"""The script as bash and patch read it."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.support.serving_cases import checkpoint, launch, launches, machine
from tests.support.small_checkpoint import tokenizer_config, write_object
from tests.support.tiny_checkpoint import TINY, transformers_config

from posttrain.plan.flags.flag import flag
from posttrain_serving.launch import plan_launch
from posttrain_serving.script import patch_of, reason_of, render
from posttrain_serving.serve_request import ServeRequest

ORIGINS = {"hardware.kernels.dsa_decode": "config/hardware/b200.yaml"}


@pytest.mark.parametrize("name", ["b200-fp8", "card", "prefill-apart", "index-cache", "vllm-nodes", "h100-bf16"])
def test_bash_reads_the_words_that_were_meant(name: str) -> None:
    text = render(launches()[name], checkpoint("glm5"), ORIGINS)
    programs = {process.program[0] for process in launches()[name].processes}
    show = "".join(f'{program}() {{ printf "%s\\n" "$(printf "%q " "$@")"; }}\n' for program in programs)
    done = subprocess.run(["bash", "-euc", show + text], capture_output=True, text=True, check=True)
    told = [shlex.split(line) for line in done.stdout.splitlines()]
    assert told == [list(process.argv[1:]) for process in launches()[name].processes]
    assert max(len(line) for line in text.splitlines() if line.startswith("#") and "index_topk" not in line) <= 120


def test_each_flag_has_its_reason_and_its_file_once() -> None:
    text = render(launches()["h100-bf16"], checkpoint("glm5"), ORIGINS)
    for name in ("--tp-size 32:", "--speculative-num-steps 3:", "--node-rank 3:"):
        assert text.count(f"#   {name}") == 1
    item = flag("--dsa-decode-backend", "trtllm", "hardware.kernels.dsa_decode", reason="so")
    assert reason_of(item, ORIGINS) == "so (hardware.kernels.dsa_decode in config/hardware/b200.yaml)"
    assert reason_of(flag("--x", 1, "engine.port"), ORIGINS) == "engine.port"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "with space"
    made.mkdir()
    (made / "config.json").write_text(transformers_config(TINY, TINY.num_hidden_layers).to_json_string(use_diff=False))
    write_object(made / "tokenizer_config.json", tokenizer_config())
    return made


def test_the_patch_makes_tensorrt_llms_changes(folder: Path, tmp_path: Path) -> None:
    before = {name: json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json")}
    subprocess.run(["bash", "-euc", patch_of(checkpoint(str(folder)))], check=True, capture_output=True)
    after = {name: json.loads((folder / name).read_text()) for name in before}
    assert after["config.json"] == before["config.json"] | {
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
    }
    old, new = before["tokenizer_config.json"], after["tokenizer_config.json"]
    assert (old["tokenizer_class"], new["tokenizer_class"]) == ("TokenizersBackend", "PreTrainedTokenizerFast")
    assert new["additional_special_tokens"] == old["extra_special_tokens"]
    assert "extra_special_tokens" not in new


def test_the_yaml_is_written_where_the_command_looks(tmp_path: Path) -> None:
    found = launch("warnold-nv/GLM-5-nvfp4-v1", "b200", engine="trtllm")
    text = render(found, checkpoint("warnold-nv/GLM-5-nvfp4-v1"), {})
    done = subprocess.run(
        ["bash", "-euc", "trtllm-serve() { :; }\n" + text], cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stderr == b""
    assert yaml.safe_load((tmp_path / "config.yml").read_text()) == found.files["config.yml"]
    for change in ('"model_type" becomes "deepseek_v32"', '"PreTrainedTokenizerFast"', '"additional_special_tokens"'):
        assert change in text


def test_the_embedded_engine_has_its_secret_from_the_environment(folder: Path) -> None:
    found = checkpoint(str(folder))
    text = render(plan_launch(ServeRequest(engine="embedded"), found, machine("cpu")), found, {})
    done = subprocess.run(
        ["bash", "-euc", text], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False
    )
    assert done.returncode != 0
    assert "POSTTRAIN_ENGINE_SECRET: a text that only those who may ask know" in done.stderr
