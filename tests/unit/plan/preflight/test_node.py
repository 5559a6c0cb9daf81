"""What a node finds out about itself. `nvidia-smi` is a script that prints what the real one would."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.plan.preflight.node import NodeFacts, check_gpus, inspect_node, write_rate
from posttrain.plan.preflight.versions import OLDEST_DRIVER, is_too_old, pinned_versions, untested
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[4] / "config"
CONFIG = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config


def install_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *rows: str, code: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/bash\n" + "".join(f"echo '{row}'\n" for row in rows) + f"exit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_gpus_that_are_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"{index}, NVIDIA H200, 580.95.05, 4, {errors}" for index, errors in enumerate(["0", "[N/A]"])]
    install_gpus(tmp_path, monkeypatch, *rows)
    assert check_gpus(2) == ([], "580.95.05")


def test_gpus_that_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_gpus(tmp_path, monkeypatch, "0, NVIDIA H200, 570.10, 90000, 0", "1, NVIDIA H200, 570.10, 4, 3")
    problems, driver = check_gpus(8)
    assert driver == "570.10"
    assert problems == [
        "2 GPUs, 8 are used (hardware.gpus_per_node)",
        "GPU 0 (NVIDIA H200): 90000 MiB are in use by somebody else",
        "GPU 1 (NVIDIA H200): 3 memory errors that could not be corrected",
        "driver 570.10 is too old for torch's CUDA",
    ]


def test_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "Unable to determine the device handle for GPU0000:4F:00.0: Unknown Error"
    install_gpus(tmp_path, monkeypatch, lost, code=255)
    assert check_gpus(8) == ([f"nvidia-smi: {lost}"], "")


def test_a_node_without_gpus_has_disks_and_versions(tmp_path: Path) -> None:
    facts = inspect_node(CONFIG, tmp_path / "not/there/yet", tmp_path / "shared")
    assert NodeFacts(**facts.as_dict()) == facts
    assert facts.problems == []
    assert facts.versions["trainer megatron-core"] == pinned_versions(CONFIG)["trainer megatron-core"]
    assert set(facts.rates) == {"node-local disk", "shared storage"}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    facts = inspect_node(CONFIG, Path("/proc/self"), tmp_path)
    assert len(facts.problems) == 1
    assert facts.problems[0].startswith("node-local disk (site.node_local): /proc/self: ")


def test_the_rate_of_a_disk_is_bytes_over_time(tmp_path: Path) -> None:
    assert 1.0 < write_rate(tmp_path) < 100_000.0


def test_versions_that_were_not_tested_together() -> None:
    tested = {"trainer torch": "2.14.1", "engine sglang": "0.5.23"}
    assert untested({"trainer torch": "2.14.1+cu130", "engine sglang": "0.5.23", "driver": "580.1"}, tested) == []
    assert untested({"trainer torch": "2.13.0"}, tested) == ["trainer torch 2.13.0 (tested: 2.14.1)"]


def test_the_pins_of_both_devices() -> None:
    gpu = resolve({"model": "glm5", "site": "local"}, CONFIG_DIR).config
    names = {f"trainer {name}" for name in ("torch", "megatron-core", "transformers")} | {
        "engine torch",
        "engine sglang",
    }
    assert names <= set(pinned_versions(CONFIG))
    assert names | {"trainer transformer-engine"} <= set(pinned_versions(gpu))
    assert is_too_old("570.10")
    assert not is_too_old(OLDEST_DRIVER)
