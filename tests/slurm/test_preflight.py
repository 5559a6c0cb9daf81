"""A node with a slow network is found, and a spare one trains in its place; on a real SLURM."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_folder import SlurmFolder
from tests.support.workflow_runs import FAST

pytestmark = [pytest.mark.faults("queue"), pytest.mark.timeout(1800)]

FOUR_RANKS = FAST | {
    "parallel.pipeline_model_parallel_size": 2,
    "engine.num_threads": 1,
    "engine.groups_per_request": 1,
    "training.num_steps": 1,
    "site.slurm.spare_nodes": 1,
}


@pytest.fixture
def slow_node(cluster: Cluster) -> Iterator[str]:
    """A node that sends and gets 20 Mbit/s, where the others have no limit."""
    name = "n1"
    limit = ("tbf", "rate", "20mbit", "burst", "64kb", "latency", "400ms")
    subprocess.run(["tc", "qdisc", "add", "dev", f"ve{name}", "root", *limit], check=True)
    yield name
    subprocess.run(["tc", "qdisc", "del", "dev", f"ve{name}", "root"], check=True)


def test_a_node_with_a_slow_network(on_slurm: SlurmFolder, slow_node: str) -> None:
    on_slurm.nodes, on_slurm.settings = 4, dict(FOUR_RANKS)
    on_slurm.run("train")
    attempts = on_slurm.run_folder / "train" / "attempts"
    unfit, done = map(json.loads, (attempts.parent / "attempts.jsonl").read_text().splitlines())
    assert unfit["reason"].startswith(f"{slow_node} is unfit: the network: ")
    assert slow_node in unfit["nodes"]
    assert slow_node not in done["nodes"]
    assert (done["reason"], done["job"]) == ("done", unfit["job"])
    assert unfit["ended_unix"] - unfit["started_unix"] < 120
    found = json.loads((attempts / "002" / "preflight.json").read_text())
    assert set(found["links"]) == set(done["nodes"])


def test_a_preflight_by_itself_looks_at_the_spare_node_too(
    on_slurm: SlurmFolder, cluster: Cluster, slow_node: str
) -> None:
    on_slurm.nodes, on_slurm.settings = 4, dict(FOUR_RANKS)
    code, output = on_slurm.attempt("preflight", options=["--show-failed-logs"])
    assert code == 1
    found = json.loads((on_slurm.run_folder / "preflight.json").read_text())
    assert set(found["fit"]) == set(cluster.nodes) - {slow_node}
    assert list(found["unfit"]) == [slow_node]
    assert found["unfit"][slow_node][0].startswith("the network: ")
    assert f"remedy: repair them, or site.slurm.extra_options: ['--exclude={slow_node}']" in output
    assert not (on_slurm.run_folder / "train").exists()
