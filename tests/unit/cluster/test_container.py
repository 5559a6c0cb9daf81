from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.cluster.container import CLONE, CODE, make_shared_roots, prefix_of_jobs, srun_options, wrap
from posttrain.config.schema import Config
from posttrain.config.services import Judge
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"
COMMAND = (sys.executable, "scripts/train.py", "--node", "a b")


def config_with(runtime: str, device: str = "cpu", **container: object) -> Config:
    choice = {"model": "tiny"} if device == "cpu" else {"model": "glm5"}
    config = resolve({**choice, "site": "local"}, CONFIG_DIR).config
    roots = {"store": "/shared/store", "results": "/shared/results", "node_local": "/nvme"}
    chosen = dataclasses.replace(config.site.container, runtime=runtime, **container)
    return dataclasses.replace(config, site=dataclasses.replace(config.site, container=chosen, **roots))


def test_without_a_runtime_nothing_changes() -> None:
    config = config_with("none")
    assert wrap(COMMAND, config) == COMMAND
    assert srun_options(config) == ()
    assert prefix_of_jobs(config) == ""


def test_apptainer_stands_behind_srun_and_before_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mounts = ["/etc/libibverbs.d:/etc/libibverbs.d:ro", "/data"]
    config = config_with("apptainer", "cuda", image="/shared/gpu.sif", mounts=mounts, options=["--writable-tmpfs"])
    binds = ",".join(f"{folder}:{folder}" for folder in (tmp_path, CLONE, "/shared/store", "/shared/results", "/nvme"))
    assert srun_options(config) == ()
    assert wrap(COMMAND, config) == (
        *("apptainer", "exec", "--nv", "--bind", f"{binds},{mounts[0]},/data:/data", "--pwd", str(tmp_path)),
        *("--writable-tmpfs", "/shared/gpu.sif", "env", f"PYTHONPATH={CODE}"),
        *("python", "scripts/train.py", "--node", "a b"),
    )


def test_apptainer_shows_gpus_only_where_there_are_some() -> None:
    assert "--nv" not in wrap(COMMAND, config_with("apptainer", image="/shared/cpu.sif"))


def test_pyxis_is_options_of_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_with("pyxis", image="/shared/gpu.sqsh", options=["--container-writable"])
    assert wrap(COMMAND, config) == ("env", f"PYTHONPATH={CODE}", "python", *COMMAND[1:])
    assert srun_options(config) == (
        "--container-image=/shared/gpu.sqsh",
        f"--container-mounts={tmp_path}:{tmp_path},{CLONE}:{CLONE},"
        "/shared/store:/shared/store,/shared/results:/shared/results,/nvme:/nvme",
        f"--container-workdir={tmp_path}",
        "--container-writable",
    )


def test_the_nodes_disk_is_left_out_where_nobody_has_made_its_folder() -> None:
    config = config_with("apptainer", image="/shared/cpu.sif")
    (with_disk, without) = (wrap(COMMAND, config, with_disk=each) for each in (True, False))
    assert with_disk[3].split(",") == [*without[3].split(","), "/nvme:/nvme"]
    assert "/nvme" not in srun_options(config_with("pyxis", image="/shared/gpu.sqsh"), with_disk=False)[1]


def test_a_folder_in_a_shown_one_has_no_mount_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hard links from the source of the model to the store would be impossible between mounts."""
    monkeypatch.chdir(tmp_path)
    config = config_with("apptainer", image="/shared/cpu.sif", mounts=["/shared"])
    source = dataclasses.replace(config.model.source, kind="folder", folder="/shared/models/mine")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, source=source))
    words = wrap(COMMAND, config)
    shown = [f"{folder}:{folder}" for folder in (tmp_path, CLONE, "/nvme", "/shared")]
    assert words[words.index("--bind") + 1] == ",".join(shown)


def test_what_the_configuration_names_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_with("apptainer", image="/shared/cpu.sif")
    data = dataclasses.replace(config.data, kind="jsonl", train_file="/prompts/a.jsonl", heldout_file="b.jsonl")
    serving = dataclasses.replace(config.serving, calibration=["/runs/calibration.json"])
    download = dataclasses.replace(config.download, torch_dist_folder="/other/torch_dist")
    words = prefix_of_jobs(dataclasses.replace(config, data=data, serving=serving, download=download)).split()
    shown = words[words.index("--bind") + 1].split(",")
    assert shown[-3:] == [
        f"{path}:{path}" for path in ("/prompts/a.jsonl", "/other/torch_dist", serving.calibration[0])
    ]
    assert not [mount for mount in shown if "nvme" in mount], "jobs of no gang use no node's own disk"


def test_the_folders_of_own_sources_are_shown_with_the_files_that_they_name(tmp_path: Path) -> None:
    """A reward beside another one, an environment, a judge's prompt, and a relative path, which needs no mount."""
    config = config_with("apptainer", image="/shared/cpu.sif")
    data = dataclasses.replace(
        config.data, environment="/agents/guess.py:Guess", reward="environment + 0.1*/rewards/mine.py:f + near.py:g"
    )
    judge = Judge(url="http://judge:8000", model="m", prompt_file="/judges/polite.txt")
    reward = dataclasses.replace(config.reward, judges={"polite": judge})
    words = prefix_of_jobs(dataclasses.replace(config, data=data, reward=reward)).split()
    shown = words[words.index("--bind") + 1].split(",")
    assert shown[-3:] == [f"{path}:{path}" for path in ("/rewards", "/agents", "/judges")]
    assert f"{os.getcwd()}:{os.getcwd()}" in shown


def test_of_a_pattern_of_files_the_folder_is_shown_in_which_it_begins(tmp_path: Path) -> None:
    config = config_with("apptainer", image="/shared/cpu.sif")
    data = dataclasses.replace(config.data, kind="files", train_file="/a/b-*/c-*.jsonl", heldout_file="/d/e.parquet")
    words = prefix_of_jobs(dataclasses.replace(config, data=data)).split()
    assert words[words.index("--bind") + 1].split(",")[-2:] == ["/a:/a", "/d/e.parquet:/d/e.parquet"]


def test_shared_roots_are_made_for_an_image_only(tmp_path: Path) -> None:
    for runtime, is_made in (("none", False), ("apptainer", True)):
        config = config_with(runtime, image="/shared/cpu.sif")
        site = dataclasses.replace(config.site, store=str(tmp_path / "a/store"), results=str(tmp_path / "results"))
        make_shared_roots(dataclasses.replace(config, site=site))
        assert (tmp_path / "a/store").is_dir() is (tmp_path / "results").is_dir() is is_made


def test_another_program_keeps_its_name() -> None:
    words = wrap(("nvidia-smi", "-L"), config_with("pyxis", image="/shared/gpu.sqsh"))
    assert words[-2:] == ("nvidia-smi", "-L")


def test_the_code_is_the_clones(tmp_path: Path) -> None:
    """What stands behind the runtime starts our code, also from another folder and with nothing installed there."""
    words = wrap((sys.executable, "-c", "import posttrain; print(posttrain.__file__)"), config_with("pyxis"))
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path).stdout.strip()
    assert Path(said).parents[1] == CODE
