"""What the project offers, and the demos on GPUs, run through a rehearsal: no problem, and the plan's memory."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.megatron_single import CONFIG_DIR
from tests.support.rehearsals import hold_against_plan, rehearsed
from tests.support.workflow_runs import ROOT

from posttrain.plan.resolve import resolve
from posttrain_rehearsal.rank_subset import members

# A few parameters on one node: rehearsed at every change, where the environment is there.
FAST = ("qwen3_0.6b_1", "tiny_1")
DEMOS = ("tiny_1", "tiny_qwen3_1", "tiny_qwen3.5_1", "tiny_qwen3.5_moe_1")
RECIPES = sorted({path.stem for path in (ROOT / "config" / "nodes").glob("*.yaml")} | {*FAST, *DEMOS})
# What recipes leave as it is: stages that interleave, and what is not recomputed layer by layer.
OTHERS = {
    "three stages of two chunks": (
        "glm5_20layer_6",
        "parallel.tensor_model_parallel_size=4 parallel.pipeline_model_parallel_size=3"
        " parallel.num_layers_in_last_pipeline_stage=4 parallel.virtual_pipeline_model_parallel_size=2",
    ),
    "nothing is recomputed": (
        "qwen3_30b_a3b_4",
        "trainer.recompute_granularity=none trainer.max_tokens_per_gpu=8192",
    ),
    "four layers at a time": ("qwen3_0.6b_1", "trainer.recompute_num_layers=4"),
}
OFFLOAD = "trainer.optimizer_cpu_offload=true trainer.params_dtype=bf16 parallel.tensor_model_parallel_size=1"


def request_of(recipe: str) -> dict[str, Any]:
    model, _, nodes = recipe.rpartition("_")
    on_gpus = {"hardware": "h100"} if recipe in DEMOS else {}
    return {"site": "local", "model": model, "nodes": int(nodes), "quick": 1, **on_gpus}


def test_every_recipe_is_named() -> None:
    models = {path.stem for path in (ROOT / "config" / "models").glob("*.yaml")}
    assert {recipe.rpartition("_")[0] for recipe in RECIPES} == models
    assert {*FAST} <= {*RECIPES}


@pytest.mark.parametrize(
    "recipe", [name if name in FAST else pytest.param(name, marks=pytest.mark.faults("rehearsal")) for name in RECIPES]
)
def test_a_recipe_runs_through(recipe: str) -> None:
    hold_against_plan(is_clean(**request_of(recipe)), **request_of(recipe))


@pytest.mark.faults("rehearsal")
def test_an_optimizer_in_host_memory_runs_through() -> None:
    is_clean(**request_of("tiny_1"), set=OFFLOAD)


@pytest.mark.faults("rehearsal")
@pytest.mark.parametrize("name", OTHERS)
def test_another_layout_runs_through(name: str) -> None:
    recipe, settings = OTHERS[name]
    # Of few layers none are recomputed together.
    request = {**request_of(recipe), "quick": int(recipe != "qwen3_0.6b_1"), "set": settings}
    found = rehearsed(**request)
    assert (found["errors"], found["problems"]) == ({}, [])
    hold_against_plan(found, **request)


@pytest.mark.faults("rehearsal")
def test_all_layers_and_stages_of_glm5_run_through() -> None:
    """Its memory is not the plan's for any layer."""
    request = {**request_of("glm5_16"), "quick": 0}
    found = is_clean(**request)
    assert (found["layers"], len(found["ranks"])) == (78, 16)
    of_step = [row for row in found["memory"] if row["step"] == 2 and row["phase"] in ("old_logprobs", "train")]
    assert [row for row in of_step if row["whole_gib"] != row["peak_gib"]] == []
    hold_against_plan(found, **request)


def is_clean(**request: Any) -> dict[str, Any]:
    found = rehearsed(**request)
    assert found["problems"] == []
    assert found["ranks"] == members(resolve(request, CONFIG_DIR).config, quick=bool(request["quick"]))
    phases = {row["phase"] for row in found["memory"] if row["step"] == 2}
    assert {"old_logprobs", "train", "weight_sync", "save", "resume"} <= phases
    fullest = {name: max(row["peak_gib"] for row in found["memory"] if row["phase"] == name) for name in phases}
    assert fullest.pop("resume") <= max(fullest.values()), "what ran can go on"
    assert max(row["kernels"] for row in found["memory"] if row["phase"] == "save") > 0, "tensors go to the host"
    return found
