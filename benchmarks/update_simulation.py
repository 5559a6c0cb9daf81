"""How long weights take from trainer ranks to engine ranks: each message simulated, in rounds, from the transfers.

While a round is on its way its senders make the next one and its receivers write the last; two rounds exist at a time.
That is how `rl.weight_sync.sharded` sends, and how prime-rl does, whose receivers fetch a layer while they load the one
before. A network is not simulated beyond each rank's own link.

Where each constant is from:

    counted    bytes, parts and rounds: `plan_transfer`, from the Hub's tensors and the layouts
    our table  what a network gives of its peak, a GPU's memory, the launch of a kernel (`plan.timing.attainable`)
    H200       quantising (`benchmarks.one_gpu`)
    two cores  the way through the host's memory, and the host's part in digests, as whoever calls this has measured it
    prime-rl   PrimeIntellect-ai/prime-rl#3341, jobs 2317 and 2301: 64 trainer and 32 engine H200, GLM-5.2 in BF16
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.config.schema import Hardware
from posttrain.plan.timing import attainable
from posttrain_weights.box import Box
from posttrain_weights.messages import size_of
from posttrain_weights.transfer_plan import SIZES, SliceTransfer

GB = 1e9
# BF16 in, codes out: bytes of the result.
QUANTISED = 131 * GB / 2
# To digest a batch: two kernels, whose programs and parts are told by three copies, sums set to zero, and added where
# they belong, of which a copy tells.
BATCH_LAUNCHES = 8
# prime-rl, EP32 (job 2317): bytes that an engine rank fetches, seconds in which it has fetched them and in which it has
# loaded them, alone; the update at its client, the wait for engines that pause, and all of it in the trainer. Medians.
BYTES, FETCHED, LOADED, UPDATE, PAUSE, ALL = 82.501 * GB, 1.864, 1.954, 2.842, 5.204, 8.577
# EP16 (job 2301): the update at its client.
UPDATE_OF_16 = 3.524
LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Transport:
    """What bytes and parts cost on their way.

    Args:
        made: Bytes per second that a sender makes of its shards, each part once.
        packed: Bytes per second that it puts into messages.
        sent: Bytes per second of a rank, in and out.
        written: Bytes per second that a receiver takes out of messages.
        part_seconds: Of a part in a message, at either end.
        make_seconds: Of a part that is made.
    """

    made: float
    packed: float
    sent: float
    written: float
    part_seconds: float = 0.0
    make_seconds: float = 0.0


@dataclass(frozen=True)
class Digesting:
    """What digests cost.

    Args:
        rate: Bytes per second that are digested.
        batch_seconds: Of a round's parts, or of all that a receiver has, beside the bytes.
        part_seconds: Of a part, on the host.
        key_seconds: Of a version's factors, on the host.
    """

    rate: float
    batch_seconds: float
    part_seconds: float
    key_seconds: float


def digesting(hardware: Hardware, part_seconds: float, key_seconds: float) -> Digesting:
    """Return what digests cost on a GPU: each byte is read once, taken is half of what its memory gives.

    Args:
        hardware: Of all ranks.
        part_seconds: On the host, measured.
        key_seconds: The same.
    """
    batch_seconds = BATCH_LAUNCHES * attainable.LAUNCH_SECONDS
    return Digesting(attainable.memory(hardware) / 2, batch_seconds, part_seconds, key_seconds)


def between_gpus(hardware: Hardware, kernels: int) -> Transport:
    """Return the way of messages that no host sees, each part packed and written by a kernel.

    Args:
        hardware: Of all ranks.
        kernels: That quantise a part.
    """
    memory, launch = attainable.memory(hardware), attainable.LAUNCH_SECONDS
    return Transport(QUANTISED, memory / 2, _network(hardware), memory / 2, launch, kernels * launch)


def through_host(rate: float, kernels: int) -> Transport:
    """Return the way of the last resort: quantised on the GPU, the rest as fast as a pair of ranks was measured.

    Args:
        rate: Bytes per second, packed, sent and written.
        kernels: That quantise a part.
    """
    launch = attainable.LAUNCH_SECONDS
    return Transport(QUANTISED, math.inf, rate, math.inf, launch, kernels * launch)


def of_prime_rl(hardware: Hardware) -> Transport:
    """Return prime-rl's way: BF16 made of FP32 masters, fetched by RDMA, loaded as fast as it was measured."""
    return Transport(attainable.memory(hardware) / 3, math.inf, _network(hardware), BYTES / LOADED)


def _network(hardware: Hardware) -> float:
    return attainable.link(hardware, hardware.gpus_per_node + 1)


@dataclass(frozen=True)
class Traffic:
    """What a simulation is made of.

    Args:
        making: Sender -> seconds in which it makes each round.
        writing: Receiver -> seconds in which it writes each round.
        messages: Sender -> round -> receiver -> bytes.
        num_rounds: Of whoever has most.
    """

    making: Mapping[int, Mapping[int, float]]
    writing: Mapping[int, Mapping[int, float]]
    messages: Mapping[int, Mapping[int, Mapping[int, int]]]
    num_rounds: int


def traffic_of(transfers: Sequence[SliceTransfer], way: Transport, digests: Digesting | None = None) -> Traffic:
    """Return what transfers are on a way: messages, and seconds at both ends.

    Args:
        transfers: All of them.
        way: Which they take.
        digests: What senders digest as they send it; None where nobody does.
    """
    making: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    writing: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    messages: dict[int, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    seen: set[tuple[int, str, Box, str]] = set()
    num_rounds = 0
    for transfer in transfers:
        number, sender, size = transfer.piece.round, transfer.sender, transfer.num_bytes
        num_rounds = max(num_rounds, number + 1)
        if (part := (sender, transfer.name, transfer.made, transfer.dtype)) not in seen:
            seen.add(part)
            octets = size_of(transfer.made.rows, transfer.made.columns, SIZES[transfer.dtype])
            making[sender][number] += octets / way.made + way.make_seconds
        making[sender][number] += size / way.packed + way.part_seconds
        writing[transfer.receiver][number] += size / way.written + way.part_seconds
        messages[sender][number][transfer.receiver] += size
    if digests:
        _add_digests(making, transfers, digests)
    return Traffic(making, writing, messages, num_rounds)


def _add_digests(
    making: Mapping[int, dict[int, float]], transfers: Sequence[SliceTransfer], digests: Digesting
) -> None:
    """Add what senders digest: of parts that several receivers keep, what the first of them gets."""
    first: dict[tuple[str, Box, Box, str], SliceTransfer] = {}
    for transfer in sorted(transfers, key=lambda transfer: transfer.receiver):
        first.setdefault((transfer.name, transfer.made, transfer.box, transfer.dtype), transfer)
    for transfer in first.values():
        making[transfer.sender][transfer.piece.round] += transfer.num_bytes / digests.rate + digests.part_seconds
    for sender, number in {(transfer.sender, transfer.piece.round) for transfer in first.values()}:
        making[sender][number] += digests.batch_seconds


class Simulation:
    """Senders and receivers that wait for each other as `ShardedTransfer` and `Receiver` do.

    A sender makes its next round while one travels, and sends it when that one has arrived everywhere. A receiver
    awaits a round when the last but one is written. A message travels when its sender has begun and its receiver awaits
    it; each rank's link carries one after the other, in that order, as fast as the way says.

    Args:
        traffic: What there is to do.
        sent: Bytes per second of a link.
    """

    def __init__(self, traffic: Traffic, sent: float):
        self._traffic, self._rate = traffic, sent
        self._ready: list[tuple[float, int, int, int]] = []
        self._begun: dict[tuple[int, int], float] = {}
        self._awaited: dict[tuple[int, int], float] = {}
        self._leaving = Counter({(s, n): len(to) for s, of in traffic.messages.items() for n, to in of.items()})
        self._coming = Counter((r, n) for of in traffic.messages.values() for n, to in of.items() for r in to)
        self._senders_of: dict[tuple[int, int], list[int]] = defaultdict(list)
        for sender, of_rounds in traffic.messages.items():
            for number, to in of_rounds.items():
                for receiver in to:
                    self._senders_of[receiver, number].append(sender)
        self._left, self._came = defaultdict[int, float](float), defaultdict[int, float](float)
        self._sent = defaultdict[tuple[int, int], float](float)
        self._arrived = defaultdict[tuple[int, int], float](float)
        self._next, self._written = Counter[int](), defaultdict[int, float](float)

    def seconds(self) -> float:
        """Return when the last receiver has written its last round."""
        for receiver in self._traffic.writing:
            self._await(receiver, 0)
            self._await(receiver, 1)
            self._write(receiver)
        for sender in self._traffic.messages:
            self._begin(sender, 0, 0.0, 0.0)
        while self._ready:
            ready, number, sender, receiver = heapq.heappop(self._ready)
            takes = self._traffic.messages[sender][number][receiver] / self._rate
            self._left[sender] = max(self._left[sender], ready) + takes
            self._came[receiver] = max(self._came[receiver], ready) + takes
            done = max(self._left[sender], self._came[receiver])
            self._sent[sender, number] = max(self._sent[sender, number], done)
            self._arrived[receiver, number] = max(self._arrived[receiver, number], done)
            self._leaving[sender, number] -= 1
            self._coming[receiver, number] -= 1
            if not self._leaving[sender, number]:
                self._begin(sender, number + 1, self._begun[sender, number], self._sent[sender, number])
            if not self._coming[receiver, number]:
                self._write(receiver)
        assert not any(self._leaving.values()), "messages that nobody awaits"
        return max(self._written.values())

    def _begin(self, sender: int, number: int, last_begun: float, last_sent: float) -> None:
        of_rounds = self._traffic.messages[sender]
        while number < self._traffic.num_rounds and number not in of_rounds:
            number += 1
        if number < self._traffic.num_rounds:
            self._begun[sender, number] = max(last_begun + self._traffic.making[sender][number], last_sent)
            for receiver in of_rounds[number]:
                self._may_travel(number, sender, receiver)

    def _await(self, receiver: int, number: int) -> None:
        self._awaited[receiver, number] = self._written[receiver]
        for sender in self._senders_of.get((receiver, number), ()):
            self._may_travel(number, sender, receiver)

    def _may_travel(self, number: int, sender: int, receiver: int) -> None:
        begun, awaited = self._begun.get((sender, number)), self._awaited.get((receiver, number))
        if begun is not None and awaited is not None:
            heapq.heappush(self._ready, (max(begun, awaited), number, sender, receiver))

    def _write(self, receiver: int) -> None:
        """Let a receiver write what has come, one round after the other."""
        while (number := self._next[receiver]) < self._traffic.num_rounds and not self._coming[receiver, number]:
            self._next[receiver] += 1
            begin = max(self._written[receiver], self._arrived[receiver, number])
            self._written[receiver] = begin + self._traffic.writing[receiver].get(number, 0.0)
            self._await(receiver, number + 2)


def seconds_of(transfers: Sequence[SliceTransfer], way: Transport, digests: Digesting | None = None) -> float:
    """Return the seconds in which transfers are made, sent and written; see `traffic_of`."""
    return Simulation(traffic_of(transfers, way, digests), way.sent).seconds()


def by_layers(transfers: Sequence[SliceTransfer]) -> list[SliceTransfer]:
    """Return transfers in prime-rl's rounds: what is in no layer, then one layer after the other."""
    numbers = [1 + int(found[1]) if (found := LAYER.search(transfer.name)) else 0 for transfer in transfers]
    return [
        transfer._replace(piece=transfer.piece._replace(round=number))
        for transfer, number in zip(transfers, numbers, strict=True)
    ]


@dataclass(frozen=True)
class PrimeRl:
    """What the simulation says of prime-rl's update.

    Args:
        bytes: That an engine rank fetches.
        fetched: Seconds of that alone.
        update: Seconds of an update, fetched and loaded.
        beside: Seconds that an update takes beside both: what EP16 took more than its own simulation.
    """

    bytes: float
    fetched: float
    update: float
    beside: float


def prime_rl(hardware: Hardware, of_engine: Callable[[int], Sequence[SliceTransfer]]) -> PrimeRl:
    """Simulate prime-rl's update of 32 engine ranks; nothing of it is taken from what it is compared with.

    Args:
        hardware: An H200.
        of_engine: Ranks of an engine -> transfers to it.
    """
    way = of_prime_rl(hardware)
    beside = UPDATE_OF_16 - seconds_of(by_layers(of_engine(16)), way)
    transfers = by_layers(of_engine(32))
    received = Counter[int]()
    for transfer in transfers:
        received[transfer.receiver] += transfer.num_bytes
    return PrimeRl(most := max(received.values()), most / way.sent, seconds_of(transfers, way) + beside, beside)


def proof_seconds(transfers: Sequence[SliceTransfer], way: Transport, digests: Digesting) -> float:
    """Return the seconds that digests add to an update: to the senders' rounds, and at the engines when all is written.

    Args:
        transfers: Of an update.
        way: Which they take.
        digests: What they cost.
    """
    kept = defaultdict[int, float](float)
    for transfer in transfers:
        kept[transfer.receiver] += transfer.num_bytes / digests.rate
    for receiver, _ in {(transfer.receiver, transfer.piece.part) for transfer in transfers}:
        kept[receiver] += digests.part_seconds
    at_engines = max(kept.values()) + digests.batch_seconds + digests.key_seconds
    return seconds_of(transfers, way, digests) + digests.key_seconds - seconds_of(transfers, way) + at_engines
