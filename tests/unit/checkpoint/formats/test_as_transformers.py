"""Every change of a config.json that changes the outputs of transformers' model is rejected, or read."""

import copy
import importlib
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.tiny_checkpoint import ALL, FAMILIES, QWEN3_5, TINY_QWEN3_MOE, TINY_YARN, transformers_config

from posttrain.checkpoint.formats.as_transformers import hub_config
from posttrain.checkpoint.formats.hf_config import check_config, fixed_values
from posttrain.config.families import family_of, modelling_module

ARCHITECTURES = {**ALL, **QWEN3_5}
TOKENS = torch.arange(1, 49).reshape(1, -1) % 61 + 1
# Said nowhere, or not by all families; with each of these values.
ADDED: dict[str, list[Any]] = {
    "rope_scaling": [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "default", "rope_theta": 100.0},
        {"type": "linear", "factor": 2.0},
        {"partial_rotary_factor": 0.5},
    ],
    "rope_theta": [100.0, 500_000],
    "partial_rotary_factor": [0.5, 1.0, 0.25],
    "head_dim": [1, 2, 4, 8, 64],
    "qk_head_dim": [1, 8],
    "original_max_position_embeddings": [8, 16],
    "is_causal": [False],
    "use_sliding_window": [True],
    "sliding_window": [4],
    "attention_chunk_size": [4],
    "use_bidirectional_attention": [True],
    "layer_types": [["sliding_attention"] * 3, ["full_attention"] * 3],
    "mlp_only_layers": [[0], [0, 1, 2]],
    "decoder_sparse_step": [2],
    "norm_topk_prob": [True, False],
    "num_experts": [2, 8],
    "num_local_experts": [2, 8],
    "index_topk_freq": [2],
    "index_topk_pattern": ["FSS", "FSSS"],
    "index_skip_topk_offset": [1],
    "tie_word_embeddings": [True, False],
    "hidden_act": ["gelu", "relu"],
    "quantization_config": [{"quant_method": "fp8"}],
    "use_qk_norm": [True, False],
    "attn_logit_softcapping": [1.0],
    "final_logit_softcapping": [0.1],
    "num_mtp_layers": [0, 2],
    "full_attention_interval": [1, 2, 4],
    "linear_num_key_heads": [1, 2, 4],
    "linear_num_value_heads": [2, 8],
    "linear_key_head_dim": [8, 32],
    "linear_conv_kernel_dim": [2, 3, 8],
    "attn_output_gate": [False],
    "output_gate_type": ["sigmoid"],
    "dtype": ["float32", None],
    "torch_dtype": ["float16"],
}
ADDED_TO_ROPE = {"mscale": 0.7, "mscale_all_dim": 0.7, "attention_factor": 2.0, "truncate": False}
TOGETHER = ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},)
NESTED = ("text_config", "decoder", "generator")


@cache
def _content(name: str) -> dict[str, Any]:
    arch = ARCHITECTURES[name]
    if name in QWEN3_5:  # with every key that the published files have and transformers ignores
        return hub_config(arch, fixed_values(arch))
    return dict(transformers_config(arch, arch.num_hidden_layers).to_dict()) | {"dtype": "bfloat16"}


def _others(value: Any) -> Iterator[Any]:
    """Yield other values of a key."""
    yield None
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value * 2, value + 1, value // 2 if isinstance(value, int) else value / 2, 0, 1, float(value))
    elif isinstance(value, str):
        yield from ("relu", "linear", "sliding_attention")
    elif isinstance(value, list):
        yield from ([], value[::-1], value[:1] * len(value), value[-1:] * len(value))


def changes_of(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every changed file, with what was changed."""
    parts = {name: content[name] for name in ("text_config", "vision_config") if name in content}
    top = {key: value for key, value in content.items() if key not in parts}
    for change, section in itertools.chain(_changes_of_keys(top), () if parts else _changes_of_rope(top)):
        yield f"top: {change}", {**parts, **section}
    for name, part in parts.items():
        yield f"without {name}", {key: value for key, value in content.items() if key != name}
        for change, section in itertools.chain(_changes_of_keys(part), _changes_of_rope(part)):
            yield f"{name}: {change}", {**content, name: section}


def _changes_of_keys(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in content.items():
        yield f"without {key}", {name: kept for name, kept in content.items() if name != key}
        for other in (*_others(value), *ADDED.get(key, ())):
            yield f"{key}={other!r}", {**content, key: other}
    for key, values in ADDED.items():
        for value in values if key not in content else ():
            yield f"with {key}={value!r}", {**content, key: value}
    for more in TOGETHER:
        yield f"with {more}", {**content, **more}
    other = {**content, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    for key in NESTED:
        kept = {name: content[name] for name in ("model_type", "architectures") if name in content}
        yield f"nested in {key}", {**kept, key: content}
        yield f"with {key}", {**content, key: other}


def _changes_of_rope(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    rope = content.get("rope_parameters", {"rope_theta": 10_000.0, "rope_type": "axial"})
    for key, value in {**ADDED_TO_ROPE, **rope}.items():
        yield f"rope without {key}", {**content, "rope_parameters": {name: rope[name] for name in rope if name != key}}
        for other in (value, *_others(value)):
            yield f"rope {key}={other!r}", {**content, "rope_parameters": {**rope, key: other}}
    bare = {name: value for name, value in content.items() if name != "rope_parameters"}
    flat = {"rope_theta": rope["rope_theta"]}
    yield "rope by rope_scaling", {**bare, **flat, "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    yield "rope by rope_scaling, without theta", {**bare, "rope_scaling": rope}
    for kind in ("full_attention", "sliding_attention"):
        yield f"rope nested for {kind}", {**content, "rope_parameters": {kind: {**rope, "rope_theta": 100.0}}}


def _model(name: str, content: dict[str, Any]) -> Any:
    module = importlib.import_module(modelling_module(ARCHITECTURES[name].model_type))
    model_class = getattr(module, family_of(ARCHITECTURES[name]).hub_class)
    content = copy.deepcopy(content) | {"dtype": "float32"}
    for part in (part for part in content.values() if isinstance(part, dict) and "dtype" in part):
        part["dtype"] = "float32"
    config = model_class.config_class.from_dict(content)
    config._attn_implementation = "eager"
    return model_class(config).eval()


@cache
def _weights(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    model = _model(name, _content(name))
    weights = {key: torch.randn_like(tensor) * 0.3 for key, tensor in model.state_dict().items()}
    model.load_state_dict(weights)
    with torch.no_grad():
        return weights, model(TOKENS).logits


def _changes_logits(name: str, content: dict[str, Any]) -> bool:
    """Tell whether the same weights give other logits; a model that takes them not is no silent change."""
    weights, logits = _weights(name)
    try:
        model = _model(name, content)
        model.load_state_dict(weights)
        with torch.no_grad():
            found = model(TOKENS).logits
    except Exception:  # transformers rejects the file, or the weights' shapes do
        return False
    return bool((found - logits).abs().max() > 1e-5 * logits.abs().max())


def _silent(name: str, one_in: int) -> tuple[list[str], int]:
    """Return the changes of the outputs that pass, and how many changes were tried."""
    arch, passed, tried = ARCHITECTURES[name], [], 0
    for change, changed in itertools.islice(changes_of(_content(name)), 0, None, one_in):
        tried += 1
        is_accepted = not [problem for problem in check_config(changed, arch, {}) if problem.key != "tensors"]
        if is_accepted and _changes_logits(name, changed):
            passed.append(change)
    return passed, tried


@pytest.mark.parametrize("name", {**FAMILIES, **QWEN3_5})
def test_of_some_changes_none_that_changes_the_outputs_passes(name: str) -> None:
    assert not [
        problem for problem in check_config(_content(name), ARCHITECTURES[name], {}) if problem.key != "tensors"
    ]
    passed, tried = _silent(name, one_in=29)
    assert not passed
    assert tried >= 10


@pytest.mark.faults("configs")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_change_of_the_outputs_passes(name: str) -> None:
    passed, tried = _silent(name, one_in=1)
    assert not passed
    assert tried > 300


def test_what_is_left_out_has_the_default_of_transformers() -> None:
    content = {key: value for key, value in _content("qwen3_moe").items() if key != "norm_topk_prob"}
    (problem,) = [p for p in check_config(content, TINY_QWEN3_MOE, {}) if p.key != "tensors"]
    assert (problem.key, problem.value) == ("config.json: norm_topk_prob", "False to transformers, being left out")


def test_scaling_said_beside_the_parameters_is_what_counts() -> None:
    content = _content("deepseek_v3_yarn") | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert "config.json: rope_scaling.factor" in [problem.key for problem in check_config(content, TINY_YARN, {})]
