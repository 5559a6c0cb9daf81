"""Engine ranks that keep what a sharded transfer brings them, each a thread; they are asked as SGLang's are.

How they cut tensors is drawn by a seed: by rows, by columns, whole on each rank, or on one of them; some keep numbers
in the place of codes and scales. Around each part lies memory that nobody may touch.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from posttrain.rl.engines.responses import has_left
from posttrain.rl.weight_sync.engine_layout import CODES
from posttrain_weights.box import Box, whole_box
from posttrain_weights.channel import Channel
from posttrain_weights.digest import Digester, as_text, together
from posttrain_weights.engine_handlers import pack
from posttrain_weights.receiver import Receiver
from posttrain_weights.transfer_plan import EngineSlice
from posttrain_weights.transport import Place, rendezvous

UNTOUCHED = 3.0
Shape = tuple[int, ...]


class EngineRank:
    """What one rank keeps.

    Args:
        parts: In its order.
    """

    def __init__(self, parts: Sequence[EngineSlice]):
        self.parts = parts
        self._around = [
            torch.full((part.box.rows + 2, part.box.columns + 3), UNTOUCHED).to(getattr(torch, part.dtype))
            for part in parts
        ]
        self.channel: Channel | None = None
        self.receiver: Receiver | None = None

    @property
    def views(self) -> list[torch.Tensor]:
        return [around[1:-1, 2:-1] for around in self._around]

    @property
    def num_bytes(self) -> int:
        return sum(view.numel() * view.element_size() for view in self.views)

    def digests(self, key: str) -> torch.Tensor:
        corners = [(part.box.row, part.box.column) for part in self.parts]
        return Digester.of_parts(bytes.fromhex(key), self.views, corners)

    def count_wrong(self, expected: Callable[[EngineSlice], torch.Tensor]) -> int:
        """Return how many parts have other bits than expected, or spoiled what lies around them."""
        wrong = 0
        for part, view, around in zip(self.parts, self.views, self._around, strict=True):
            is_equal = torch.equal(_octets(view), _octets(expected(part)))
            rim = around.clone().float()
            rim[1:-1, 2:-1] = UNTOUCHED
            wrong += not is_equal or not bool((rim == UNTOUCHED).all())
        return wrong


class LoopbackEngines:
    """Engines of some ranks each, as a client of engines knows them.

    Args:
        tensors: Name -> (shape, type as safetensors spell it) of everything that is sent.
        num_engines: How many.
        num_ranks: Of each.
        seed: Of how they cut.
        places: Where each rank says that it is.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[Shape, str]],
        num_engines: int,
        num_ranks: int,
        seed: int = 1,
        places: Sequence[Place] = (),
    ):
        self._places = places
        drawn = random.Random(seed)
        held: list[list[EngineSlice]] = [[] for _ in range(num_ranks)]
        as_numbers = {n for n, (_, dtype) in tensors.items() if dtype == "F8_E4M3" and drawn.random() < 0.2}
        for name, (shape, dtype) in tensors.items():
            if not any(name.startswith(f"{codes}_scale") for codes in as_numbers):
                for rank, part in _cut(name, shape, _kept_as(dtype, name in as_numbers, drawn), num_ranks, drawn):
                    held[rank].append(part)
        self.engines = [[EngineRank(parts) for parts in held] for _ in range(num_engines)]
        self._threads = ThreadPoolExecutor(num_engines * num_ranks)
        self._names = [*tensors]
        self.version, self._refused = -1, ""

    @property
    def ranks(self) -> list[EngineRank]:
        return [*itertools.chain(*self.engines)]

    async def weight_versions(self) -> list[str]:
        return [str(self.version)] * len(self.engines)

    async def begin_update(self, version: int) -> None:
        self.version = -1

    async def end_received(self, version: int) -> None:
        if refused := self._refused:
            self._refused = ""
            raise RuntimeError(refused)
        self.version = version

    async def ask_ranks(
        self, call: str, may_repeat: bool = True, each: Sequence[Mapping[str, Any]] = (), **order: Any
    ) -> list[list[str]]:
        answer, loop, work = getattr(self, f"_{call}"), asyncio.get_running_loop(), []
        for engine, own in zip(self.engines, each or [{}] * len(self.engines), strict=True):
            for number, rank in enumerate(engine):
                asked = partial(answer, rank, number, **order, **own)
                work.append(loop.run_in_executor(self._threads, asked))
        ended = await asyncio.gather(*work, return_exceptions=True)  # all of them, as SGLang does
        if failures := [answer for answer in ended if isinstance(answer, BaseException)]:
            raise min(failures, key=lambda failure: has_left(str(failure)))
        answers = iter(ended)
        return [[next(answers) for _ in engine] for engine in self.engines]

    def _parts(self, rank: EngineRank, number: int, tensors: Sequence[Sequence[Any]]) -> str:
        assert [name for name, *_ in tensors] == self._names
        index = {name: place for place, name in enumerate(self._names)}
        return pack({"parts": [[index[p.name], *p.box, p.dtype] for p in rank.parts], "derived": []})

    def _digest(self, rank: EngineRank, number: int, key: str) -> str:
        return as_text(together(rank.digests(key), bytes.fromhex(key)))

    def _digests(self, rank: EngineRank, number: int, key: str) -> str:
        return pack([as_text(digest) for digest in rank.digests(key)])

    def _join(self, rank: EngineRank, number: int, place: Any, size: int, first_rank: int, **order: Any) -> str:
        seconds, senders = order["seconds"], order["senders"]
        relays = 0 if order["changes"] else senders
        own = self._places[first_rank + number - senders] if self._places else None
        rank.channel = Channel(rendezvous(place, size, seconds), first_rank + number, size, seconds, relays, place=own)
        rank.receiver = Receiver(rank.channel, range(senders), order["changes"])
        return ""

    def _receive(self, rank: EngineRank, number: int) -> str:
        assert rank.receiver
        try:
            return str(rank.receiver.receive(rank.views))
        except ValueError as error:  # told when all have answered
            self._refused = str(error)
            return ""


def _kept_as(dtype: str, as_numbers: bool, drawn: random.Random) -> str:
    if dtype == "F8_E4M3":
        return drawn.choice(["bfloat16", "float32"]) if as_numbers else CODES
    return {"BF16": "bfloat16", "F32": "float32"}[dtype]


def _cut(
    name: str, shape: Shape, dtype: str, num_ranks: int, drawn: random.Random
) -> Iterator[tuple[int, EngineSlice]]:
    whole = whole_box(shape)
    kind = drawn.choice(["rows", "columns", "whole", "owner"])
    if kind == "owner":
        yield drawn.randrange(num_ranks), EngineSlice(name, whole, dtype)
        return
    for rank in range(num_ranks):
        box = whole
        if kind == "rows" and whole.rows >= num_ranks:
            begin, end = (whole.rows * number // num_ranks for number in (rank, rank + 1))
            box = Box(begin, 0, end - begin, whole.columns)
        if kind == "columns" and whole.columns >= num_ranks:
            begin, end = (whole.columns * number // num_ranks for number in (rank, rank + 1))
            box = Box(0, begin, whole.rows, end - begin)
        yield rank, EngineSlice(name, box, dtype)


def cut_from(tensor: torch.Tensor, part: EngineSlice) -> torch.Tensor:
    """Return a part of a whole tensor, in the part's type."""
    whole = whole_box(tensor.shape)
    row, column, rows, columns = part.box
    table = tensor.reshape(whole.rows, whole.columns)[row : row + rows, column : column + columns]
    return table.to(getattr(torch, part.dtype))


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
