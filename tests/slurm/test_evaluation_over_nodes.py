"""Evaluations with a real SGLang over two nodes of a real SLURM: two ranks, one on each."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.test_sglang import SERVER, architecture, model, prompts, settings  # noqa: F401 fixtures
from tests.support.evaluations import ON_ONE_NODE, TWO_RANKS, engine_logs, measured, target
from tests.support.interruptions import assert_gone, find_processes, start
from tests.support.sglang_environment import require_sglang
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_folder import SlurmFolder
from tests.support.workflow_runs import WorkflowFolder

pytestmark = [pytest.mark.faults("slow"), pytest.mark.sglang]


@pytest.fixture
def on_two_nodes(
    cluster: Cluster,
    tmp_path: Path,
    settings: dict[str, object],  # noqa: F811
) -> SlurmFolder:
    require_sglang()
    return SlurmFolder(
        tmp_path / "on_slurm", tmp_path / "store", settings | TWO_RANKS, environment=cluster.environment, nodes=2
    )


def test_an_engine_over_two_nodes_answers_as_one_on_one_node(on_two_nodes: SlurmFolder, tmp_path: Path) -> None:
    beside = WorkflowFolder(tmp_path / "beside", on_two_nodes.store, on_two_nodes.settings | ON_ONE_NODE)
    beside.run(target(beside))
    assert "before training (2 nodes)" in on_two_nodes.run(target(on_two_nodes))
    assert measured(on_two_nodes) == measured(beside)
    assert all(f"'node_rank': {rank}" in log for rank, log in enumerate(engine_logs(on_two_nodes)))
    assert_gone(on_two_nodes)


def test_all_end_with_a_part_of_the_engine_and_nothing_is_left(on_two_nodes: SlurmFolder) -> None:
    driver = start(on_two_nodes, target(on_two_nodes))
    driver.wait_until(lambda: len(find_processes(on_two_nodes, SERVER)) >= 2, 300)
    (second,) = (p for p in find_processes(on_two_nodes, SERVER) if rank_of(p.cmdline()) == "1")
    second.kill()
    code, output = driver.finish()
    assert code == 1
    assert "on n1: engine 0 ended" in output, output[-4000:]
    assert not Path(target(on_two_nodes)).exists()
    assert_gone(on_two_nodes)


def rank_of(words: list[str]) -> str:
    """Return which node of its engine a process is; empty for one that only watches another."""
    return words[words.index("--node-rank") + 1] if "posttrain.cluster.processes" not in words else ""
