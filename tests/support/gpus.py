"""Devices that a test is held on: a CPU here and everywhere, and GPUs where there are some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.megatron_single import run_ranks

RANK = Path(__file__).with_name("gpu_ranks.py")


def gpu(*values: Any, count: int = 1) -> Any:
    """Return a parameter that needs so many GPUs."""
    found = torch.cuda.device_count()
    lacks = pytest.mark.skipif(found < count, reason=f"needs {count} CUDA devices, and finds {found}")
    return pytest.param(*values, marks=[pytest.mark.gpu, lacks])


DEVICES = ("cpu", gpu("cuda"))


def told_by_ranks(count: int, **order: Any) -> Any:
    """Return what rank 0 of `gpu_ranks` tells."""
    # As the plan has it for a trainer on a CPU.
    hidden = {} if order["device"] == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    lines = run_ranks(RANK, count, json.dumps(order), environment=hidden)[0].splitlines()
    # NCCL has a word to say when a process ends.
    return json.loads([line for line in lines if line.startswith("{")][-1])


def distance(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """Return how far log-probabilities of the same samples are from each other, on average."""
    assert one.keys() == other.keys()
    far = [abs(a - b) for index in one for a, b in zip(one[index], other[index], strict=True)]
    assert far
    return sum(far) / len(far)
