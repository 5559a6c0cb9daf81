"""What the project offers runs through a rehearsal without a problem: two recipes at every change, all as a part."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.megatron_single import CONFIG_DIR
from tests.support.rehearsals import rehearsed

RECIPES = sorted(path.stem.rpartition("_")[::2] for path in (CONFIG_DIR / "nodes").glob("*.yaml"))
DEMOS = ("tiny", "tiny_qwen3")
OFFLOAD = "trainer.optimizer_cpu_offload=true trainer.params_dtype=bf16"


def test_two_ranks_of_a_demo_model_run_through() -> None:
    words = "parallel.tensor_model_parallel_size=1 parallel.expert_model_parallel_size=2"
    is_clean(rehearsed(model="tiny", hardware="h100", set=words))


def test_a_model_that_people_train_on_one_gpu_runs_through() -> None:
    is_clean(rehearsed(model="qwen3_0.6b"))


@pytest.mark.faults("rehearsal")
@pytest.mark.parametrize("model", DEMOS)
def test_a_demo_model_runs_through(model: str) -> None:
    is_clean(rehearsed(model=model, hardware="h100"))


@pytest.mark.faults("rehearsal")
def test_an_optimizer_in_host_memory_runs_through() -> None:
    is_clean(rehearsed(model="tiny", hardware="h100", set=f"{OFFLOAD} parallel.tensor_model_parallel_size=1"))


@pytest.mark.faults("rehearsal")
@pytest.mark.parametrize(("model", "nodes"), RECIPES)
def test_a_recipe_runs_through(model: str, nodes: str) -> None:
    is_clean(rehearsed(model=model, nodes=int(nodes)))


def is_clean(found: dict[str, Any]) -> None:
    assert found["problems"] == []
    assert len(found["ranks"]) > 0
    phases = {row["phase"] for row in found["memory"] if row["step"] == 2}
    assert {"old_logprobs", "train", "weight_sync", "save"} <= phases
