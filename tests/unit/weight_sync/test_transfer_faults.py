"""Faults in a sharded transfer: engines hold the trainer's weights, or the step ends and names what differs."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.support.fault_parts import Count
from tests.support.loopback_engines import LoopbackEngines
from tests.support.megatron_layouts import as_served, received_otherwise
from tests.support.megatron_single import test_config
from tests.support.tiny_checkpoint import TRAINED
from tests.unit.megatron_backend import conftest as one_rank

checkpoint, make_policy = one_rank.checkpoint, one_rank.make_policy
STRATEGY, ROUND_BYTES = "block", 1 << 14
Place = tuple[int, int]  # round, sender
Spoil = Callable[[torch.Tensor, Place, Mapping[Place, torch.Tensor], random.Random], torch.Tensor | None]


class DiesError(RuntimeError):
    """A member of the transfer ends in it."""


def flipped(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    message[drawn.randrange(len(message))] ^= 1 << drawn.randrange(8)
    return message


def truncated(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    message[drawn.randrange(len(message)) :] = 0
    return message


def reordered(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    return message.roll(16 * drawn.randrange(1, max(2, len(message) // 16)))


def forged(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    generator = torch.Generator().manual_seed(drawn.randrange(1 << 30))
    return torch.randint(0, 256, (len(message),), generator=generator, dtype=torch.uint8)


def dropped(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> None:
    return None


def repeated(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    """Another round's message comes again."""
    other = before[drawn.choice([known for known in before if known != place])]
    message[: len(other)] = other[: len(message)]
    return message


def stale(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    """The last version's."""
    return before[place]


def killed(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> None:
    raise DiesError("a member has ended")


SPOILED: tuple[Spoil, ...] = (flipped, truncated, reordered, forged, dropped, repeated, stale)


class Wire:
    """A channel of a receiver's on which one message can be spoiled.

    Args:
        channel: The real one.
    """

    def __init__(self, channel: Any):
        self._channel = channel
        self.before: dict[Place, torch.Tensor] = {}
        self.spoil: tuple[Spoil, Place, random.Random] | None = None

    @property
    def num_received(self) -> int:
        return self._channel.num_received

    def begin(self, sent: Any, sizes: Any, number: int) -> Spoiled:
        return Spoiled(self, self._channel.begin(sent, sizes, number), number)

    def came(self, place: Place, message: torch.Tensor) -> torch.Tensor | None:
        """Return what a receiver gets of a message."""
        came = message.clone()
        if self.spoil and self.spoil[1] == place:
            message = self.spoil[0](message, place, self.before, self.spoil[2])
        self.before[place] = came
        return message


@dataclass(frozen=True)
class Spoiled:
    """A round on its way."""

    wire: Wire
    begun: Any
    number: int

    def wait(self) -> dict[int, torch.Tensor]:
        came = {by: self.wire.came((self.number, by), message) for by, message in self.begun.wait().items()}
        return {by: message for by, message in came.items() if message is not None}


class Transfers:
    """A trainer of one rank, and two ranks of an engine whose messages can be spoiled."""

    def __init__(self, policy: Any, weights: Any, runner: asyncio.Runner, seconds: float = 60.0):
        from posttrain.checkpoint.quantization.fp8 import Fp8Format
        from posttrain.megatron_backend.served_values import ServedValues
        from posttrain.weight_sync.holdings import Holdings
        from posttrain.weight_sync.proof import WeightProof
        from posttrain.weight_sync.sharded import ShardedTransfer

        engine = dataclasses.replace(policy.config.engine, request_timeout_seconds=seconds)
        config = dataclasses.replace(policy.config, engine=engine)
        self.weights, self.version, values = weights, 0, ServedValues(weights, Fp8Format(STRATEGY))
        sent = {name: (spec.shape, spec.dtype) for name, spec in values.sent_specs.items()}
        self.engines = LoopbackEngines(sent, 1, 2)
        holdings = Holdings(values, self.engines, runner)
        self.transfer = ShardedTransfer(config, holdings, ROUND_BYTES)
        self.proof = WeightProof(holdings, "of the attempt")
        self.publish()
        self.wires = [Wire(rank.channel) for rank in self.engines.ranks]
        for rank, wire in zip(self.engines.ranks, self.wires, strict=True):
            rank.receiver._channel = wire
        self.publish()

    def publish(self) -> None:
        """Change all weights, send them, and have them proven."""
        self.version += 1
        for shard in self.weights.shards:
            shard.values.mul_(-1.01 if self.version % 2 else -1 / 1.01)
        self.transfer.send(self.version)
        self.proof.check(self.version)

    def publish_spoiled(self, spoil: Spoil, drawn: random.Random) -> bool:
        """Spoil one message of it, and tell whether that was noticed."""
        wire = drawn.choice(self.wires)
        wire.spoil = spoil, drawn.choice([*wire.before]), drawn
        try:
            self.publish()
        except RuntimeError:
            return True
        finally:
            wire.spoil = None
        return False

    @property
    def num_wrong(self) -> int:
        """How many parts are not the trainer's."""
        tensors = dict(self.weights.gather())
        _, held = as_served(self.weights, tensors, STRATEGY)
        return received_otherwise(self.engines, self.weights, tensors, held, STRATEGY)


@pytest.fixture(scope="module")
def trainer(checkpoint, make_policy) -> tuple[Any, Any]:
    from posttrain.megatron_backend.weights import HubWeights

    policy = make_policy(test_config(TRAINED))
    return policy, HubWeights(policy.chunks, TRAINED)


def spoil_many(trainer: tuple[Any, Any], spoil: Spoil, number: int, seed: int) -> int:
    """Spoil so many transfers in one way; returns how many of them spoiled nothing, which is looked at."""
    drawn, harmless = random.Random(seed), 0
    with asyncio.Runner() as runner:
        transfers = Transfers(*trainer, runner)
        assert transfers.num_wrong == 0
        for index in range(number):
            was_noticed = transfers.publish_spoiled(spoil, drawn)
            if not was_noticed or index < 5:
                assert was_noticed == (transfers.num_wrong > 0), f"{spoil.__name__}, number {index}"
            harmless += not was_noticed
        transfers.publish()  # and nothing of it is left
        assert transfers.num_wrong == 0
    return harmless


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_spoiled_message_is_noticed(trainer, spoil: Spoil) -> None:
    assert spoil_many(trainer, spoil, 3, seed=1) < 3


@pytest.mark.faults("transfer")
@pytest.mark.timeout(3600)
def test_ten_thousand_spoiled_messages_are_noticed(trainer, count: Count) -> None:
    step = 100
    for number in range(len(count.rows), 10_000 // step + 1):
        spoil = SPOILED[number % len(SPOILED)]
        harmless = spoil_many(trainer, spoil, step, seed=100 + number)
        count.add([{"kind": spoil.__name__, "spoiled": step - harmless, "harmless": harmless}])
    assert sum(row["spoiled"] for row in count.rows) > 9_000


@pytest.mark.parametrize("times", [2, pytest.param(100, marks=pytest.mark.faults("transfer"))])
def test_members_that_end_leave_no_version(trainer, times: int) -> None:
    """A receiver, or the sender: no engine has a version then, and the next transfer that succeeds gives it one."""
    drawn = random.Random(5)
    for number in range(times):
        with asyncio.Runner() as runner:
            transfers = Transfers(*trainer, runner, seconds=1.0)
            if number % 2:
                assert transfers.publish_spoiled(killed, drawn)
            else:
                transfers.transfer._channel = _Dying(transfers.transfer._channel, drawn.randrange(20))
                with pytest.raises(RuntimeError):
                    transfers.publish()
            assert transfers.engines.version == -1
            transfers = Transfers(*trainer, runner)
            assert transfers.num_wrong == 0


@pytest.mark.parametrize("kept_as", ["float8_e4m3fn", "bfloat16"])
def test_weights_that_are_not_finite_get_no_version(trainer, kept_as: str) -> None:
    """Of engines that keep codes, and of those that keep the numbers of a tensor that is quantised."""
    from posttrain.errors import CheckpointError

    with asyncio.Runner() as runner:
        transfers = Transfers(*trainer, runner)
        held = {part.name: part.dtype for rank in transfers.engines.ranks for part in rank.parts}
        names = [name for name, dtype in held.items() if dtype == kept_as and "gate_proj" in name]
        (part,) = (shard.values for shard in trainer[1].shards if shard.hf_name == names[0])
        before = part[0, 0].item()
        part[0, 0] = torch.nan
        try:
            with pytest.raises(CheckpointError, match="NaN or infinity"):
                transfers.publish()
        finally:
            part[0, 0] = before
        assert transfers.engines.version == -1
        transfers.publish()
        assert transfers.num_wrong == 0


class _Dying:
    """A channel that ends after some rounds."""

    def __init__(self, channel: Any, rounds: int):
        self._channel, self._rounds, self.buffer = channel, rounds, channel.buffer

    def begin(self, sent: Any, sizes: Any, number: int) -> Any:
        if number == self._rounds:
            raise DiesError("a member has ended")
        return self._channel.begin(sent, sizes, number)
