"""The slices of the trainer's weights that each engine rank holds; requested once per engine process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from posttrain.rl.engines.buckets import weight_of
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.event_loop import EventLoop
from posttrain.rl.megatron_backend.plain_data import share_plain
from posttrain.rl.megatron_backend.served_values import ServedValues
from posttrain_weights.box import Box
from posttrain_weights.engine_handlers import unpacked
from posttrain_weights.transfer_plan import EngineSlice

CODES = "float8_e4m3fn"
MOST_NAMES = 5


@dataclass(frozen=True)
class EngineLayout:
    """The layout of the engines' weights.

    Args:
        parts: All distinct slices.
        of_ranks: For each rank of each engine, the indices in `parts` of the slices it holds, in its order.
        without: For each engine, names of tensors that it lacks or does not hold whole.
    """

    parts: list[EngineSlice]
    of_ranks: list[list[list[int]]]
    without: list[str]

    @cached_property
    def firsts(self) -> dict[tuple[int, int], int]:
        """First holder of each slice: (rank, counted over all engines; position in its order) -> index of the slice."""
        found: dict[int, tuple[int, int]] = {}
        for rank, numbers in enumerate(itertools.chain(*self.of_ranks)):
            for place, number in enumerate(numbers):
                found.setdefault(number, (rank, place))
        return {where: number for number, where in found.items()}


@dataclass(frozen=True)
class EngineShards:
    """Asks the engines for their weight layout.

    Args:
        values: The engines' form of this rank's shards.
        client: The engines, on rank 0; None elsewhere.
        runner: Event loop of rank 0.
    """

    values: ServedValues
    client: EngineClient | None
    runner: EventLoop

    @cached_property
    def held(self) -> EngineLayout:
        """The layout, the same on every rank; the first access is collective."""
        numbers: dict[EngineSlice, int] = {}
        of_ranks, without = [], []
        for told in self._asked() if self.client else []:
            held = [[EngineSlice(name, Box(*box), dtype) for name, *box, dtype in rank["parts"]] for rank in told]
            of_ranks.append([[numbers.setdefault(part, len(numbers)) for part in rank] for rank in held])
            names = {part.name: part.dtype for rank in held for part in rank}
            derived = {name for rank in told for name in rank["derived"]}
            without.append(listed(sorted(self._expected_names(names) ^ names.keys() | derived)))
        found = [[part.name, [*part.box], part.dtype] for part in numbers]
        parts, of_ranks, without = share_plain([found, of_ranks, without])
        return EngineLayout([EngineSlice(name, Box(*box), dtype) for name, box, dtype in parts], of_ranks, without)

    def reset(self) -> None:
        """Drop the cached layout, because an engine was replaced by a new process."""
        self.__dict__.pop("held", None)

    def _asked(self) -> list[list[dict[str, Any]]]:
        """Return the slices, with names, that each rank of each engine reports."""
        assert self.client
        sent = [[name, list(spec.shape), spec.dtype] for name, spec in self.values.sent_specs.items()]
        engines = self.runner.run(self.client.ask_ranks("parts", tensors=sent))
        told = [[unpacked(answer) for answer in answers] for answers in engines]
        for rank in itertools.chain(*told):
            rank["parts"] = [[sent[index][0], *rest] for index, *rest in rank["parts"]]
        return told

    def _expected_names(self, dtypes: Mapping[str, str]) -> set[str]:
        """Return the names that an engine must hold: scales only for quantized tensors."""
        names = self.values.sent_specs
        of_scales = {name: code for name in names if (code := weight_of(name)) != name and code in names}
        return {name for name in names if dtypes.get(of_scales.get(name, ""), CODES) == CODES}


def listed(names: Sequence[str]) -> str:
    """Return a short list: the first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
