"""A member of a weight transfer, in a process of its own: a trainer rank has rows, an engine rank keeps columns.

    python tests/support/transfer_members.py '{"device": "cuda", "trainers": 2, "places": ["a", "b", "a", "b"], ...}'

prints what it has seen as its last line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from posttrain.rl.weight_sync.sharded import sender_of
from posttrain_weights.box import Box
from posttrain_weights.channel import Channel
from posttrain_weights.receiver import Receiver
from posttrain_weights.transfer_plan import EngineSlice, plan_transfer
from posttrain_weights.transport import Place

SECONDS, UPDATES = 60.0, 3


def main() -> None:
    """Send, or receive, some updates."""
    order = json.loads(sys.argv[1])
    rank, size, num_trainers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), order["trainers"]
    device = torch.device(order["device"], 0 if order["device"] == "cuda" else None)
    limit = timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0, limit)
    place = Place.of(device)
    if order["places"]:
        name, _, version = order["places"][rank].partition(" ")
        place = Place(name, place.host, version or place.nccl or "2.30.7")
        # It takes one member for each GPU of a host: those of pretended GPUs are on pretended hosts.
        os.environ["NCCL_HOSTID"] = f"host of {name}"
    channel = Channel(store, rank, size, SECONDS, num_trainers, device, place)
    work = _send if rank < num_trainers else _receive
    told = work(order, channel, num_trainers, size - num_trainers, device)
    print("\n" + json.dumps({**told, "ways": [channel.ways.way(0, to).value for to in range(num_trainers, size)]}))


def _send(order: dict[str, Any], channel: Channel, first: int, receivers: int, device: torch.device) -> dict[str, Any]:
    rows, columns = order["shape"]
    names = [f"tensor {number}" for number in range(order["tensors"])]
    boxes = _cuts(rows, columns, first, by_rows=True)
    holders = {name: {box: [rank] for rank, box in enumerate(boxes)} for name in names}
    held = [[EngineSlice(name, box, "bfloat16") for name in names] for box in _cuts(rows, columns, receivers, False)]
    sender, rounds = sender_of(plan_transfer(held, holders, order["round_bytes"]), channel, first)
    seconds = []
    for version in range(UPDATES):
        values = {n: _values(number, version, rows, columns, device) for number, n in enumerate(names)}
        for receiver in range(first, first + receivers):
            channel.hear(receiver, 1)  # begins now
        channel.synchronize()
        begin = time.perf_counter()
        begun: list[Any] = []
        for number, transfers in enumerate(rounds):
            pieces: dict[int, list[torch.Tensor]] = defaultdict(list)
            for transfer in transfers:
                pieces[first + transfer.receiver].append(_cut(values[transfer.name], transfer.box))
            messages = sender.pack(number, pieces)
            for before in begun:
                before.wait()
            begun = [sender.begin(number, messages)]
        for last in begun:
            last.wait()
        sender.finish()
        seconds.append(time.perf_counter() - begin)
    return {"sent": channel.num_sent, "seconds": seconds}


def _receive(
    order: dict[str, Any], channel: Channel, first: int, receivers: int, device: torch.device
) -> dict[str, Any]:
    receiver, (rows, columns), wrong = Receiver(channel, range(first)), order["shape"], 0
    own = _cuts(rows, columns, receivers, by_rows=False)[channel.rank - first]
    views = [torch.zeros(own.rows, own.columns, dtype=torch.bfloat16, device=device) for _ in range(order["tensors"])]
    for version in range(UPDATES):
        for sender in range(first):
            channel.say(sender, 1)
        receiver.receive(views)
        for number, view in enumerate(views):
            expected = _cut(_values(number, version, rows, columns, device), own)
            wrong += not torch.equal(view.view(torch.int16), expected.contiguous().view(torch.int16))
    return {"received": channel.num_received, "wrong": wrong}


def _cuts(rows: int, columns: int, parts: int, by_rows: bool) -> list[Box]:
    if by_rows:
        return [Box(number * rows // parts, 0, rows // parts, columns) for number in range(parts)]
    return [Box(0, number * columns // parts, rows, columns // parts) for number in range(parts)]


def _cut(values: torch.Tensor, box: Box) -> torch.Tensor:
    return values[box.row : box.row + box.rows, box.column : box.column + box.columns]


def _values(number: int, version: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1000 * version + number)
    return torch.randn(rows, columns, generator=generator, device=device).to(torch.bfloat16)


if __name__ == "__main__":
    main()
