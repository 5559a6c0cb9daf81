"""What engines hold, from what they tell: in one process, in a moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.tiny_checkpoint import TINY

from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.rl.weight_sync.engine_layout import CODES, EngineShards, listed
from posttrain_weights.box import Box
from posttrain_weights.engine_handlers import pack
from posttrain_weights.transfer_plan import EngineSlice

SENT = {
    "a.weight": TensorSpec((4, 2), "F8_E4M3"),
    "a.weight_scale_inv": TensorSpec((1, 1), "F32"),
    "b.weight": TensorSpec((2, 2), "BF16"),
    "c.weight": TensorSpec((2, 2), "BF16"),
}


class Engines:
    """Answers as engines do, with parts given as (index of the tensor, box, type)."""

    def __init__(self, *engines: list[tuple[list[list[Any]], list[str]]]):
        self.engines, self.asked = engines, 0

    async def ask_ranks(self, what: str, **order: Any) -> list[list[str]]:
        assert what == "parts"
        assert [name for name, *_ in order["tensors"]] == [*SENT]
        self.asked += 1
        return [[pack({"parts": parts, "derived": derived}) for parts, derived in ranks] for ranks in self.engines]


@pytest.fixture(autouse=True)
def _rank() -> None:
    initialize_single_rank(test_config(TINY))


def held_of(engines: Engines | None) -> tuple[EngineShards, asyncio.Runner]:
    runner = asyncio.Runner()
    return EngineShards(cast(Any, SimpleNamespace(sent_specs=SENT)), cast(Any, engines), runner), runner


def test_parts_have_numbers_of_their_own_and_ranks_name_them() -> None:
    upper, lower = [0, 0, 0, 2, 2, CODES], [0, 2, 0, 2, 2, CODES]
    scale, b = [1, 0, 0, 1, 1, "float32"], [2, 0, 0, 2, 2, "bfloat16"]
    engines = Engines([([upper, scale, b], []), ([lower, scale, b], [])], [([b, upper, scale], ["b.weight"])])
    engine_shards, runner = held_of(engines)
    with runner:
        held = engine_shards.held
        assert held.parts == [
            EngineSlice("a.weight", Box(0, 0, 2, 2), CODES),
            EngineSlice("a.weight_scale_inv", Box(0, 0, 1, 1), "float32"),
            EngineSlice("b.weight", Box(0, 0, 2, 2), "bfloat16"),
            EngineSlice("a.weight", Box(2, 0, 2, 2), CODES),
        ]
        assert held.of_ranks == [[[0, 1, 2], [3, 1, 2]], [[2, 0, 1]]]
        assert held.without == ["c.weight", "b.weight, c.weight"], "which no rank has, or which is derived there"
        assert held.firsts == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 3}
        assert engine_shards.held is held
        engine_shards.reset()
        assert engine_shards.held.of_ranks == held.of_ranks
        assert engines.asked == 2


def test_scales_are_expected_where_codes_are_held() -> None:
    as_numbers = [[0, 0, 0, 4, 2, "bfloat16"], [2, 0, 0, 2, 2, "bfloat16"], [3, 0, 0, 2, 2, "bfloat16"]]
    as_codes = [[0, 0, 0, 4, 2, CODES], *as_numbers[1:]]
    scale = [1, 0, 0, 1, 1, "float32"]
    engines = Engines([(as_numbers, [])], [(as_codes, [])], [([*as_numbers, scale], [])], [([*as_codes, scale], [])])
    engine_shards, runner = held_of(engines)
    with runner:
        assert engine_shards.held.without == ["", "a.weight_scale_inv", "a.weight_scale_inv", ""]


def test_five_names_are_listed_and_the_others_counted() -> None:
    assert [listed("abcdefgh"[:count]) for count in (0, 1, 5)] == ["", "a", "a, b, c, d, e"]
    assert [listed("abcdefgh"[:count]) for count in (6, 8)] == ["a, b, c, d, e and 1 more", "a, b, c, d, e and 3 more"]


def test_a_rank_without_a_client_holds_nothing() -> None:
    engine_shards, runner = held_of(None)
    with runner:
        assert (engine_shards.held.parts, engine_shards.held.of_ranks) == ([], [])
    assert torch.distributed.is_initialized()
