"""Which models are made and warmed up here, and what is said of others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from posttrain.plan.sizing.tiny_model import check_made

QWEN = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 300}


def problems_of(resolved: Any, model: str, **dimensions: Any) -> dict[str, Any]:
    arch = dataclasses.replace(resolved(model).config.model.architecture, **dimensions)
    return {problem.key.rpartition(".")[2]: problem for problem in check_made(arch)}


@pytest.mark.parametrize(
    ("model", "dimensions", "keys"),
    [
        ("tiny", {}, []),
        ("tiny", {"vocab_size": 64}, []),
        ("tiny", {"vocab_size": 63}, ["vocab_size"]),
        ("tiny", {"index_topk_freq": 2}, ["index_topk_freq"]),
        ("qwen3_4b", QWEN, []),
        ("qwen3_4b", {}, ["kind"]),
        ("moonlight", {"vocab_size": 8}, ["model_type", "vocab_size", "kind"]),
    ],
)
def test_what_is_made(resolved, model: str, dimensions: dict[str, Any], keys: list[str]) -> None:
    assert [*problems_of(resolved, model, **dimensions)] == keys


def test_what_is_not_made_is_told_with_what_would_be(resolved) -> None:
    told = problems_of(resolved, "moonlight", vocab_size=8, index_topk_freq=2)
    assert {key: (problem.value, problem.allowed) for key, problem in told.items() if key != "kind"} == {
        "model_type": ("deepseek_v3", "glm_moe_dsa, qwen3, qwen3_5, qwen3_5_moe"),
        "index_topk_freq": ("2", "1, to be made"),
        "vocab_size": ("8", "at least 64"),
    }
    assert [problem.remedy.split()[0] for problem in told.values()] == ["only", "the", "the", "take"]


def test_a_hundred_million_parameters_are_made_and_no_more(resolved) -> None:
    """By hand, of one layer: 32 (2 words + 3 300 of its MLP + 2 32 + 2 16 of attention + 3 of norms) + 2 16."""
    shape = {**QWEN, "num_hidden_layers": 1, "tie_word_embeddings": False}
    assert 32 * (2 * 1_562_000 + 3 * 300 + 2 * 32 + 2 * 16 + 3) + 2 * 16 == 100_000_000
    assert not problems_of(resolved, "qwen3_4b", **shape, vocab_size=1_562_000)
    (problem,) = problems_of(resolved, "qwen3_4b", **shape, vocab_size=1_562_001).values()
    assert "100,000,064 parameters" in problem.value
    assert "100,000,000 parameters" in problem.allowed


def test_layers_that_only_draft_are_counted_too(resolved) -> None:
    hidden = resolved("tiny").config.model.architecture.hidden_size
    # Beside both matrices of words there is room for the trained layers, and for no other one.
    words = (100_000_000 - 284_160) // (2 * hidden)
    assert not problems_of(resolved, "tiny", vocab_size=words, num_nextn_predict_layers=0)
    assert [*problems_of(resolved, "tiny", vocab_size=words, num_nextn_predict_layers=1)] == ["kind"]
