"""Conversions compared with those of megatron-bridge, which runs in an environment of its own on Python 3.12."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.folders_in_parts import make_folder
from tests.support.requirements import require
from tests.support.tiny_checkpoint import ALL, make_random_checkpoint
from tests.support.workflow_runs import ROOT

from posttrain.checkpoint.formats.torch_dist import Conversion
from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.config.families import family_of
from posttrain.config.schema import Architecture

ENVIRONMENT = ROOT / ".envs" / "bridge"
PROGRAM = ROOT / "tests" / "support" / "bridge_weights.py"
UNKNOWN = {"DeepseekV32ForCausalLM": "megatron-bridge 0.6.2 has DeepSeek-V2, V3 and V4"}
KNOWN = {name: arch for name, arch in ALL.items() if family_of(arch).hub_class not in UNKNOWN}

pytestmark = pytest.mark.faults("bridge")


@pytest.fixture(scope="module")
def bridged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a folder of what both made of a random checkpoint of each family, and the classes that are unknown."""
    ready = (ENVIRONMENT / ".ready").exists()
    require("bridge", "" if ready else "no environment of megatron-bridge: `make env-bridge`")
    root = tmp_path_factory.mktemp("bridged")
    for name, arch in ALL.items():
        make_random_checkpoint(root / name / "hf", arch, seed=2)
        make_folder(Conversion(root / name / "hf", "s1", arch), root / name / "torch_dist", num_parts=2)
        write_config_of_the_hub(root / name / "hf" / "config.json", arch)
    request = {str(root / name / "hf"): str(root / f"{name}.safetensors") for name in ALL}
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(ENVIRONMENT / "bin" / "python"), str(PROGRAM), json.dumps(request)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return root, json.loads(ended.stdout.strip().splitlines()[-1])


def write_config_of_the_hub(path: Path, arch: Architecture) -> None:
    """Say what GLM-5's own file says, and leave out what transformers calls otherwise in the version of the bridge."""
    values = json.loads(path.read_text())
    values.pop("layer_types", None)
    if arch.model_type == "glm_moe_dsa":
        values["indexer_rope_interleave"] = True
    path.write_text(json.dumps(values))


def test_it_knows_every_family_but_those_named_here(bridged: tuple[Path, list[str]]) -> None:
    assert sorted(bridged[1]) == sorted(UNKNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_every_tensor_has_the_same_name_shape_type_and_values(bridged: tuple[Path, list[str]], name: str) -> None:
    theirs, reader = load_file(bridged[0] / f"{name}.safetensors"), TorchDistReader(bridged[0] / name / "torch_dist")
    assert theirs.keys() == set(reader.keys)
    for key, tensor in theirs.items():
        ours = reader.read(key)
        assert (ours.shape, ours.dtype) == (tensor.shape, tensor.dtype), key
        assert torch.equal(ours, tensor), key
