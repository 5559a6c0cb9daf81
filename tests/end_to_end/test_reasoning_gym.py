"""A task of reasoning-gym is learned from its own reward; with a constant one nothing is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow
CHOSEN = {"model": "tiny_qwen3", "recipe": "spell_backward"}
NUM_STEPS = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model is made once: neither its weights nor its warm-up depend on the seeds of a run."""
    return tmp_path_factory.mktemp("reasoning_gym") / "store"


def settings(seed: int) -> dict[str, object]:
    """Return fewer than half of the demo's steps."""
    steps = {"training.num_steps": NUM_STEPS, "trainer.save_interval": NUM_STEPS}
    return {"data.seed": seed, "training.seed": seed, **steps}


@pytest.mark.faults("slow")
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_a_task_is_learned_from_its_own_reward(seed: int, store: Path, tmp_path: Path) -> None:
    """Held-out prompts, before and after, of a model whose warm-up is over."""
    workflow = WorkflowFolder(tmp_path / "run", store, settings(seed))
    workflow.run(config=CHOSEN)
    before, after = workflow.summary["pass_rate_before"], workflow.summary["pass_rate_after"]
    assert 0.05 <= before <= 0.35
    assert after >= before + 0.3, (before, after)
    check = json.loads((workflow.run_folder / "data_check.json").read_text())
    assert check["labels"][0]["own"] == 1.0
    assert check["prompt_tokens"]["longest"] <= 64


@pytest.mark.faults("slow")
def test_a_constant_reward_teaches_nothing(store: Path, tmp_path: Path) -> None:
    """The same training, every response worth the same; what it exports is asked as the others are."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "one.py").write_text(
        "def always(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    workflow = WorkflowFolder(tmp_path / "run", store, settings(7) | {"data.reward": "one.py:always"})
    workflow.run("finalize_export_hf", config=CHOSEN | {"run": "control"})
    rates = []
    for name, source in (("before", {}), ("after", {"model.source.kind": "run", "model.source.run": "control"})):
        asked = WorkflowFolder(workflow.folder, workflow.store, settings(7) | source)
        result = asked.results / name / "evaluation" / "before.json"
        asked.run(str(result), config=CHOSEN | {"run": name})
        rates.append(json.loads(result.read_text())["pass_rate"])
    before, after = rates
    assert 0.05 <= before <= 0.35
    # Two draws of 2,048 samples of one model: a standard error of 0.014.
    assert abs(after - before) <= 0.05
