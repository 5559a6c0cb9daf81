"""The tables of docs/coming-from.md, printed from the rows of the table.

    python -m posttrain_import.page docs/coming-from.md

writes them below the comments with their names; a test compares the page with the output.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from posttrain_import.row import Row, cells
from posttrain_import.table import ROWS, TABLES

# The flags of slime and miles that a typical launch script has.
_SHORT = """
--hf-checkpoint --actor-num-nodes --actor-num-gpus-per-node --prompt-data --input-key --apply-chat-template --rm-type
--custom-rm-path --eval-prompt-data --num-rollout --rollout-batch-size --n-samples-per-prompt --global-batch-size
--num-steps-per-rollout --rollout-max-response-len --rollout-temperature --advantage-estimator --eps-clip
--calculate-per-token-loss --use-tis --kl-loss-coef --lr --lr-decay-style --weight-decay --adam-beta2
--tensor-model-parallel-size --expert-model-parallel-size --recompute-granularity --max-tokens-per-gpu
--optimizer-cpu-offload --rollout-num-gpus-per-engine --sglang-mem-fraction-static --prefill-num-servers
--save-interval --load --dynamic-sampling-filter-path
"""
# Options of miles' Python launchers.
_LAUNCHER = """
--model-name --fp8-rollout --use-deepep --enable-optimizer-offload --enable-mtp --enable-eval --model-dir --run-id
--extra-args --mode
"""
_TABLE = re.compile(r"(<!-- rows: (.+?) -->\n).*?(?=\n\n|\n*\Z)", re.DOTALL)


def _rows_of(names: str) -> list[Row]:
    return list(dict.fromkeys(ROWS[name] for name in names.split()))


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [_line(heads), "|---" * len(heads) + "|", *map(_line, rows)]
    return "\n".join(lines)


def _line(row: tuple[str, ...]) -> str:
    return "|".join(("", *(f" {cell} " if cell else " " for cell in row), ""))


def tables() -> Mapping[str, str]:
    """Return table name -> table."""
    found = {}
    for name, rows in TABLES.items():
        found[name] = _table(("recipe", "here", "our key"), map(cells, rows))
    for name, chosen in (("slime", _SHORT), ("miles", _LAUNCHER)):
        short = [(cells(item)[0], cells(item)[2], item.note) for item in _rows_of(chosen)]
        found[name] = _table(("their flag", "our key", "note"), short)
    return found


def with_tables(page: str) -> str:
    """Return a page with up-to-date tables."""
    return _TABLE.sub(lambda match: match[1] + tables()[match[2]], page)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
