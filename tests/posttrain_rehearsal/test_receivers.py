from __future__ import annotations

import asyncio
from types import SimpleNamespace

from tests.support.megatron_single import CONFIG_DIR

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.config.derived import world_size
from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain_rehearsal.receivers import SimulatedEngineShards, engine_sizes, places_of
from posttrain_weights.box import Box
from posttrain_weights.transfer_plan import plan_transfer
from posttrain_weights.transport import Transport, Transports

WHOLE, UPPER, LOWER = Box(0, 0, 8, 4), Box(0, 0, 4, 4), Box(4, 0, 4, 4)
SCALE = Box(0, 0, 1, 1)
# Two ranks have halves of a projection in two layers, one has the experts.
HOLDERS = {
    f"layers.{layer}.{name}": boxes
    for layer in (0, 1)
    for name, boxes in (
        ("up.weight", {UPPER: [0, 2], LOWER: [1]}),
        ("experts.0.weight", {WHOLE: [1]}),
        ("experts.0.weight_scale_inv", {SCALE: [1]}),
        ("experts.1.weight", {WHOLE: [2]}),
        ("experts.1.weight_scale_inv", {SCALE: [2]}),
    )
}


def config_of(**words: object) -> Config:
    return resolve({"site": "local", "model": "glm5_4layer", **words}, CONFIG_DIR).config


def engine_shards() -> SimulatedEngineShards:
    def spec(name: str) -> TensorSpec:
        return TensorSpec((1, 1), "F32") if name.endswith("inv") else TensorSpec((8, 4), kinds["experts" in name])

    kinds = {True: "F8_E4M3", False: "BF16"}
    values = SimpleNamespace(holders=HOLDERS, sent_specs={name: spec(name) for name in HOLDERS})
    with asyncio.Runner() as runner:
        return SimulatedEngineShards(values, None, runner, config_of())  # type: ignore[arg-type]


def test_each_engine_gets_each_part_once_of_one_layer_and_expert_of_each_kind_of_every_rank() -> None:
    held = engine_shards().held
    assert len(held.of_ranks) == len(engine_sizes(config_of()))
    for ranks in held.of_ranks:
        assert sorted(part for rank in ranks for part in rank) == [*range(len(held.parts))]
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    assert {(part.name, part.box, part.dtype) for part in held.parts} == {
        ("layers.0.up.weight", UPPER, "bfloat16"),
        ("layers.0.up.weight", LOWER, "bfloat16"),
        ("layers.0.experts.0.weight", WHOLE, "float8_e4m3fn"),
        ("layers.0.experts.0.weight_scale_inv", SCALE, "float32"),
        ("layers.0.experts.1.weight", WHOLE, "float8_e4m3fn"),
        ("layers.0.experts.1.weight_scale_inv", SCALE, "float32"),
    }


def test_every_rank_that_has_something_sends() -> None:
    held = engine_shards().held
    transfers = plan_transfer([[held.parts[p] for p in rank] for rank in held.of_ranks[0]], HOLDERS, 1 << 20)
    assert {transfer.sender for transfer in transfers} == {0, 1, 2}


def test_engines_are_on_the_trainers_gpus_or_on_nodes_of_their_own() -> None:
    shared = config_of()
    trainers, engines = world_size(shared), sum(engine_sizes(shared))
    ways = Transports(places_of(shared), trainers)
    assert {ways.way(rank, trainers + rank) for rank in range(engines)} == {Transport.SHARED}
    assert ways.way(0, trainers + 1) is Transport.GROUP
    apart = resolve({"site": "local", "model": "glm5", "nodes": 32, "set": "engine.own_nodes=16"}, CONFIG_DIR).config
    trainers, engines = world_size(apart), sum(engine_sizes(apart))
    ways = Transports(places_of(apart), trainers)
    assert len(ways.group) == trainers + engines
    assert ways.way(0, trainers) is Transport.GROUP
