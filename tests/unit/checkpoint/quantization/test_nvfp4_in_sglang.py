"""What SGLang's own code makes of our NVFP4 checkpoints: format, what stays in BF16, name, shape and type of tensors.

Its kernels need Blackwell, so nothing is computed here; its parser and its parameters are the pinned version's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.sglang_environment import require_sglang, run_in_sglang

from posttrain.checkpoint.param_names import expected_tensors
from posttrain.checkpoint.quantization.nvfp4 import Nvfp4Format
from posttrain.checkpoint.quantization.quantized_names import Selection
from posttrain.plan.resolve import resolve

pytestmark = pytest.mark.sglang

SHAPE = {"gate_proj": (2048, 6144), "up_proj": (2048, 6144), "down_proj": (6144, 2048)}
# Modules as SGLang names them while it builds GLM-5, and whether their weights are NVFP4.
MODULES = {
    "model.layers.5.mlp.experts": True,
    "model.layers.77.mlp.experts": True,
    "model.layers.5.mlp.shared_experts.down_proj": False,
    "model.layers.5.mlp.gate": False,
    "model.layers.0.mlp.gate_up_proj": False,
    "model.layers.5.self_attn.o_proj": False,
    "model.layers.5.self_attn.fused_qkv_a_proj_with_mqa": False,
    "model.layers.5.self_attn.indexer.wq_b": False,
    "model.layers.78.mlp.experts": False,
    "lm_head": False,
}
READ = """
import json, sys
from types import SimpleNamespace
import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptNvFp4FusedMoEMethod
given = json.load(sys.stdin)
for quantization in given["configs"]:
    config = ModelOptFp4Config.from_config(quantization)
    print("RESULT", json.dumps({name: not config.is_layer_excluded(name) for name in given["modules"]}))
layer = torch.nn.Module()
layer.num_local_experts = layer.num_experts = 2
layer.moe_runner_config = SimpleNamespace(is_gated=True, intermediate_size_per_partition=2048)
# Without its constructor, which wants a Blackwell GPU.
method = object.__new__(ModelOptNvFp4FusedMoEMethod)
method.quant_config, method.enable_flashinfer_trtllm_moe = config, False
method.create_weights(layer, 2, 6144, 2048, torch.bfloat16, weight_loader=None)
places = {}
for parameter, weight, expert, shard in FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 2):
    for name in given["tensors"]:
        if weight in name:
            found = getattr(layer, name.replace(weight, parameter).rpartition("experts.")[2])
            places[name] = [list(found.shape), str(found.dtype)]
print("RESULT", json.dumps(places))
"""


@pytest.fixture(scope="module")
def ours():
    """Our configs for GLM-5, and the tensors that two of its experts become."""
    workflow = {"model": "glm5", "site": "local"}
    arch = resolve(workflow, Path("config")).config.model.architecture
    specs = expected_tensors(arch)
    form = Nvfp4Format(Selection(("experts",), num_layers=arch.num_hidden_layers, mtp=False))
    tensors = {}
    for expert in range(2):
        for projection, shape in SHAPE.items():
            name = f"model.layers.5.mlp.experts.{expert}.{projection}.weight"
            tensors |= form.quantize(name, torch.ones(shape, dtype=torch.bfloat16), torch.tensor(1.0))
    other = next(iter(form.other_files(specs).values()))
    return [form.quantization_config(specs), other], tensors


@pytest.fixture(scope="module")
def theirs(ours):
    require_sglang()
    configs, tensors = ours
    return run_in_sglang(READ, {"configs": configs, "modules": list(MODULES), "tensors": list(tensors)})


def test_what_is_quantised_is_what_sglang_expects(theirs):
    from_config_json, from_hf_quant_config, _ = theirs
    assert from_config_json == from_hf_quant_config == MODULES


def test_every_tensor_has_its_place_shape_and_type(ours, theirs):
    _, tensors = ours
    places = theirs[-1]
    assert places.keys() == tensors.keys()
    for name, tensor in tensors.items():
        shape, dtype = places[name]
        assert dtype == str(tensor.dtype), name
        is_joined = "down_proj" not in name
        if tensor.dim() == 2:
            assert shape == [2, tensor.shape[0] * (2 if is_joined else 1), tensor.shape[1]], name
        else:
            assert shape == ([2, 2] if is_joined else [2]), name
