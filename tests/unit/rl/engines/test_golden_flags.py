"""Every flag of every branch x hardware x switch, pinned.

A golden file changes on purpose only. To write them anew, from the root of the clone:

    python -m tests.unit.rl.engines.test_golden_flags
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support.flag_cases import CASES, flag_case, flag_cases

from posttrain.plan.flags.rendered import rendered_flags
from posttrain.plan.flags.sglang_flags import roles, sglang_flags

GOLDEN = Path(__file__).parent / "golden"


def text_of(name: str) -> str:
    """Return a case's flags, a line each; the layers that set the keys are left out: they depend on the test."""
    resolved = flag_case(name)
    flags = rendered_flags(resolved.config, resolved.origins)
    return "".join(f"{key} = {json.dumps(item['value'])}\n" for key, item in flags.items())


@pytest.mark.parametrize("name", CASES)
def test_flags_are_as_pinned(name):
    golden = GOLDEN / f"{name}.txt"
    assert golden.exists(), "a new case; the head of this file says how to write its golden file"
    assert text_of(name) == golden.read_text()


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


def test_every_switch_shows():
    """A switch whose file equals the recipe's would pin nothing."""
    recipe = text_of("glm5-h200-recipe")
    assert all(text_of(name) != recipe for name in CASES if name != "glm5-h200-recipe" and "h200" in name)


def test_every_flag_of_sglang_on_gpus_is_in_the_table_of_the_docs():
    docs = (Path(__file__).parents[4] / "docs" / "coming-from.md").read_text()
    named = set(re.findall(r"--[a-z0-9-]+|SGLANG_[A-Z_]+", docs))
    configs = [resolved.config for resolved in flag_cases().values() if resolved.config.hardware.device == "cuda"]
    used = {item.name for config in configs for role in roles(config) for item in sglang_flags(config, role)}
    ours = {"--served-model-name", "--dtype", "--random-seed", "--nnodes"}  # the recipe's launcher sets these itself
    assert used - ours <= named


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for case in CASES:
        (GOLDEN / f"{case}.txt").write_text(text_of(case))
