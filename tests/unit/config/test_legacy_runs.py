from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.legacy_runs import refuse_other_experiment
from posttrain.config.load import dump_yaml, merge
from posttrain.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[3] / "config"


def resolved_with(settings, model="tiny"):
    return merge({"model": model, "site": "local", "run": "mine", "set": settings}, CONFIG_DIR)


@pytest.fixture
def begun(tmp_path):
    """The experiment file of a run that has begun."""
    path = tmp_path / "mine" / "experiment.yaml"
    path.parent.mkdir()
    path.write_text(dump_yaml(resolved_with("").experiment))
    return path


def test_the_same_experiment_goes_on_with_other_engineering(begun):
    refuse_other_experiment(begun, resolved_with("engine.num_engines=2 trainer.keep_checkpoints=5"))


def test_a_run_that_has_not_begun_may_learn_anything(tmp_path):
    refuse_other_experiment(tmp_path / "experiment.yaml", resolved_with("optimizer.lr=1e-3"))


def test_every_changed_value_is_named(begun):
    with pytest.raises(ConfigError) as caught:
        refuse_other_experiment(begun, resolved_with("optimizer.lr=1e-3 training.seed=1"))
    assert [(p.key, p.value) for p in caught.value.problems] == [("optimizer.lr", "0.001"), ("training.seed", "1")]
    assert caught.value.problems[0].allowed == "0.0002, with which the run mine began"
    assert str(begun.parent) in caught.value.problems[0].remedy


@pytest.mark.parametrize(
    ("settings", "forks"),
    [
        ("training.num_steps=81", True),
        ("training.num_steps=79", False),
        ("training.num_steps=81 optimizer.lr=1e-3", False),
        ("optimizer.lr=1e-3", False),
    ],
)
def test_more_steps_are_a_fork_of_the_last_one(begun, settings, forks):
    """The run has 80; a checkpoint of its last step is where others begin."""
    with pytest.raises(ConfigError) as caught:
        refuse_other_experiment(begun, resolved_with(settings))
    assert ("--config run=... fork=mine@80" in caught.value.problems[-1].remedy) == forks


def test_the_file_holds_every_value_exactly(tmp_path):
    """Revisions of digits, tiny numbers and empty texts survive YAML."""
    resolved = resolved_with("optimizer.lr=1.2345678901234567e-7 data.revision=" + "1" * 40, "glm5")
    path = tmp_path / "experiment.yaml"
    path.write_text(dump_yaml(resolved.experiment))
    refuse_other_experiment(path, resolved)
