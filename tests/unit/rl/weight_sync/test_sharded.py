"""Weights from eight trainer ranks to four engine ranks: each byte once, nobody much more than the others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.megatron_single import run_gangs

from posttrain.rl.weight_sync.sharded import _passed_on, _shared
from posttrain_weights.box import Box
from posttrain_weights.messages import ALIGNMENT_BYTES, Piece
from posttrain_weights.transfer_plan import SliceTransfer
from posttrain_weights.transport import Place, Transport, Transports

TENSOR, PIPELINE = "tensor, expert, data", "pipeline, expert"
LAYOUTS = {
    TENSOR: {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    PIPELINE: {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4},
}


# Eight ranks and four of engines: processes of one host; on GPUs of their own, of several hosts; on each other's GPUs.
APART = [Place(f"gpu {number}", f"host {number // 4}", "2.30.7") for number in range(12)]
PLACES = {"one host": [], "apart": APART, "together": APART[:8] + [APART[number] for number in (1, 3, 6, 7)]}

# At every change all places with one layout each; the others in PART=transfer.
AT_EVERY_CHANGE = {("one host", TENSOR), ("apart", PIPELINE), ("together", TENSOR)}


def cases() -> Iterator[Any]:
    for case in itertools.product(PLACES, LAYOUTS):
        yield pytest.param(*case, marks=() if case in AT_EVERY_CHANGE else pytest.mark.faults("transfer"))


@pytest.mark.parametrize(("places", "layout"), cases())
def test_eight_ranks_send_each_byte_once(tmp_path: Path, places: str, layout: str) -> None:
    told = _transfer(tmp_path, changed_every=0, places=places, layout=layout)
    assert told["wrong"] == 0
    passes_on = [rank for rank, rounds in enumerate(told["passed_on"]) if rounds]
    assert passes_on == ([1, 3, 6, 7] if places == "together" else [])
    shares = [rank for rank, size in enumerate(told["shared"]) if size]
    assert shares == {"one host": [*range(8)], "apart": [], "together": [1, 3, 6, 7]}[places]
    assert sum(told["sent"]) == sum(told["received"])
    # Two transfers; parts are aligned.
    for received, kept, parts in zip(told["received"], told["kept"], told["parts"], strict=True):
        assert received <= 2 * (1.05 * kept + 8 * parts * ALIGNMENT_BYTES)
    assert max(told["sent"]) <= 1.2 * sum(told["sent"]) / 8, told["sent"]
    for order in told["order"]:
        rounds = order.count("sends")
        assert rounds > 1
        travels = ["digests", "waits", "sends"] * (rounds - 1)
        assert order == ["digests", "sends", *travels, "waits"], "a round is digested while the last one travels"


@pytest.mark.parametrize("layout", [PIPELINE, pytest.param(TENSOR, marks=pytest.mark.faults("transfer"))])
def test_eight_ranks_send_what_has_changed(tmp_path: Path, layout: str) -> None:
    told = _transfer(tmp_path, changed_every=50, places="one host", layout=layout)
    assert told["wrong"] == 0
    assert sum(told["sent"]) == sum(told["received"])
    whole = sum(told["sent_first"]) - sum(told["told"])
    changed = sum(told["sent"]) - sum(told["sent_first"]) - sum(told["told"])
    assert 0 < changed < 0.1 * whole


def _transfer(folder: Path, changed_every: int, places: str, layout: str) -> dict[str, Any]:
    """Return what ranks tell of two transfers; every so many numbers change in between."""
    request = {"ranks": 8, "engine_ranks": 4, "parallel": LAYOUTS[layout], "strategy": "block", "folder": str(folder)}
    run_gangs("sharded_ranks", {"requests": [{**request, "changed_every": changed_every, "places": PLACES[places]}]})
    return dict(json.loads((folder / "told.json").read_text()))


def test_ways_between_members() -> None:
    """Of trainers 0 and 1, and of engines 2 and 3."""
    a, b, c, cpu = (Place(device, "host", "2.30.7" if device else "") for device in ("a", "b", "c", ""))
    elsewhere = Place("", "other host", "")
    ways = {
        "one host": ([cpu] * 4, "shared shared shared shared"),
        "two hosts": ([cpu, elsewhere, cpu, elsewhere], "shared host host shared"),
        "one GPU": ([a] * 4, "shared shared shared shared"),
        "two GPUs": ([a, b, a, b], "shared group group shared"),
        "apart": ([a, b, c, a._replace(device="d")], "group group group group"),
        "other versions": ([a, b, c._replace(nccl="2.28.3"), b], "host host host shared"),
        "the same GPU in another container": ([a, b, a._replace(host="container"), b], "host host host shared"),
        "one without a GPU": ([a, b, cpu, b], "host host host shared"),
    }
    for name, (places, expected) in ways.items():
        found = Transports(places, relays=2)
        assert [found.way(*pair).value for pair in ((0, 2), (0, 3), (1, 2), (1, 3))] == expected.split(), name
    together = Transports([a, b, a, b], relays=2)
    assert together.group == [0, 1]
    assert [together.neighbour(*pair) for pair in ((0, 2), (0, 3), (1, 2), (1, 3))] == [0, 1, 0, 1]
    assert Transports([a, b, a, b], relays=0).way(0, 3) is Transport.HOST, "nobody passes on what changes alone"
    assert Transports([a, b, c, a._replace(device="d")], relays=0).group == [0, 1, 2, 3]


def test_a_rank_passes_on_what_comes_for_the_engine_on_its_gpu() -> None:
    """Trainers 0 and 1, engines 2 and 3, in pairs on two GPUs; each transfer has 128 bytes."""
    a, b = Place("a", "host", "2.30.7"), Place("b", "host", "2.30.7")
    ways, box = Transports([a, b, a, b], relays=2), Box(0, 0, 4, 8)
    pairs = {0: [(0, 0), (0, 1), (1, 0)], 1: [(0, 1), (0, 1), (1, 1)]}
    transfers = [
        SliceTransfer(sender, receiver, "w", box, box, "float32", Piece(number, 0, box))
        for number, of_round in pairs.items()
        for sender, receiver in of_round
    ]
    assert _passed_on(transfers, ways, 0, 2) == {0: {(1, 2): 128}}
    by_second = _passed_on(transfers, ways, 1, 2)
    assert by_second == {0: {(0, 3): 128}, 1: {(0, 3): 256}}
    mine = [transfer for transfer in transfers if transfer.sender == 1]
    assert _shared(mine, ways, by_second, 2) == (256 + 128, [3]), "of the second round, with what it sends itself"
    assert _shared([], ways, {}, 2) == (0, [])
