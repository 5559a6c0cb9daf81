"""Faults in a sharded transfer: engines hold the trainer's weights, or the step ends and names what differs."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.fault_parts import Count
from tests.support.loopback_engines import LoopbackEngines
from tests.support.megatron_layouts import as_served, received_otherwise
from tests.support.megatron_single import test_config
from tests.support.rejections import rejected
from tests.support.spoiled_messages import SPOILED, Place, Spoil, flipped, forged
from tests.support.tiny_checkpoint import TRAINED
from tests.unit.rl.megatron_backend import conftest as one_rank

from posttrain.plan.sizing.memory import GIB
from posttrain.plan.sizing.memory_phases import phase_memory
from posttrain_weights.channel import TELLING

checkpoint, make_policy = one_rank.checkpoint, one_rank.make_policy
STRATEGY, ROUND_BYTES = "block", 1 << 14
DAY_SECONDS = 24 * 3600.0


class DiesError(RuntimeError):
    """A member of the transfer ends in it."""


def killed(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> None:
    raise DiesError("a member has ended")


class Wire:
    """What a receiver gets its messages from, of which one can be spoiled.

    Args:
        inbox: The real one.
    """

    def __init__(self, inbox: Any):
        self._inbox, self.close = inbox, inbox.close
        self.before: dict[Place, torch.Tensor] = {}
        self.spoil: tuple[Spoil, Place, random.Random] | None = None

    def begin(self, sizes: Any, number: int) -> Any:
        return self._inbox.begin(sizes, number), number

    def wait(self, coming: Any) -> dict[int, torch.Tensor]:
        begun, number = coming
        came = {by: self.came((number, by), message) for by, message in self._inbox.wait(begun).items()}
        return {by: message for by, message in came.items() if message is not None}

    def done(self, coming: Any, number: int) -> None:
        self._inbox.done(coming[0], number)

    def came(self, place: Place, message: torch.Tensor) -> torch.Tensor | None:
        """Return what a receiver gets of a message."""
        came = message.clone()
        if self.spoil and self.spoil[1] == place:
            spoiled = self.spoil[0](message, place, self.before, self.spoil[2])
            # As many bytes come as a receiver awaits.
            message = spoiled if spoiled is None else F.pad(spoiled, (0, len(came) - len(spoiled)))
        self.before[place] = came
        return message


class Transfers:
    """A trainer of one rank, and two ranks of an engine whose messages can be spoiled.

    Args:
        policy: The trainer's.
        weights: Its.
        runner: An event loop.
        seconds: Within which others have to answer.
        share: Of the numbers that an update changes, and brings alone; None: it changes and brings all of them.
    """

    def __init__(
        self, policy: Any, weights: Any, runner: asyncio.Runner, seconds: float = 60.0, share: float | None = None
    ):
        from posttrain.checkpoint.quantization.fp8 import Fp8Format
        from posttrain.rl.megatron_backend.served_values import ServedValues
        from posttrain.rl.weight_sync.engine_layout import EngineShards
        from posttrain.rl.weight_sync.proof import WeightProof
        from posttrain.rl.weight_sync.publish import WeightPublisher
        from posttrain.rl.weight_sync.sharded import ShardedTransfer

        sends_changes = share is not None
        options = {"kind": "sglang", "request_timeout_seconds": seconds, "weight_deltas": sends_changes}
        engine = dataclasses.replace(policy.config.engine, **options)
        self.share, self.failure = share, ""
        self.config = config = dataclasses.replace(policy.config, engine=engine)
        self.weights, self.version, values = weights, 0, ServedValues(weights, Fp8Format(STRATEGY))
        sent = {name: (spec.shape, spec.dtype) for name, spec in values.sent_specs.items()}
        self.engines = LoopbackEngines(sent, 1, 2)
        engine_shards = EngineShards(values, self.engines, runner)
        self.publisher = WeightPublisher(
            config, engine_shards, Path(), Path(), WeightProof(engine_shards, "of the attempt")
        )
        self.publisher._sharded = self.transfer = ShardedTransfer(config, engine_shards, ROUND_BYTES)
        self.publish()
        self.wires = [Wire(rank.receiver.inbox) for rank in self.engines.ranks]
        for rank, wire in zip(self.engines.ranks, self.wires, strict=True):
            rank.receiver.inbox = wire
        self.publish()

    def publish(self) -> None:
        """Change weights, send them, and have them proven."""
        self.version += 1
        for number, shard in enumerate(self.weights.shards):
            if self.share is None:
                shard.values.mul_(-1.01 if self.version % 2 else -1 / 1.01)
            else:  # other signs: no scale changes
                drawn = torch.Generator().manual_seed(1000 * self.version + number)
                where = torch.rand(shard.values.shape, generator=drawn) < self.share
                shard.values[where] = -shard.values[where]
        self.publisher.publish(self.version)

    def num_sent(self) -> int:
        """Update once, and return what was sent."""
        before = self.transfer.num_sent
        self.publish()
        return self.transfer.num_sent - before

    def publish_spoiled(self, spoil: Spoil, drawn: random.Random) -> bool:
        """Spoil one message of it, and tell whether that was noticed."""
        wire = drawn.choice(self.wires)
        wire.spoil = spoil, drawn.choice([*wire.before]), drawn
        try:
            self.publish()
        except RuntimeError as error:
            self.failure = str(error)
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
    from posttrain.rl.megatron_backend.weights import HubWeights

    policy = make_policy(test_config(TRAINED))
    return policy, HubWeights(policy.chunks, TRAINED)


def spoil_many(trainer: tuple[Any, Any], spoil: Spoil, number: int, seed: int, share: float | None = None) -> int:
    """Spoil so many transfers in one way; returns how many of them spoiled nothing, which is looked at."""
    drawn, harmless = random.Random(seed), 0
    with asyncio.Runner() as runner:
        transfers = Transfers(*trainer, runner, share=share)
        assert transfers.num_wrong == 0
        for index in range(number):
            was_noticed = transfers.publish_spoiled(spoil, drawn)
            if not was_noticed or index < 5:
                assert was_noticed == (transfers.num_wrong > 0), f"{spoil.__name__}, number {index}"
            harmless += not was_noticed
            if was_noticed and share is not None:
                transfers.publish()  # everything; the next one brings changes again
        transfers.publish()  # and nothing of it is left
        assert transfers.num_wrong == 0
    return harmless


@pytest.mark.parametrize("share", [None, 0.05])
@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_spoiled_message_is_noticed(trainer, spoil: Spoil, share: float | None) -> None:
    assert spoil_many(trainer, spoil, 3, seed=1, share=share) < 3


@pytest.mark.faults("transfer")
@pytest.mark.timeout(3600)
def test_ten_thousand_spoiled_messages_are_noticed(trainer, count: Count) -> None:
    step = 100
    for number in range(len(count.rows), 10_000 // step + 1):
        spoil = SPOILED[number % len(SPOILED)]
        share = 0.05 if number % 10 == 9 else None
        harmless = spoil_many(trainer, spoil, step, seed=100 + number, share=share)
        count.add(
            [
                {
                    "kind": spoil.__name__,
                    "changes alone": share is not None,
                    "spoiled": step - harmless,
                    "harmless": harmless,
                }
            ]
        )
    assert sum(row["spoiled"] for row in count.rows) > 9_000


@pytest.mark.parametrize("times", [2, pytest.param(100, marks=pytest.mark.faults("transfer"))])
def test_members_that_end_leave_no_version(trainer, times: int) -> None:
    """A receiver, or the sender: no engine has a version then, and the next transfer that succeeds gives it one.

    The others do not wait for it, which would take a day, and what is told is the cause.
    """
    drawn = random.Random(5)
    for number in range(times):
        with asyncio.Runner() as runner:
            transfers = Transfers(*trainer, runner, seconds=DAY_SECONDS)
            if number % 2:
                assert transfers.publish_spoiled(killed, drawn)
                assert transfers.failure == "a member has ended"
            else:
                transfers.transfer._sender = _Dying(transfers.transfer._sender, drawn.randrange(20))
                with pytest.raises(RuntimeError, match=r"^a member has ended$"):
                    transfers.publish()
            assert transfers.engines.version == -1
            transfers = Transfers(*trainer, runner)
            assert transfers.num_wrong == 0


@pytest.mark.parametrize("kept_as", ["float8_e4m3fn", "bfloat16"])
def test_weights_that_are_not_finite_get_no_version(trainer, kept_as: str) -> None:
    """Of engines that keep codes, and of those that keep the numbers of a tensor that is quantised."""

    with asyncio.Runner() as runner:
        transfers = Transfers(*trainer, runner)
        held = {part.name: part.dtype for rank in transfers.engines.ranks for part in rank.parts}
        names = [name for name, dtype in held.items() if dtype == kept_as and "gate_proj" in name]
        (part,) = (shard.values for shard in trainer[1].shards if shard.hf_name == names[0])
        before = part[0, 0].item()
        part[0, 0] = torch.nan
        try:
            with rejected("values-not-finite"):
                transfers.publish()
        finally:
            part[0, 0] = before
        assert transfers.engines.version == -1
        transfers.publish()
        assert transfers.num_wrong == 0


class _Dying:
    """A sender that ends after some rounds."""

    def __init__(self, sender: Any, rounds: int):
        self._sender, self._rounds, self.pack, self.finish = sender, rounds, sender.pack, sender.finish
        self.tell = sender.tell

    def begin(self, number: int, messages: Any) -> Any:
        if number == self._rounds:
            raise DiesError("a member has ended")
        return self._sender.begin(number, messages)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_changes_bring_what_all_of_it_would_bring(trainer, share: float) -> None:
    """The same bits, update after update: a part whose changes take more than itself comes whole."""
    with asyncio.Runner() as runner:
        whole = Transfers(*trainer, runner).num_sent()
        transfers = Transfers(*trainer, runner, share=share)
        for _ in range(4):
            sent = transfers.num_sent()
            assert transfers.num_wrong == 0
        planned = max(row.gpu["sent_weights"] for row in phase_memory(transfers.config))
        assert 0 < transfers.transfer._sent.num_bytes <= planned * GIB
        tellings = 16 * sum(len(of_round) for of_round in transfers.transfer._rounds)
        if share <= 0.02:
            assert sent - tellings < 0.1 * whole, "of small parts"
        else:
            assert sent - tellings <= whole


def test_each_shard_is_made_once_in_an_update_and_digested_on_the_way(trainer) -> None:
    from posttrain.rl.weight_sync.sharded import _Made

    with asyncio.Runner() as runner:
        transfers = Transfers(*trainer, runner)
        proof, values, made, begun = transfers.publisher._proof, transfers.transfer._values, [], []
        parts = values.parts

        def record(shards, *more):
            made.extend((id(shard), more[1]) for shard in shards)
            return parts(shards, *more)

        values.parts = record
        sent = transfers.transfer.send(9, begin_digests=lambda: begun.append(proof.begin(9)) or begun[0])
        assert len(made) == len(set(made)) > 0
        assert [sent] == begun
        proof.check(9, sent)
        assert len(made) == len(set(made)), "nothing is made anew to be proven"
        one_at_a_time = _Made(values, values.agreed_magnitudes(), None, False)
        for transfer in itertools.chain(*transfers.transfer._rounds):
            one_at_a_time.part(transfer)
            assert {name.removesuffix("_scale_inv") for name, *_ in one_at_a_time._parts} == {
                transfer.name.removesuffix("_scale_inv")
            }


def test_after_a_fault_or_a_new_engine_everything_comes(trainer) -> None:
    with asyncio.Runner() as runner:
        whole = Transfers(*trainer, runner).num_sent()
        transfers = Transfers(*trainer, runner, share=0.01)
        assert transfers.num_sent() < whole / 4
        assert transfers.publish_spoiled(forged, random.Random(2))
        assert transfers.num_sent() > whole, "and what is told of it"
        assert transfers.num_wrong == 0
        assert transfers.num_sent() < whole / 4
        assert transfers.publisher.is_due_at_start
        transfers.publisher.reconnect()
        assert transfers.num_sent() > whole
        assert transfers.num_wrong == 0


def test_changes_of_other_weights_are_noticed(trainer) -> None:
    """An engine has something else than what was sent to it: once everything has come, it is right again.

    Nothing is settled before it is proven, or changes of the wrong base would come next.
    """
    with asyncio.Runner() as runner:
        transfers = Transfers(*trainer, runner, share=0.01)
        view = max(transfers.engines.ranks[0].views, key=torch.Tensor.numel)
        view[0, 0] = 1.5
        with pytest.raises(RuntimeError, match="engines hold other weights"):
            transfers.publish()
        transfers.publish()
        assert transfers.num_wrong == 0


def test_a_spoiled_announcement_is_noticed(trainer) -> None:
    drawn = random.Random(3)
    for spoil in (flipped, forged):
        with asyncio.Runner() as runner:
            transfers = Transfers(*trainer, runner, seconds=1.0, share=0.05)
            rank = drawn.choice(transfers.engines.ranks)
            rank.receiver._channel = misheard = _Misheard(rank.channel, spoil, drawn)
            with pytest.raises(RuntimeError):
                transfers.publish()
            assert misheard.num_spoiled == 1
            assert transfers.engines.version == -1


class _Misheard:
    """A channel on which one announcement comes with other bits."""

    def __init__(self, channel: Any, spoil: Spoil, drawn: random.Random):
        self._channel, self._spoil, self._drawn, self.num_spoiled = channel, spoil, drawn, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._channel, name, value) if name == "num_received" else object.__setattr__(self, name, value)

    def receive(self, place: torch.Tensor, by: int, tag: int) -> Any:
        work = self._channel.receive(place, by, tag)
        if tag >= TELLING and not self.num_spoiled:
            work.wait()
            self.num_spoiled += 1
            octets = place.view(torch.uint8).view(-1)
            octets.copy_(self._spoil(octets.clone(), (0, 0), {}, self._drawn))
            return self
        return work

    def wait(self) -> None:
        """It has come."""
