"""Every published recipe, and the demos on GPUs, are rehearsed and have no problem of the trainer's own."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.support.megatron_single import CONFIG_DIR
from tests.support.rehearsals import require_rehearsal
from tests.support.workflow_runs import ROOT

from posttrain.planner.resolve import resolve
from posttrain.rehearsal.members import members
from posttrain.rehearsal.start import rehearse

# A few parameters on one node: rehearsed at every change, where the environment is there.
FAST = ("qwen3_0.6b_1", "tiny_1")
DEMOS = ("tiny_1", "tiny_qwen3_1")
RECIPES = sorted({path.stem for path in (ROOT / "config" / "nodes").glob("*.yaml")} | {*FAST, *DEMOS})
# Problems that are known, by an expression that the value meets, and what owns them.
OWNED: dict[str, str] = {}


def request_of(recipe: str) -> dict[str, Any]:
    model, _, nodes = recipe.rpartition("_")
    on_gpus = {"hardware": "h100"} if recipe in DEMOS else {}
    return {"site": "local", "model": model, "nodes": int(nodes), **on_gpus}


def test_every_recipe_is_named() -> None:
    models = {path.stem for path in (ROOT / "config" / "models").glob("*.yaml")}
    assert {recipe.rpartition("_")[0] for recipe in RECIPES} == models
    assert {*FAST} <= {*RECIPES}


@pytest.mark.parametrize(
    "recipe", [name if name in FAST else pytest.param(name, marks=pytest.mark.faults("rehearsal")) for name in RECIPES]
)
def test_a_recipe_runs_through(recipe: str) -> None:
    require_rehearsal()
    resolved = resolve(request_of(recipe), CONFIG_DIR)
    found = rehearse(resolved)
    known = [word for word in OWNED if any(re.search(word, problem["value"]) for problem in found["problems"])]
    others = [row for row in found["problems"] if not any(re.search(word, row["value"]) for word in known)]
    assert others == []
    assert found["ranks"] == members(resolved.config)
    assert {row["phase"] for row in found["memory"]} >= {"build", "old_logprobs", "train", "save"}
