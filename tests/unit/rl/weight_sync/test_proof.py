"""What an engine holds after an update is what the trainer has: real engine, real trainer, and ways to spoil it."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from contextlib import contextmanager

import pytest
import torch
from tests.support.megatron_single import test_config
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TRAINED
from tests.unit.rl.engines.embedded.test_server import SECRET, engine
from tests.unit.rl.megatron_backend import conftest as one_rank

from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.embedded.weights import ServedWeights, views_by_hub_name
from posttrain_weights.digest import key_of
from posttrain_weights.engine_handlers import unpacked

checkpoint, make_policy = one_rank.checkpoint, one_rank.make_policy
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture(scope="module")
def trainer(checkpoint, make_policy):
    """Return a policy and its weights under Hub names."""
    from posttrain.rl.megatron_backend.weights import HubWeights

    policy = make_policy(test_config(TRAINED))
    return policy, HubWeights(policy.chunks, TRAINED)


@contextmanager
def publishing(checkpoint, trainer, strategy="block", fp8=True, secret=SECRET, num_engines=1):
    """Yield the last engine's weights, the client, and what publishes a version."""
    from posttrain.rl.megatron_backend.served_values import ServedValues
    from posttrain.rl.weight_sync.engine_layout import EngineShards
    from posttrain.rl.weight_sync.proof import WeightProof
    from posttrain.rl.weight_sync.publish import WeightPublisher, served_format

    policy, weights = trainer
    rollout = dataclasses.replace(policy.config.rollout, fp8=fp8)
    quantize = dataclasses.replace(policy.config.quantize, strategy=strategy)
    config = dataclasses.replace(policy.config, rollout=rollout, quantize=quantize)
    folder = checkpoint[0]
    with asyncio.Runner() as runner:
        started = [engine(folder) for _ in range(num_engines)]
        servers, workers = zip(*(runner.run(each.__aenter__()) for each in started), strict=True)
        client = EngineClient([str(server.make_url("/")) for server in servers], SECRET, 30)
        runner.run(client.__aenter__())
        values = ServedValues(weights, served_format(config))
        engine_shards = EngineShards(values, client, runner)
        proof = WeightProof(engine_shards, secret)
        publisher = WeightPublisher(config, engine_shards, folder / "none", folder, proof)
        try:
            yield workers[-1]._model, client, publisher, proof, runner
        finally:
            runner.run(client.__aexit__(None, None, None))
            for each in started:
                runner.run(each.__aexit__(None, None, None))


@pytest.mark.parametrize(("strategy", "fp8"), [("block", True), ("channel", True), ("tensor", True), ("block", False)])
def test_what_is_sent_is_what_is_held(checkpoint, trainer, strategy, fp8) -> None:
    with publishing(checkpoint, trainer, strategy, fp8) as (_, client, publisher, proof, runner):
        publisher.publish(1)
        assert {part.name for part in proof._engine_shards.held.parts} == set(trainer[1].names)
        digests = [
            unpacked(runner.run(client.ask_ranks("digests", key=key_of(SECRET, version).hex()))[0][0])
            for version in ("1", "2")
        ]
        publisher.publish(2)
        assert all(first != again for first, again in zip(*digests, strict=True)), "each version has a key"


SPOILED = {
    "one bit": lambda held, _: held[GATE].view(torch.int32)[3, 5].bitwise_xor_(1),
    "a sign": lambda held, _: held[GATE][3].mul_(-1),
    "two rows": lambda held, _: held[GATE].copy_(held[GATE].roll(1, 0)),
    "another expert": lambda held, _: held[GATE].copy_(held[GATE.replace(".3.", ".4.")]),
    "gate for up": lambda held, _: held[GATE].copy_(held[GATE.replace("gate", "up")]),
    "another version": lambda held, before: held[GATE].copy_(before[GATE]),
    "another scale": lambda held, _: held[GATE].mul_(1 + 2**-20),
    "nothing": lambda held, _: held[GATE].zero_(),
}


@pytest.mark.parametrize("way", SPOILED)
def test_an_engine_that_holds_something_else_is_named(checkpoint, trainer, way) -> None:
    with publishing(checkpoint, trainer) as (model, _, publisher, proof, _):
        before = {name: view.clone() for name, view in views_by_hub_name(dict(model.named_parameters())).items()}
        publisher.publish(1)
        with torch.no_grad():
            SPOILED[way](views_by_hub_name(dict(model.named_parameters())), before)
        with pytest.raises(RuntimeError, match=rf"\(engine 0: {re.escape(GATE)}\)"):
            proof.check(1)


def test_of_several_engines_the_one_that_holds_something_else_is_named(checkpoint, trainer) -> None:
    with publishing(checkpoint, trainer, num_engines=2) as (model, _, publisher, proof, _):
        publisher.publish(1)
        with torch.no_grad():
            views_by_hub_name(dict(model.named_parameters()))[GATE].mul_(2)
        with pytest.raises(RuntimeError, match=rf"\(engine 1: {re.escape(GATE)}\)"):
            proof.check(1)


def test_what_is_digested_at_a_time_has_so_many_bytes() -> None:
    from posttrain.rl.weight_sync.proof import _up_to

    for num_bytes, expected in ((16, [[0, 1], [2, 3], [4], []]), (17, [[0, 1, 2], [3, 4], [], []])):
        made = iter([(number, torch.zeros(2), (0, 0)) for number in range(5)])
        assert [[number for number, *_ in _up_to(num_bytes, made)] for _ in range(4)] == expected


def test_an_engine_that_holds_something_else_at_the_end_of_a_rollout_is_named(checkpoint, trainer) -> None:
    with publishing(checkpoint, trainer) as (model, _, publisher, _, _):
        publisher.reverify()  # of nothing: no version was published
        publisher.publish(1)
        publisher.reverify()
        with torch.no_grad():
            views_by_hub_name(dict(model.named_parameters()))[GATE].mul_(2)
        with pytest.raises(RuntimeError, match=rf"weight version 1: .*\(engine 0: {re.escape(GATE)}\)"):
            publisher.reverify()


def test_an_engine_that_is_another_process_at_the_end_of_a_rollout_is_told_from_one_with_other_weights(
    checkpoint, trainer
) -> None:
    with publishing(checkpoint, trainer) as (model, client, publisher, _, runner):
        publisher.publish(1)
        with torch.no_grad():
            views_by_hub_name(dict(model.named_parameters()))[GATE].mul_(2)
        runner.run(client.call_all("POST", "/update_weight_version", {"new_version": "default"}))
        told = r"\(engine 0: it serves version default: it was started again, or somebody else has updated it\)"
        with pytest.raises(RuntimeError, match=told):
            publisher.reverify()


def test_a_tensor_that_an_engine_does_not_have_is_named(checkpoint, trainer, monkeypatch) -> None:
    views = ServedWeights._views
    monkeypatch.setattr(ServedWeights, "_views", lambda self: {n: v for n, v in views(self).items() if n != GATE})
    with (
        publishing(checkpoint, trainer) as (_, _, publisher, _, _),
        pytest.raises(RuntimeError, match=rf"\(engine 0: {re.escape(GATE)}, {re.escape(GATE)}_scale_inv\)"),
    ):
        publisher.publish(1)


def test_digests_of_another_key_do_not_fit(checkpoint, trainer) -> None:
    with publishing(checkpoint, trainer) as (_, client, publisher, _, runner):
        publisher.publish(1)
        told = {runner.run(client.ask_ranks("digest", key=key_of(secret, "1").hex()))[0][0] for secret in (SECRET, "x")}
        assert len(told) == 2


@pytest.mark.parametrize("strategy", ["block", "channel", "tensor"])
def test_what_is_not_finite_is_not_sent(checkpoint, trainer, strategy) -> None:
    (part,) = (shard.values for shard in trainer[1].shards if shard.hf_name == GATE)
    before = part[0, 0].item()
    part[0, 0] = torch.nan
    try:
        with (
            publishing(checkpoint, trainer, strategy) as (_, _, publisher, _, _),
            rejected("values-not-finite", GATE),
        ):
            publisher.publish(1)
    finally:
        part[0, 0] = before


def test_no_weights_are_gathered_while_layers_are_lent(trainer) -> None:
    """A forward pass gathers what has not been since the last update: of a layer that others have lent already."""
    from posttrain.rl.megatron_backend.quantized_weights import QuantizedWeights
    from posttrain.rl.megatron_backend.served_values import ServedValues

    policy, weights = trainer
    groups = [g for chunk in policy.wrapped for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    for group in groups:
        group.param_gather_dispatched = False
    with QuantizedWeights(policy, ServedValues(weights, None)).lent():
        assert [group.param_gather_dispatched for group in groups] == [True] * len(groups)
        assert [group.param_gather_handle for group in groups] == [None] * len(groups)
