"""The plan's memory against the rehearsal's, of combinations drawn by a fixed seed; `test_recipes` has the recipes."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest
from tests.support.megatron_single import CONFIG_DIR
from tests.support.rehearsals import hold_against_plan, rehearsed

from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve

SEED, NUM_DRAWN = 20261128, 30
MODELS = sorted(path.stem for path in (CONFIG_DIR / "models").glob("*.yaml"))
# Those whose kernels are the rehearsal's: of NVIDIA.
HARDWARE = ("b200", "gb300", "h100", "h200")
MOST_NODES = 16


@lru_cache
def drawn() -> list[dict[str, Any]]:
    """Return combinations that have a layout; the others are refused before there is a plan."""
    source, found, seen = random.Random(SEED), [], set()
    while len(found) < NUM_DRAWN:
        words = source.choice(MODELS), source.choice(HARDWARE), source.randint(1, MOST_NODES)
        if words in seen:
            continue
        seen.add(words)
        model, hardware, nodes = words
        try:
            request = {"site": "local", "model": model, "hardware": hardware, "nodes": nodes, "quick": 1}
            resolve(request, CONFIG_DIR)
        except ConfigError:
            continue
        found.append(request)
    return found


@pytest.mark.faults("rehearsal-plan")
@pytest.mark.parametrize("number", range(NUM_DRAWN))
def test_a_combination(number: int) -> None:
    outcome = rehearsed(**drawn()[number])
    assert outcome["errors"] == {}
    hold_against_plan(outcome, **drawn()[number])
