"""Values stay what they were when they were made: whoever gets one may keep it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "workflow" / "src"
# What counts, waits, or is under way.
MUTABLE = {
    "posttrain": {
        *("Counters", "HangWatch", "Member", "PackedSequences", "Policy", "RankProcess", "Response"),
        *(
            "PartialResponse",
            "PreemptionDeadline",
            "Segment",
            "Timeline",
            "TrainingRun",
            "WeightUpdate",
            "Work",
            "_Collection",
            "_Group",
            "_Requests",
            "_Serving",
        ),
    },
    "posttrain_import": {"Imported", "State"},
    "posttrain_rehearsal": {"Phase"},
    "posttrain_serving": {"Generator"},
}


@pytest.mark.parametrize("package", MUTABLE)
def test_dataclasses_are_frozen(package: str) -> None:
    mutable = set()
    for path in (SOURCE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            marks = [ast.unparse(mark) for mark in node.decorator_list] if isinstance(node, ast.ClassDef) else []
            if any("dataclass" in mark and "frozen=True" not in mark for mark in marks):
                mutable.add(node.name)
    # An annex may be missing.
    assert mutable == (MUTABLE[package] if (SOURCE / package).exists() else set())
