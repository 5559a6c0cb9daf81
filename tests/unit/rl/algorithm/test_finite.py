import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posttrain.rl.algorithm.finite import are_finite


class _Largest(TorchDispatchMode):
    """Notes the most numbers that an operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        numbers = [part.numel() for part in tree_leaves(made) if isinstance(part, torch.Tensor)]
        self.numbers = max([self.numbers, *numbers])
        return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 511, 1023])
def test_one_bad_number_is_found_wherever_it_is(dtype, bad, place):
    values = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert bool(are_finite(values))
    values.view(-1)[place] = bad
    assert not bool(are_finite(values))


def test_no_copy_is_made():
    values = torch.ones(1 << 16, dtype=torch.bfloat16)
    with _Largest() as largest:
        assert bool(are_finite(values))
    assert largest.numbers <= 2
