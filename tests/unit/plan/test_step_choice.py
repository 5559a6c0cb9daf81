"""What is searched together: modules or layers to recompute, offload, context parallelism and chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.published_layout import PUBLISHED_LAYOUT

from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.step_choice import (
    CONTEXT,
    GRANULARITY,
    KEPT,
    KEYS,
    NEARLY,
    TOKENS,
    _values_of,
    candidates,
    step_choice_part,
)
from posttrain.plan.timing.step_time import training_seconds

CONFIG = Path(__file__).parents[3] / "config"
OLD_CUT = PUBLISHED_LAYOUT.removesuffix("trainer.recompute_granularity=full")


def resolved(model: str, settings: str = "", **words: Any):
    words["set"] = f"trainer.recompute_granularity=auto {settings}"
    return resolve({"site": "local", "model": model, **words}, CONFIG)


@pytest.fixture(scope="module")
def glm5():
    return resolved("glm5", nodes=16, recipe="production")


def test_glm5_computes_modules_again_and_has_the_optimizers_state_on_the_host(glm5) -> None:
    trainer = glm5.config.trainer
    assert (trainer.recompute_granularity, trainer.optimizer_cpu_offload) == ("selective", True)
    assert "mla_up_proj" in trainer.recompute_modules
    assert glm5.origins["trainer.recompute_modules"] == "planner"
    words = {"model": "glm5", "nodes": 16, "recipe": "production", "set": PUBLISHED_LAYOUT}
    plain = resolve({"site": "local", **words}, CONFIG).config
    assert training_seconds(glm5.config) < 0.85 * training_seconds(plain)


def test_rows_are_cut_where_that_saves_recomputation(glm5) -> None:
    """Four ranks for a row of 32,768 tokens are what the search takes where nothing gives them."""
    found = candidates(glm5.config, {*KEYS})
    (chosen,) = (each for each in found if each.values == _values_of(glm5.config))
    assert chosen.seconds <= next(each.seconds for each in found if each.fits) * (1 + NEARLY)
    budgets = {(each.values[CONTEXT], each.values[TOKENS]) for each in found}
    assert (2, 16384) in budgets, "the plainest"
    assert all(tokens * context >= 32768 for context, tokens in budgets), "a row has room for a response"


def test_a_kept_choice_is_searched_where_layers_are_computed_again_in_full() -> None:
    """GLM-5.2's layers take it over anyway; with kernels it gains less than a hundredth, and takes memory."""
    config = resolved("glm5", f"{OLD_CUT} trainer.recompute_num_layers=1", nodes=16).config
    assert {each.values[KEPT] for each in candidates(config, {GRANULARITY, KEPT})} == {"none", "all"}
    words = f"{OLD_CUT} trainer.recompute_num_layers=1 trainer.indexer_kernel=torch"
    in_torch = resolved("glm5", words, nodes=16).config
    assert in_torch.trainer.keep_index_choice == "all"
    shared = resolved("glm5.2", "trainer.recompute_num_layers=1", nodes=16).config
    assert {each.values[KEPT] for each in candidates(shared, {GRANULARITY, KEPT})} == {"none"}


def test_the_table_has_the_chosen_one_and_what_is_done_without_a_search(glm5) -> None:
    rows = step_choice_part(glm5.config, glm5.origins)
    (chosen,) = (row for row in rows if row["is_chosen"])
    assert chosen["fits"]
    assert chosen["peak_gib"] <= 140.4 * (1 - ASSUMPTIONS.headroom)
    fastest = min(row["seconds"] for row in rows if row["fits"])
    assert chosen["seconds"] <= fastest * (1 + NEARLY)
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert any(row["recomputation"] == "all layers" and not row["optimizer_cpu_offload"] for row in rows)
    assert any(row["seconds"] < chosen["seconds"] and not row["fits"] for row in rows), "why not faster"


def test_what_is_given_stays() -> None:
    settings = "trainer.optimizer_cpu_offload=false parallel.virtual_pipeline_model_parallel_size=1"
    config = resolved("glm5", settings, nodes=16).config
    assert not config.trainer.optimizer_cpu_offload
    assert config.parallel.virtual_pipeline_model_parallel_size == 1
    assert config.parallel.context_parallel_size == 4, "the recipe's"
    chunked = resolved("glm5", "trainer.recompute_num_layers=2", nodes=16).config.trainer
    assert (chunked.recompute_granularity, chunked.recompute_num_layers) == ("full", 2)


@pytest.mark.parametrize(("model", "words"), [("tiny_qwen3", {}), ("tiny", {}), ("qwen3_0.6b", {"nodes": 1})])
def test_nothing_is_computed_again_where_memory_is_free(model: str, words: dict[str, Any]) -> None:
    config = resolved(model, "trainer.max_tokens_per_gpu=4352", **words).config
    assert config.trainer.recompute_granularity == "none"
    assert not config.trainer.optimizer_cpu_offload


def test_a_cpu_without_room_recomputes_all_layers() -> None:
    config = resolved("tiny_qwen3", "hardware.memory_gib_per_gpu=1 hardware.gpus_per_node=1").config
    full = resolved("tiny_qwen3", "hardware.memory_gib_per_gpu=0.01 hardware.gpus_per_node=1").config
    assert config.trainer.recompute_granularity == "none"
    assert full.trainer.recompute_granularity == "full"


def test_without_auto_nothing_is_searched() -> None:
    words = {"model": "glm5", "nodes": 16, "set": "trainer.recompute_granularity=full"}
    plain = resolve({"site": "local", **words}, CONFIG)
    assert plain.config.trainer.recompute_granularity == "full"
    assert step_choice_part(plain.config, plain.origins) == []
