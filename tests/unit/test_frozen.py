"""Values stay what they were when they were made: whoever gets one may keep it."""

from __future__ import annotations

import ast
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "workflow" / "src" / "posttrain"
# What counts, waits, or is under way.
MUTABLE = {
    *("Counters", "Generator", "HangWatch", "Imported", "Member", "PackedSequences", "Phase", "Policy", "RankProcess"),
    *("Response", "Timeline", "State", "_Collection", "_Requests", "_Serving"),
    *("TimeToSave", "TrainingRun", "WeightUpdate", "Work"),
}


def test_dataclasses_are_frozen() -> None:
    mutable = set()
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            marks = [ast.unparse(mark) for mark in node.decorator_list] if isinstance(node, ast.ClassDef) else []
            if any("dataclass" in mark and "frozen=True" not in mark for mark in marks):
                mutable.add(node.name)
    assert mutable == MUTABLE
