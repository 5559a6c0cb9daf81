"""What real ranks tell each other, and that none of it is unpickled."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tests.support.megatron_single import run_ranks
from tests.test_import_order import MODULES

RANK = """
import json, os, sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from posttrain.rl.megatron_backend.plain_data import gather_plain, gather_tensors, share_plain
from posttrain.cluster.rendezvous import join_ranks

@dataclass(frozen=True)
class Pair:
    one: int
    other: float

join_ranks("gloo", timedelta(seconds=60))
rank = dist.get_rank()
pair = dist.new_group([1, 2])
values = torch.tensor([0.1, -0.0, float("inf"), 16777216.0])[: rank + 2 if rank else 0]
told = {
    "tensors": [[value.hex() for value in tensor.tolist()] for tensor in gather_tensors(values)],
    "types": [str(tensor.dtype) for tensor in gather_tensors(torch.ones(1, dtype=torch.int64))],
    "plain": gather_plain({"pair": Pair(rank, 1 / (rank + 3)), "text": "\\u00e9" * rank, "row": (rank, None)}),
    "of two": gather_plain(rank, pair) if rank else None,
    "shared": share_plain([True, "long" * 5000, 1e-320] if rank == 0 else object),
}
dist.barrier()
print(json.dumps(told))
"""


def test_all_ranks_hear_the_same_in_the_order_of_ranks(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    first, *others = (json.loads(output.splitlines()[-1]) for output in run_ranks(script, 3, timeout=60))
    # As the bits of float32 say it; nothing of rank 0, then three and four numbers.
    numbers = ["0x1.99999a0000000p-4", "-0x0.0p+0", "inf", "0x1.0000000000000p+24"]
    assert first["tensors"] == [[], numbers[:3], numbers]
    assert first["types"] == ["torch.int64"] * 3
    assert first["plain"] == [
        {"pair": {"one": 0, "other": 0.3333333333333333}, "text": "", "row": [0, None]},
        {"pair": {"one": 1, "other": 0.25}, "text": "é", "row": [1, None]},
        {"pair": {"one": 2, "other": 0.2}, "text": "éé", "row": [2, None]},
    ]
    assert first["shared"] == [True, "long" * 5000, 1e-320]
    assert [other["of two"] for other in others] == [[1, 2], [1, 2]]
    for other in others:
        assert {**other, "of two": None} == first


def test_no_part_of_the_library_sends_pickled_objects() -> None:
    """torch's collectives of objects unpickle what comes: `broadcast_object_list`, `all_gather_object` and the like."""
    found = {
        (module, name)
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
        and "_object" in (name := getattr(node, "attr", "") or getattr(node, "id", ""))
        and name.partition("_object")[0] in ("broadcast", "all_gather", "gather", "scatter", "send", "recv")
    }
    assert not found
