"""Eight ranks of a trainer, and four of an engine in threads: what a sharded transfer sends, and how long it takes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist


def main() -> None:
    """Run one gang after the other; rank 0 writes down what was sent."""
    from tests.support.megatron_single import run_forked

    for request in json.loads(sys.argv[1])["requests"]:
        folder = Path(request["folder"])
        run_forked(request["ranks"], folder / "meeting", partial(run_rank, request, folder))


def run_rank(request: dict[str, Any], folder: Path) -> None:
    from tests.support.hub_tensors import fill
    from tests.support.loopback_engines import LoopbackEngines
    from tests.support.megatron_layouts import as_served, begin_digests, received_otherwise
    from tests.support.megatron_single import test_config
    from tests.support.tiny_checkpoint import TRAINED, random_tensors

    from posttrain.rl.megatron_backend.initialize import initialize
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.plain_data import gather_plain
    from posttrain.rl.megatron_backend.weights import HubWeights
    from posttrain.rl.weight_sync.engine_layout import EngineShards
    from posttrain.rl.weight_sync.sharded import ShardedTransfer
    from posttrain_weights.transport import Place

    config = test_config(TRAINED, **request["parallel"])
    sends_changes = request["changed_every"] > 0
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, weight_deltas=sends_changes))
    initialize(config)
    policy = build_policy(config)
    weights, tensors = HubWeights(policy.chunks, TRAINED), random_tensors(TRAINED, 3)
    fill(weights, tensors)
    values, held = as_served(weights, tensors, request["strategy"])
    sent = {name: (spec.shape, spec.dtype) for name, spec in values.sent_specs.items()}
    places = [Place(*place) for place in request["places"]]
    if places:
        Place.of = classmethod(lambda cls, device: places[dist.get_rank()])  # type: ignore[method-assign]
    its_places = places[request["ranks"] :]
    engines = LoopbackEngines(sent, 1, request["engine_ranks"], places=its_places) if dist.get_rank() == 0 else None
    with asyncio.Runner() as runner:
        engine_shards = EngineShards(values, engines, runner)
        transfer = ShardedTransfer(config, engine_shards, round_bytes=1 << 16)
        transfer.send(1)
        transfer.commit_base()
        if sends_changes:
            for tensor in tensors.values():  # other signs: no scale changes
                tensor.view(-1)[:: request["changed_every"]] *= -1
            fill(weights, tensors)
            _, held = as_served(weights, tensors, request["strategy"])
        first = transfer.num_sent
        dist.barrier()
        order = watch_rounds()
        started = time.process_time()
        digests = transfer.send(2, begin_digests=partial(begin_digests, engine_shards)).total()
        seconds = time.process_time() - started
    ranks, expected = engines.ranks if engines else [], (weights, tensors, held, request["strategy"])
    told = {
        **_told(transfer),
        "sent_first": gather_plain(first),
        "seconds": gather_plain(seconds),
        "order": gather_plain(order),
        "received": [rank.channel.num_received for rank in ranks],
        "kept": [rank.num_bytes for rank in ranks],
        "parts": [len(rank.parts) for rank in ranks],
        "wrong": received_otherwise(engines, *expected, digests) if engines else 0,
    }
    if engines:
        (folder / "told.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _told(transfer: Any) -> dict[str, list]:
    from posttrain.rl.megatron_backend.plain_data import gather_plain

    return {
        "sent": gather_plain(transfer.num_sent),
        "passed_on": gather_plain([*transfer._sender._passed_on]),
        "shared": gather_plain(transfer._sender._room),
        "told": gather_plain(16 * sum(len(of_round) for of_round in transfer._rounds)),
    }


def watch_rounds() -> list[str]:
    """Return a list that grows with every step of a round from now on."""
    from posttrain.rl.weight_sync.proof import Digests
    from posttrain_weights.sender import Sender, Sending

    order: list[str] = []

    def watch(owner: type, name: str, told: str) -> None:
        work = getattr(owner, name)

        def watched(self: object, *arguments: object) -> object:
            order.append(told)
            return work(self, *arguments)

        setattr(owner, name, watched)

    watch(Digests, "add", "digests")
    watch(Sender, "begin", "sends")
    watch(Sending, "wait", "waits")
    return order


if __name__ == "__main__":
    main()
