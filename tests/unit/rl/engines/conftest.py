import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.tiny_checkpoint import ALL, QWEN3_5, random_tensors, transformers_config, write_shards

from posttrain.checkpoint.quantization.fp8 import quantize_named

ARCHITECTURES = {**ALL, **QWEN3_5}


def strong_tensors(model_type: str, seed: int) -> dict[str, torch.Tensor]:
    """Random weights large enough that attention is sharp, and a wrong key shows in the log-probabilities."""
    tensors = random_tensors(ARCHITECTURES[model_type], seed)
    return {
        name: (tensor.float() * 4).to(tensor.dtype) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()
    }


def write_checkpoint(folder: Path, model_type: str, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    architecture = ARCHITECTURES[model_type]
    transformers_config(architecture, architecture.num_hidden_layers).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}\n')
    write_shards(folder, tensors, num_shards=3)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small tensors on threads that wait for each other cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=sorted(ARCHITECTURES))
def model_type(request):
    return request.param


@pytest.fixture(scope="session")
def tensors():
    """Weights of version "default", as tensors of the Hub."""
    return strong_tensors("glm_moe_dsa", seed=0)


@pytest.fixture(scope="session")
def new_tensors():
    """Weights of an update."""
    return strong_tensors("glm_moe_dsa", seed=1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tensors):
    return write_checkpoint(tmp_path_factory.mktemp("bf16") / "hf", "glm_moe_dsa", tensors)


@pytest.fixture(scope="session")
def fp8_checkpoint(tmp_path_factory, checkpoint, tensors):
    """The same weights in FP8 blocks, in Hub layout."""
    folder = tmp_path_factory.mktemp("fp8") / "hf"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    quantised = dict(pair for name, tensor in tensors.items() for pair in quantize_named(name, tensor))
    write_shards(folder, quantised, num_shards=3)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
