"""Do devices compute, and reach each other? In the first test's failure stands what no later test would explain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.gpus import gpu
from tests.support.megatron_single import run_ranks

from posttrain.plan.preflight import links
from posttrain.plan.preflight.node import check_gpus


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_driver_finds_nothing_wrong() -> None:
    problems, driver = check_gpus(torch.cuda.device_count())
    assert problems == []
    assert driver


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_libraries_of_the_trainer_are_there() -> None:
    """Each in a process of its own: which one cannot be loaded is then known.

    Behind torch, as the trainer imports them: without it, Transformer Engine does not find NCCL's wheel. cuDNN is
    looked at once more, since Transformer Engine takes the system's where torch has one of its own.
    """
    for module in ("transformer_engine.pytorch", "triton", "megatron.core", "tilelang"):
        command = [sys.executable, "-c", f"import torch, {module}; torch.backends.cudnn.version()"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{module}: {done.stderr[-2000:]}"


@pytest.mark.parametrize(("device", "count"), [("cpu", 2), gpu("cuda", 1), gpu("cuda", 2, count=2)])
def test_devices_multiply_exchange_and_add_up(device: str, count: int) -> None:
    """The preflight's own program: every result is compared with what it has to be."""
    outputs = run_ranks(Path(links.__file__), count, "--device", device, "--num-nodes", str(count))
    told = [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]
    rates = {name: value for row in told for name, value in row.items()}
    assert rates["compute"] > 0
    assert rates["all_reduce"] > 0
    assert ("rate" in rates) is (count > 1)
