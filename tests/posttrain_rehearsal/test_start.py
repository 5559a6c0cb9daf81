from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.rejections import rejected
from tests.support.requirements import require

from posttrain.config.load import Resolved
from posttrain.errors import ConfigError
from posttrain_rehearsal.outcome import judge, outcome, render
from posttrain_rehearsal.start import home, require_rehearsable, simulated
from posttrain_rehearsal.traces import Trace

Resolve = Callable[..., Resolved]
# What CUDA's runtime tells torch (75 and 76 are the numbers of the capability's halves), and what torch tells Megatron.
ASK = """
import ctypes, json, sys, torch
runtime, number, memory = ctypes.CDLL(None), ctypes.c_int(), ctypes.c_size_t()
def attribute(which):
    assert runtime.cudaDeviceGetAttribute(ctypes.byref(number), which, 0) == 0
    return number.value
assert runtime.cudaMemGetInfo(ctypes.byref(ctypes.c_size_t()), ctypes.byref(memory)) == 0
told = [attribute(75), attribute(76), memory.value >> 30]
from posttrain_rehearsal import stand_ins
class Recorder:
    peak = 0
stand_ins._provide_devices(Recorder(), *json.loads(sys.argv[1]))
known = torch.cuda.get_device_properties(0)
print(json.dumps([
    told, [known.major, known.minor, known.total_memory >> 30],
    list(torch.cuda.get_device_capability()), torch.cuda.mem_get_info()[1] >> 30,
]))
"""


@pytest.mark.parametrize(
    ("hardware", "expected"), [("h100", [9, 0, 79]), ("b200", [10, 0, 179]), ("gb300", [10, 3, 277])]
)
def test_devices_are_those_of_the_configuration(resolved: Resolve, hardware: str, expected: list[int]) -> None:
    try:
        folder = home()
    except ConfigError as error:
        return require("rehearsal", str(error))
    config = resolved("glm5_4layer", hardware=hardware).config
    told = json.dumps([expected[:2], expected[2] << 30])
    command = [str(folder / "bin" / "python"), "-c", ASK, told]
    done = subprocess.run(command, env=simulated(config, folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [expected, expected, expected[:2], expected[2]]


@pytest.mark.parametrize("said", ["", "3"])
def test_devices_of_the_shell_are_not_those_of_a_rehearsal(
    resolved: Resolve, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    assert "CUDA_VISIBLE_DEVICES" not in simulated(resolved("glm5_4layer").config, Path("environment"))


def test_gpus_of_others_are_refused(resolved: Resolve) -> None:
    with rejected("kernel-needs-nvidia") as raised:
        require_rehearsable(resolved("glm5", hardware="mi300x", set="rollout.fp8=false"))
    assert [problem.key for problem in raised.value.problems] == ["hardware.compute_capability"]


def test_ranks_find_the_variables_that_their_python_asks_for(resolved: Resolve, tmp_path: Path) -> None:
    variables = simulated(
        resolved("glm5", set="site.trainer_environment=[NVTE_FLASH_ATTN=0,LD_PRELOAD=x]").config, tmp_path
    )
    assert (variables["NVTE_FLASH_ATTN"], variables["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("0", "1")
    assert variables["LD_PRELOAD"] == str(tmp_path / "fake" / "libfakecuda.so")


def test_the_outcome_tells_each_environment_and_what_is_wrong_with_it(
    resolved: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    found = resolved("glm5")
    work = {"peak": 0, "host_peak": 0, "flops": 0, "moved": 0, "kernels": 0, "waits": {}, "holders": []}
    trace = Trace(0, 1.0, None, [{"name": "train", "step": 1, **work}], [], [])
    told = outcome(found, found.config, [trace], 1.0)
    rows = {(row["process"], row["name"]): (row["value"], row["from"]) for row in told["environment"]}
    assert {process for process, _ in rows} == {"trainer", "engine.prefill", "engine.decode"}
    assert rows["engine.decode", "NCCL_DEBUG"] == ("INFO", "this shell")
    assert rows["trainer", "PYTORCH_CUDA_ALLOC_CONF"][1] == "hardware.device"
    assert ("engine.decode", "PYTORCH_CUDA_ALLOC_CONF") not in rows
    assert [problem["value"] for problem in told["problems"]] == ["TORCH_NCCL_BLOCKING_WAIT=1 in trainer processes"]
    assert "TORCH_NCCL_BLOCKING_WAIT=1" in render(told, "GLM-5")


@pytest.mark.parametrize(
    ("peak", "planned", "is_told"), [(20.0, 19.2, False), (20.0, 18.9, True), (0.4, 0.1, False), (15.0, 20.0, False)]
)
def test_memory_that_the_plan_does_not_know_is_a_warning(peak: float, planned: float, is_told: bool) -> None:
    row = {"rank": 3, "phase": "train", "step": 2, "peak_gib": peak, "planned_gib": planned, "whole_gib": peak}
    earlier = {**row, "step": 1, "peak_gib": 30.0}
    whole = {"layers": 4, "of_layers": 4, "stages": [0], "of_stages": 1, "ranks": [3]}
    rooms = {"capacity_gib": 80, "reserved_gib": 2.0, "engines_gib": 40.0}
    verdict = judge({"problems": [], "unseen": [], "memory": [row, earlier], **rooms, **whole})
    told = [finding.title for finding in verdict.findings]
    assert told == ["It holds more than is planned"] * is_told


def test_memory_that_nobody_releases_is_a_warning(resolved: Resolve) -> None:
    """GLM-5's engines hold 85 % of each GPU, and with `never` neither they nor the ranks give any of it back."""
    found = resolved("glm5", set="engine.sleep=never")
    work = {"host_peak": 0, "flops": 0, "moved": 0, "kernels": 0, "waits": {}, "holders": []}
    trace = Trace(0, 1.0, None, [{"name": "train", "step": 2, "peak": 40 << 30, **work}], [], [])
    told = outcome(found, found.config, [trace], 1.0)
    assert 100 < told["engines_gib"] < 140
    findings = {finding.title: finding.detail for finding in judge(told).findings}
    assert "of rank 0 in train and" in findings["Engines keep their memory while ranks train"]
    assert "Engines keep" not in str(judge(told | {"engines_gib": 0.0}))
    by_turns = resolved("glm5")
    assert outcome(by_turns, by_turns.config, [trace], 1.0)["engines_gib"] == 0.0
