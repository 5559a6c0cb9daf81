"""Orders a run's prompts: the shuffles of one dataset, or a weighted mixture of several.

The only state is a cursor. Prompt c of a run on one dataset is entry c mod N of the shuffle of epoch c // N, which
depends only on the seed and the epoch. In a mixture, c, the weights and the seed determine the source of prompt c; each
source's prompts are taken in its own order. So a resumed run continues exactly, whatever else used random numbers.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from posttrain.config.data import Data, sources_of
from posttrain.types import Prompt

# Weights become fractions with denominators up to this: 0.1 is one tenth, not the nearest binary number.
MAX_DENOMINATOR = 10**6


class PromptOrder:
    """Which prompts a step takes.

    Args:
        num_prompts: N, the dataset's size.
        seed: Seed of the shuffles.
        name: Name of the source, so that two sources of the same size have different shuffles.

    Example:
        With 3 prompts and a step of 2, the steps start at cursors 0, 2, 4: the first takes two prompts of
        epoch 0, the second the last one of epoch 0 and the first of epoch 1.
    """

    def __init__(self, num_prompts: int, seed: int, name: str = ""):
        assert num_prompts > 0, "an order needs prompts"
        self._num_prompts, self._seed, self._name = num_prompts, seed, name
        self._shuffle: Callable[[int], tuple[int, ...]] = lru_cache(maxsize=2)(self._shuffle_epoch)

    def take(self, start: int, count: int) -> list[int]:
        """Return the indices of `count` prompts in the dataset.

        Args:
            start: The cursor: number of prompts taken before. Afterwards it is `start + count`.
            count: Number of prompts; may span several epochs.
        """
        assert start >= 0 <= count, f"start {start}, count {count}"
        epochs = (divmod(cursor, self._num_prompts) for cursor in range(start, start + count))
        return [self._shuffle(epoch)[place] for epoch, place in epochs]

    def _shuffle_epoch(self, epoch: int) -> tuple[int, ...]:
        # String seeds are hashed with SHA-512, so neighbouring seeds and epochs are unrelated.
        places = list(range(self._num_prompts))
        random.Random(f"prompt order, seed {self._seed}, epoch {epoch}{self._name}").shuffle(places)
        return tuple(places)


@dataclass(frozen=True)
class _Fork:
    """Splits a sequence in two, evenly: of its first n elements, (n * share + phase) // total go left."""

    left: _Fork | int
    right: _Fork | int
    share: int
    total: int
    phase: int

    def num_left(self, n: int) -> int:
        return (n * self.share + self.phase) // self.total


class MixedOrder:
    """The order of a mixture's prompts.

    The sources are the leaves of a binary tree, and each fork splits its prompts in the exact ratio (a Bresenham line).
    The number of prompts that a source gave among the first c is a product of such divisions, so any cursor is found
    directly. In any range of a run, two sources are within one prompt of their shares. More sources were within two in
    all measurements, because errors of nested forks add up. Every range as long as the sum of the integer weights (10
    for 0.7, 0.2 and 0.1) has the exact shares.

    Args:
        sizes: Number of prompts of each source.
        weights: Relative share of each source among the run's prompts.
        seed: Seed of the shuffles and of the forks' phases.

    Example:
        Weights 3 and 1 take three prompts of the first source and one of the second in every four. One source gives
        the order of `PromptOrder`.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        assert len(sizes) == len(weights) > 0, f"{len(sizes)} sources, {len(weights)} weights"
        assert all(weight > 0 for weight in weights), f"weights {weights}"
        # The first source's shuffles equal those of a run on it alone.
        names = ("" if source == 0 else f", source {source}" for source in range(len(sizes)))
        self._orders = [PromptOrder(size, seed, name) for size, name in zip(sizes, names, strict=True)]
        self._tree = _make_tree(_whole(weights), random.Random(f"mixture, seed {seed}"))

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """Return the source and index of `count` prompts; see `PromptOrder.take`."""
        assert start >= 0 <= count, f"start {start}, count {count}"
        located = (self.locate(cursor) for cursor in range(start, start + count))
        return [(source, self._orders[source].take(cursor, 1)[0]) for source, cursor in located]

    def locate(self, cursor: int) -> tuple[int, int]:
        """Return the source of prompt `cursor`, and the number of prompts it gave before."""
        node = self._tree
        while isinstance(node, _Fork):
            before = node.num_left(cursor)
            goes_left = node.num_left(cursor + 1) > before
            node, cursor = (node.left, before) if goes_left else (node.right, cursor - before)
        return node, cursor


class PromptMix:
    """The prompts of a run in the order in which its steps take them.

    Args:
        prompts: Prompts of all sources.
        data: The configuration's section: sources, weights, seed.
    """

    def __init__(self, prompts: Sequence[Prompt], data: Data):
        self._of_source = [[prompt for prompt in prompts if prompt.source == name] for name in sources_of(data)]
        weights = [source.weight for source in data.sources.values()] or [1.0]
        self._order = MixedOrder([len(some) for some in self._of_source], weights, data.seed)

    def take(self, start: int, count: int) -> list[Prompt]:
        """Return `count` prompts from the cursor on; see `PromptOrder.take`."""
        return [self._of_source[source][place] for source, place in self._order.take(start, count)]


def _whole(weights: Sequence[float]) -> list[int]:
    fractions = [Fraction(weight).limit_denominator(MAX_DENOMINATOR) for weight in weights]
    common = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * common) for fraction in fractions]
    assert all(whole), f"weights {weights}: one is below 1/{MAX_DENOMINATOR}"
    return [weight // math.gcd(*whole) for weight in whole]


def _make_tree(weights: Sequence[int], draw: random.Random) -> _Fork | int:
    """Join the two lightest until one is left: the deepest leaves, where errors add up, have the least weight."""
    tie = itertools.count()
    heap: list[tuple[int, int, _Fork | int]] = [(weight, next(tie), source) for source, weight in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (light, _, right), (heavy, _, left) = heapq.heappop(heap), heapq.heappop(heap)
        total = light + heavy
        heapq.heappush(heap, (total, next(tie), _Fork(left, right, heavy, total, draw.randrange(total))))
    return heap[0][2]
