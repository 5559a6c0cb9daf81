"""Simulated engines for sharded weight transfers: their slices are made up, and messages to them are dropped."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from posttrain.config.derived import world_size
from posttrain.config.schema import Config
from posttrain.rl.engines.buckets import weight_of
from posttrain.rl.megatron_backend.weights import DTYPES
from posttrain.rl.weight_sync.engine_layout import CODES, EngineLayout, EngineShards
from posttrain_rehearsal.distributed import require_nccl_takes
from posttrain_rehearsal.recorder import Recorder
from posttrain_weights.channel import Channel
from posttrain_weights.shared_memory import HANDLE_BYTES
from posttrain_weights.transfer_plan import EngineSlice
from posttrain_weights.transport import Place, Transports

# Equal for all members, so that NCCL is used.
NCCL = "2"


def provide(recorder: Recorder, config: Config) -> None:
    """Replace the transfer's rendezvous, its messages, and memory that processes share on a GPU."""
    from posttrain.rl.weight_sync import sharded
    from posttrain_weights import sender

    places = places_of(config)

    class SimulatedChannel(Channel):
        def __init__(self, store: Any, rank: int, size: int, seconds: float, relays: int, device: torch.device):
            assert size == len(places), f"{size} members, {len(places)} places"
            self._group, self._among_devices, self._buffers = None, None, {}
            self.rank, self.device, self.num_sent, self.num_received = rank, device, 0, 0
            self.ways = Transports(places, relays)
            self._members = self.ways.group

        def send(self, message: torch.Tensor, to: int, tag: int) -> Any:
            assert message.device.type == "cpu", "gloo sends what lies on the host"
            return _Done()

        def receive(self, place: torch.Tensor, by: int, tag: int) -> Any:
            return _Done()

        def among_devices(self, sent: Sequence[Any], received: Sequence[Any]) -> list[Any]:
            assert {member for member, _ in (*sent, *received)} <= {*self._members}
            messages = [message for _, message in (*sent, *received)]
            require_nccl_takes(messages)
            recorder.kernel(0, sum(message.nbytes for message in messages))
            return []

        def close(self) -> None:
            """Do nothing: no process waits for this rank."""

    sharded.Channel = SimulatedChannel  # type: ignore[assignment,misc]
    sharded._meeting_place = lambda: (None, "")
    sharded._store = lambda *_: None  # type: ignore[assignment,return-value]
    sender.Shared = _Shared  # type: ignore[assignment,misc]


class _Done:
    def wait(self, *_: Any) -> None:
        """Return at once: the message counts as sent."""


class _Shared:
    """Memory that no other process maps."""

    handle = bytes(HANDLE_BYTES)

    def __init__(self, num_bytes: int, device: torch.device):
        self.values = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """Free the memory."""
        self.values = torch.empty(0, dtype=torch.uint8)


def places_of(config: Config) -> list[Place]:
    """Return the places of trainer and engine ranks: on the same GPUs, or engines on their own nodes."""
    trainers = world_size(config)
    first = trainers if config.engine.own_nodes else 0
    gpus = [*range(trainers), *range(first, first + sum(engine_sizes(config)))]
    return [Place(f"GPU {gpu}", f"node {gpu // config.hardware.gpus_per_node}", NCCL) for gpu in gpus]


def engine_sizes(config: Config) -> list[int]:
    """Return the number of GPUs of each engine."""
    engine = config.engine
    sizes = [engine.gpus_per_engine] * engine.num_engines
    return sizes + [engine.pd.gpus_per_prefill_engine] * engine.pd.num_prefill_engines


@dataclass(frozen=True)
class SimulatedEngineShards(EngineShards):
    """Each engine holds the present ranks' parts of one layer and expert of each kind, distributed over its ranks.

    Args:
        config: The resolved configuration.
    """

    config: Config

    @cached_property
    def held(self) -> EngineLayout:
        """The engines' slices."""
        of_senders: dict[int, dict[str, None]] = defaultdict(dict)
        for name, boxes in self.values.holders.items():
            for sender in {sender for senders in boxes.values() for sender in senders}:
                of_senders[sender][weight_of(name)] = None
        names = {name for held in of_senders.values() for name in one_of_each_kind([*held])}
        dtypes = {name: str(DTYPES.get(spec.dtype, CODES)) for name, spec in self.values.sent_specs.items()}
        parts = [
            EngineSlice(name, box, dtypes[name].removeprefix("torch."))
            for name, boxes in self.values.holders.items()
            if weight_of(name) in names
            for box in boxes
        ]
        sizes = engine_sizes(self.config)
        return EngineLayout(
            parts, [[[*range(rank, len(parts), size)] for rank in range(size)] for size in sizes], [""] * len(sizes)
        )


def one_of_each_kind(names: Sequence[str]) -> set[str]:
    """Return the names of one layer and one expert of each kind; the others are alike."""
    chosen: dict[str, str] = {}
    for name in names:
        chosen.setdefault(re.sub(r"\.\d+\.", ".#.", name), name)
    return {*chosen.values()}
