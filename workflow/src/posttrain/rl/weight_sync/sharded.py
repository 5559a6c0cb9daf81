"""Sends weight slices from the trainer ranks that hold them to the engine ranks that need them, without a gather.

`posttrain_weights.transfer_plan` plans once what each rank sends. At an update a rank quantises these shards, packs the
slices into flat messages and sends them (`posttrain_weights.sender`); engines write them to the same places as their
own loaders do. The digests for the check of the engines are computed from the same slices on the way. With
`engine.weight_deltas` a rank keeps what it sent, and later sends only the changes (`posttrain_weights.delta`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from posttrain.cluster.rendezvous import FILE_VARIABLE
from posttrain.config.derived import update_bytes_at_once
from posttrain.config.schema import Config
from posttrain.errors import CheckpointError
from posttrain.rl.algorithm.finite import are_finite
from posttrain.rl.engines.responses import has_left
from posttrain.rl.engines.tensor_payload import NamedTensors
from posttrain.rl.megatron_backend.plain_data import gather_plain, share_plain
from posttrain.rl.megatron_backend.served_values import Magnitudes, ServedPart, ServedValues
from posttrain.rl.weight_sync.engine_layout import CODES, EngineShards
from posttrain.rl.weight_sync.proof import Digested, Digests
from posttrain_weights.box import Box
from posttrain_weights.channel import CPU, Channel
from posttrain_weights.delta import WHOLE_PART, DeltaHeader, changes
from posttrain_weights.sender import Pair, Sender, Sending
from posttrain_weights.transfer_plan import SliceTransfer, plan_transfer, spread
from posttrain_weights.transport import Transport, Transports, rendezvous

log = logging.getLogger(__name__)
GIB = 1 << 30
WAYS = {
    Transport.SHARED: "over shared memory",
    Transport.GROUP: "over NCCL",
    Transport.HOST: "over gloo, through hosts' memory",
}

T = TypeVar("T")


class ShardedTransfer:
    """Sends weights to the engines; every method is collective.

    Args:
        config: The resolved configuration.
        engine_shards: The engines' weight layout.
        round_bytes: Bytes that a rank sends per round, see `plan_transfer`; by default `update_bytes_at_once`.
    """

    def __init__(self, config: Config, engine_shards: EngineShards, round_bytes: int = 0):
        self._config, self._engine_shards, self._values = config, engine_shards, engine_shards.values
        self._round_bytes = round_bytes or update_bytes_at_once(config)
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
        self._channel: Channel | None = None
        self._sender: Sender | None = None
        self._rounds: list[list[SliceTransfer]] = []
        self._sent = Sent() if config.engine.weight_deltas else None
        self._is_held = False

    @property
    def num_sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return self._channel.num_sent if self._channel else 0

    def reset(self) -> None:
        """Leave the engines' group; the next update forms a new one and sends all weights."""
        if self._sender:
            self._sender.close()
        self._channel, self._sender, self._is_held = None, None, False

    def commit_base(self) -> None:
        """Mark the last transfer as the delta base: the next update may send only what changed since."""
        self._is_held = True

    def send(
        self,
        version: int,
        besides: Iterable[NamedTensors] = (),
        begin_digests: Callable[[], Digests] | None = None,
    ) -> Digests | None:
        """Update all engines to the current weights under a version.

        Args:
            version: The version that engines report with each response from now on.
            besides: Tensors sent over HTTP in the same update, on rank 0: vision tower, MTP layers.
            begin_digests: Returns the digest accumulator for this update; collective.

        Returns:
            The digest accumulator.

        Raises:
            CheckpointError: A weight is NaN or infinite.
            RuntimeError: An engine failed to receive them; no engine generates with partial weights.
        """
        client = self._engine_shards.client
        if client:
            self._engine_shards.runner.run(client.begin_update(version))
        if self._channel is None:
            self._connect()
        magnitudes, digests = self._values.agreed_magnitudes(), begin_digests() if begin_digests else None
        asked = client.ask_ranks("receive", may_repeat=False) if client else None
        if not all(self._on_every_rank(lambda: self._send_beside(asked, magnitudes, digests))):
            raise CheckpointError("values-not-finite", "weights hold NaN or infinity; they must be finite to be served")
        if client:
            for bucket in besides:
                self._engine_shards.runner.run(client.send_bucket(bucket))
            self._engine_shards.runner.run(client.end_received(version))
        return digests

    def _connect(self) -> None:
        """Plan the transfer, connect to the engines, and tell each engine rank which slices it receives."""
        held, client = self._engine_shards.held, self._engine_shards.client
        receivers = [[held.parts[part] for part in ranks] for ranks in itertools.chain(*held.of_ranks)]
        num_senders, rank = dist.get_world_size(), dist.get_rank()
        transfers = plan_transfer(receivers, self._values.holders, self._round_bytes)
        sizes = [len(ranks) for ranks in held.of_ranks]
        firsts = [num_senders + sum(sizes[:number]) for number in range(len(sizes))]
        size, seconds = num_senders + len(receivers), self._config.engine.request_timeout_seconds
        listener, place = _meeting_place() if rank == 0 else (None, None)
        place = share_plain(place)
        order = {"place": place, "size": size, "senders": num_senders, "seconds": seconds}
        each = [{"first_rank": first} for first in firsts]
        self._beside(
            client.ask_ranks("join", may_repeat=False, each=each, changes=self._sent is not None, **order)
            if client
            else None,
            lambda: self._join(_store(listener, place, size, seconds), transfers, num_senders, size, seconds),
        )

    def _join(
        self, store: dist.Store, transfers: Sequence[SliceTransfer], first: int, size: int, seconds: float
    ) -> None:
        relays = 0 if self._sent else first
        self._channel = channel = Channel(store, dist.get_rank(), size, seconds, relays, self._device)
        if channel.rank == 0:
            _log_ways(transfers, channel.ways, first)
        self._sender, self._rounds = sender_of(transfers, channel, first)

    @torch.no_grad()
    def _send_rounds(self, magnitudes: Magnitudes, digests: Digests | None) -> bool:
        """Send all slices of this rank; returns whether they are finite."""
        assert self._sender
        first, made = dist.get_world_size(), _Made(self._values, magnitudes, self._sent, self._is_held)
        self._is_held = False  # until the next verified update
        firsts, begun = self._engine_shards.held.firsts, list[Sending]()
        for number, transfers in enumerate(self._rounds):
            pieces: dict[int, list[torch.Tensor]] = defaultdict(list)
            told: dict[int, list[DeltaHeader]] = defaultdict(list)
            digested: list[Digested] = []
            for transfer in transfers:
                part = made.part(transfer)
                if (where := (transfer.receiver, transfer.piece.part)) in firsts:
                    digested.append((firsts[where], part, (transfer.box.row, transfer.box.column)))
                of_it, parts = made.changes(transfer, part) if self._sent else (WHOLE_PART, [part])
                told[first + transfer.receiver].append(of_it)
                pieces[first + transfer.receiver] += parts
            if digests:
                digests.add(digested)
            messages = self._sender.pack(number, pieces)
            if self._sent:
                self._sender.tell(number, told)
            for before in begun:  # was in flight while this one was built
                before.wait()
            begun = [self._sender.begin(number, messages)]
        for last in begun:
            last.wait()
        self._sender.finish()
        return made.are_finite()

    def _on_every_rank(self, work: Callable[[], T]) -> list[T]:
        """Run a function on every rank and return all results.

        Raises:
            RuntimeError: A rank failed; raised on all ranks, with its reason.
        """
        made, failure = None, ""
        try:
            made = work()
        except RuntimeError as error:
            failure = str(error) or repr(error)
        found = gather_plain([made, failure])
        if failures := [told for _, told in found if told]:
            raise RuntimeError(min(failures, key=has_left))
        return [each for each, _ in found]

    def _beside(self, asked: Coroutine[Any, Any, Any] | None, work: Callable[[], T]) -> T:
        """Run a function while engines serve a request of rank 0."""
        if asked is None:
            return work()

        async def both() -> T:
            _, done = await asyncio.gather(asked, asyncio.to_thread(work))
            return done

        return self._engine_shards.runner.run(both())

    def _send_beside(
        self, asked: Coroutine[Any, Any, Any] | None, magnitudes: Magnitudes, digests: Digests | None
    ) -> bool:
        """Send while engines receive at rank 0's request; if one side fails, the other does not wait.

        Raises:
            Exception: The root cause, not the consequence that the other side left.
        """
        assert self._channel
        leave = self._channel.close
        if asked is None:
            try:
                return self._send_rounds(magnitudes, digests)
            except BaseException:
                leave()
                raise

        async def both() -> bool:
            sending = asyncio.create_task(asyncio.to_thread(self._send_rounds, magnitudes, digests))
            tasks = {asyncio.create_task(asked), sending}
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() for task in ended):
                leave()
            await asyncio.wait(tasks)
            if failures := [error for task in tasks if (error := task.exception())]:
                raise min(failures, key=lambda error: has_left(str(error)))
            return sending.result()

        return self._engine_shards.runner.run(both())


class Sent:
    """The last weights that a rank sent, in host memory."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Box, str], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Size in host memory."""
        return sum(kept.nbytes for kept in self._kept.values())

    def swap(self, key: tuple[str, Box, str], values: torch.Tensor) -> torch.Tensor | None:
        """Store values, and return the previous ones of this key on the new values' device."""
        if key not in self._kept:
            self._kept[key] = values.to("cpu", copy=True)
            return None
        before = self._kept[key].to(values.device, copy=True)
        self._kept[key].copy_(values)
        return before


class _Made:
    """Builds the content of slice transfers from a rank's shards, one tensor at a time.

    Args:
        values: The engines' form of this rank's shards.
        magnitudes: Magnitudes of the current weights.
        sent: The last sent weights, if kept; updated to those sent now.
        is_held: Engines hold the last sent weights.
    """

    def __init__(self, values: ServedValues, magnitudes: Magnitudes, sent: Sent | None, is_held: bool):
        self._values, self._magnitudes, self._sent, self._is_held = values, magnitudes, sent, is_held
        self._before: dict[tuple[str, Box, str], torch.Tensor | None] = {}
        self._swapped: set[tuple[str, Box, str]] = set()
        self._shards = {
            (name, box): shard for shard in values.shards for name, box in values.boxes(shard.hf_name, shard.where)
        }
        self._of = ""
        self._parts: dict[tuple[str, Box, bool], ServedPart] = {}
        self._finite: list[torch.Tensor] = []

    def part(self, transfer: SliceTransfer) -> torch.Tensor:
        """Return the values of a transfer, [rows, columns] in the receiver's dtype."""
        return self._made(transfer).cut(transfer.box).values.to(getattr(torch, transfer.dtype))

    def changes(self, transfer: SliceTransfer, new: torch.Tensor) -> tuple[DeltaHeader, list[torch.Tensor]]:
        """Return a transfer's `DeltaHeader` and content: the changes since the last update, or the whole slice."""
        made, key = self._made(transfer), (transfer.name, transfer.made, transfer.dtype)
        if key not in self._swapped and self._sent is not None:
            self._swapped.add(key)
            self._before[key] = self._sent.swap(key, made.values.to(getattr(torch, transfer.dtype)))
        before = self._before.get(key)
        if not self._is_held or before is None:
            return WHOLE_PART, [new]
        found = changes(new, made._replace(values=before).cut(transfer.box).values)
        if found is None:
            return WHOLE_PART, [new]
        gaps, values = found
        return DeltaHeader(values.shape[1], gaps.shape[1]), [gaps, values] if values.shape[1] else []

    def _made(self, transfer: SliceTransfer) -> ServedPart:
        shard = self._shards[transfer.name, transfer.made]
        as_codes = transfer.dtype == CODES or transfer.name != shard.hf_name
        if self._of != shard.hf_name:
            self._of, self._parts, self._before = shard.hf_name, {}, {}
        if (transfer.name, transfer.made, as_codes) not in self._parts:
            for part in self._values.parts([shard], self._magnitudes, as_codes):
                self._parts[part.name, part.box, as_codes] = part
                if part.values.dtype != torch.float8_e4m3fn:
                    self._finite.append(are_finite(part.values))
        return self._parts[transfer.name, transfer.made, as_codes]

    def are_finite(self) -> bool:
        """Return whether all values and scales are finite; non-finite weights give non-finite scales."""
        return not self._finite or bool(torch.stack(self._finite).all())


def _log_ways(transfers: Sequence[SliceTransfer], ways: Transports, first: int) -> None:
    sizes: Counter[Transport] = Counter()
    for transfer in transfers:
        sizes[ways.way(transfer.sender, first + transfer.receiver)] += transfer.num_bytes
    log.info(
        "weights go from %d ranks to %d, %.2f GiB in all (%s), the busiest sends %.2f of the mean",
        first,
        ways.num_members - first,
        sizes.total() / GIB,
        ", ".join(f"{WAYS[way]}: {size / GIB:.2f}" for way, size in sizes.items()),
        spread(transfers, first),
    )


def sender_of(
    transfers: Sequence[SliceTransfer], channel: Channel, first: int
) -> tuple[Sender, list[list[SliceTransfer]]]:
    """Return a rank's sender and its transfers by round, after telling each receiver which ones it gets.

    Args:
        transfers: Those of all ranks.
        channel: This rank's channel.
        first: Index of the first receiver in the channel.
    """
    rank, ways = channel.rank, channel.ways
    mine = [transfer for transfer in transfers if transfer.sender == rank]
    passed_on = _passed_on(transfers, ways, rank, first)
    last = max([*passed_on, *(transfer.piece.round for transfer in mine)], default=-1)
    rounds: list[list[SliceTransfer]] = [[] for _ in range(last + 1)]
    told: dict[int, list[list[int]]] = defaultdict(list)
    for transfer in mine:
        rounds[transfer.piece.round].append(transfer)
        told[first + transfer.receiver].append([transfer.piece.round, transfer.piece.part, *transfer.piece.box])
    for receiver in range(first, ways.num_members):
        channel.send_table(torch.tensor(told[receiver], dtype=torch.int64).reshape(-1, 6), receiver)
    return Sender(channel, passed_on, *_shared(mine, ways, passed_on, first)), rounds


def _passed_on(
    transfers: Sequence[SliceTransfer], ways: Transports, rank: int, first: int
) -> dict[int, dict[Pair, int]]:
    """Return round -> (source, destination) -> bytes that a rank receives for other ranks on its shared memory."""
    own = {to for to in range(first, ways.num_members) if ways.deputy(to) == rank}
    passed_on: dict[int, dict[Pair, int]] = defaultdict(lambda: defaultdict(int))
    for transfer in transfers:
        pair = transfer.sender, first + transfer.receiver
        if pair[1] in own and ways.way(*pair) is Transport.GROUP:
            passed_on[transfer.piece.round][pair] += transfer.num_bytes
    return passed_on


def _shared(
    mine: Sequence[SliceTransfer], ways: Transports, passed_on: Mapping[int, Mapping[Pair, int]], first: int
) -> tuple[int, list[int]]:
    """Return the shared memory bytes of a rank's largest round, and its readers."""
    rounds = Counter({number: sum(sizes.values()) for number, sizes in passed_on.items()})
    readers = {to for sizes in passed_on.values() for _, to in sizes}
    for transfer in mine:
        if ways.way(transfer.sender, first + transfer.receiver) is Transport.SHARED:
            rounds[transfer.piece.round] += transfer.num_bytes
            readers.add(first + transfer.receiver)
    return max(rounds.values(), default=0), sorted(readers)


def _meeting_place() -> tuple[socket.socket | None, Any]:
    """Return the rendezvous of trainer and engines: a file if the ranks used one, otherwise a port of their address."""
    if path := os.environ.get(FILE_VARIABLE):
        return None, f"{path}-{secrets.token_hex(8)}"
    listener = socket.create_server((os.environ["MASTER_ADDR"], 0))
    return listener, [*listener.getsockname()[:2]]


def _store(listener: socket.socket | None, place: Any, size: int, seconds: float) -> dist.Store:
    if listener is None:
        return rendezvous(place, size, seconds)
    host, port = place
    return dist.TCPStore(host, port, size, True, timedelta(seconds=seconds), master_listen_fd=listener.detach())
