"""Runs of elements as boxes."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.rl.megatron_backend.optimizer_state import boxes


def test_the_example() -> None:
    assert list(boxes((4, 6), 4, 21)) == [((0, 4), (1, 2)), ((1, 0), (2, 6)), ((3, 0), (1, 3))]


@pytest.mark.parametrize("shape", [(7,), (4, 6), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2)])
def test_boxes_of_every_run_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = list(boxes(shape, start, stop))
            cut = [whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].reshape(-1) for box in found]
            assert torch.cat([*cut, whole.new_empty(0)]).tolist() == list(range(start, stop))
            assert len(found) <= 2 * len(shape) - 1
