"""What training asks SLURM for, held against the executor's own rules."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.cluster import slurm_job
from posttrain.cluster.slurm import SlurmAllocation
from posttrain.cluster.slurm_job import (
    resources_of_all_jobs,
    resources_of_comparison,
    resources_of_precisions,
    resources_of_serving,
    resources_of_training,
)
from posttrain.config.site_rules import OUR_OPTIONS
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"


def resources(folder: Path, settings: str = "", **choice: object) -> dict[str, Any]:
    chosen = {"model": "tiny", "site": "example_slurm", "set": settings, **choice}
    asked = resources_of_training(resolve(chosen, CONFIG_DIR).config, folder)
    if "slurm_extra" in asked:
        asked["slurm_extra"] = asked["slurm_extra"](None)
    return asked


def test_a_gang_is_one_job_with_a_task_on_each_node(tmp_path: Path) -> None:
    asked = resources(tmp_path, model="glm5", nodes=16)
    assert asked == {
        "nodes": 17,  # and a spare one
        "gpus": 136,
        "tasks": 17,
        "mpi": "srun",
        "runtime": "2d",
        "mem_mb": 0,
        "slurm_extra": "--requeue --no-kill --exclusive --gpus-per-node=8",
    }


def test_an_evaluation_asks_for_all_gpus_of_its_nodes() -> None:
    """Of two nodes for GLM-5 in BF16, as the plan says, with a task on each; engines of others ask for no GPU."""
    for model, precision, nodes in (("glm5", "source", 2), ("glm5", "auto", 1), ("glm5_4layer", "source", 1)):
        words = {"model": model, "set": f"evaluation.precision={precision}"}
        config = resolve({**words, "site": "example_slurm"}, CONFIG_DIR).config
        topology = {"nodes": nodes, "gpus": nodes * 8}
        tasks = {"mpi": "srun", "tasks": nodes} if nodes > 1 else {}
        whole = {"mem_mb": 0, "slurm_extra": "--exclusive --gpus-per-node=8"}
        assert resources_of_serving(config) == topology | tasks | whole
        assert resources_of_serving(resolve({**words, "site": "local"}, CONFIG_DIR).config) == topology
    asked = {"model": "glm5", "set": "evaluation.precision=source evaluation.addresses=[gpu7:30000]"}
    for words in ({"model": "tiny"}, asked):
        assert resources_of_serving(resolve({**words, "site": "example_slurm"}, CONFIG_DIR).config) == {"nodes": 1}


def test_each_precision_asks_for_the_nodes_that_hold_it() -> None:
    """Of one node there is nothing to start on others; the executor then wants an empty word."""
    config = resolve({"model": "glm5", "site": "example_slurm"}, CONFIG_DIR).config
    asked = resources_of_precisions(config)
    for precision, nodes, mpi in (("original", 2, "srun"), ("fp8", 1, "")):
        found = {name: value(SimpleNamespace(precision=precision)) for name, value in asked.items()}
        topology = {"nodes": nodes, "gpus": nodes * 8, "mpi": mpi, "tasks": nodes}
        assert found == topology | {"mem_mb": 0, "slurm_extra": "--exclusive --gpus-per-node=8"}
    assert resources_of_comparison(config)["nodes"] == 1


def test_an_evaluation_on_several_cpu_nodes_has_a_task_on_each() -> None:
    words = {"model": "tiny", "site": "slurm_localhost", "nodes": 2}
    config = resolve({**words, "set": "engine.kind=sglang engine.gpus_per_engine=2"}, CONFIG_DIR).config
    asked = resources_of_serving(config)
    assert asked == {"nodes": 2, "mem_mb": 0, "mpi": "srun", "tasks": 2, "slurm_extra": ""}


def test_only_a_job_with_spare_nodes_outlives_a_lost_one(tmp_path: Path) -> None:
    """Of any other one SLURM itself sees to it that it starts again, also where its first node is lost."""
    asked = resources(tmp_path, "site.slurm.spare_nodes=0", model="glm5", nodes=16)
    assert asked["nodes"] == 16
    assert asked["slurm_extra"] == "--requeue --exclusive --gpus-per-node=8"


def test_one_node_is_a_plain_job(tmp_path: Path) -> None:
    """The executor starts it in a step of its own, inside which no other step starts unless it overlaps."""
    asked = resources(tmp_path, "site.slurm.requeue=false site.slurm.constraint=nvme")
    assert asked["nodes"] == 1, "with its only node the job is lost, and a spare one does not help"
    assert "mpi" not in asked
    assert "tasks" not in asked
    assert asked["constraint"] == "nvme"
    assert asked["slurm_extra"] == "--no-requeue --exclusive"


def test_the_executor_takes_what_is_asked_for(tmp_path: Path) -> None:
    from snakemake_executor_plugin_slurm.validation import get_forbidden_slurm_options, validate_slurm_extra

    settings = "site.slurm.extra_options=[--reservation=weekend,--switches=1]"
    extra = resources(tmp_path, settings, model="glm5")["slurm_extra"]
    assert extra.startswith("--requeue --no-kill --reservation=weekend --switches=1")
    validate_slurm_extra(SimpleNamespace(resources=SimpleNamespace(slurm_extra=extra)))
    ours = " ".join(f"{option}=" for option in OUR_OPTIONS)
    missing = [words for words in get_forbidden_slurm_options() if not re.search(words, ours)]
    assert missing == [r"--workdir[=\s]|-D\s"], "sbatch calls it --chdir"


def test_without_slurm_there_is_only_topology(tmp_path: Path) -> None:
    assert resources(tmp_path, site="local", nodes=2) == {"nodes": 2}
    local = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    assert resources_of_all_jobs(local.site) == {}


def test_partition_and_account_hold_for_all_jobs() -> None:
    site = resolve({"model": "tiny", "site": "example_slurm"}, CONFIG_DIR).config.site
    assert resources_of_all_jobs(site) == {"slurm_partition": "batch", "slurm_account": "myproject"}


@pytest.mark.parametrize(("alive", "expected"), [(True, " --dependency=afterany:41"), (False, ""), (None, "")])
def test_a_job_that_trains_already_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool | None, expected: str
) -> None:
    holder = {
        "epoch": 3, "host": "n0", "pid": 7, "process_ids": "of n0", "started_ticks": 1, "user": "me", "since_unix": 0.0,
        "job": "slurm:41",
    }  # fmt: skip
    (tmp_path / "epoch-000003.json").write_text(json.dumps(holder))
    (tmp_path / "epoch-000003.heartbeat").touch()
    monkeypatch.setattr(slurm_job, "job_is_alive", lambda job: alive if job == "slurm:41" else None)
    assert resources(tmp_path)["slurm_extra"] == f"--requeue --exclusive{expected}"


def test_a_gang_starts_in_the_sites_image(tmp_path: Path) -> None:
    settings = "site.network_interface=lo site.container.runtime=apptainer site.container.image=/shared/cpu.sif"
    config = resolve({"model": "tiny", "site": "example_slurm", "set": settings}, CONFIG_DIR).config
    for names in (["n0"], ["n0", "n1"]):
        nodes = SlurmAllocation("7", names, config, tmp_path)
        words = nodes.words(names, [sys.executable, "-m", "posttrain.cluster.node"])
        assert words[0] == "srun"
        assert words[words.index("apptainer") + 1] == "exec"
        assert words[-3:] == ["python", "-m", "posttrain.cluster.node"]
