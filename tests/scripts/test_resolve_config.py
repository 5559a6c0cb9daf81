from pathlib import Path

import pytest
from tests.support.forked_programs import run_step
from tests.support.resolved_words import resolved_words

from posttrain.config.load import load_resolved
from posttrain.plan.resolve import resolve
from posttrain.store.references import read_references

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG_DIR = REPOSITORY / "config"


def resolve_config(folder, **workflow):
    words = [
        *resolved_words(workflow, folder),
        "--experiment",
        folder / "experiment.yaml",
        "--config",
        folder / "config.resolved.yaml",
    ]
    # The run becomes a user of the store `resources` there.
    return run_step("resolve_config", words, folder)


def test_both_files_hold_the_configuration(tmp_path):
    assert resolve_config(tmp_path, model="tiny", site="local").returncode == 0
    config = load_resolved(tmp_path / "config.resolved.yaml")
    assert config == resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    experiment = (tmp_path / "experiment.yaml").read_text()
    assert "rollout_batch_size: 16" in experiment
    assert "node_names" not in experiment
    assert "num_digits: 4  # config/models/tiny.yaml" in (tmp_path / "config.resolved.yaml").read_text()
    (reference,) = read_references(tmp_path / "resources").values()
    assert Path(reference.run).parent == tmp_path / "results"


@pytest.mark.parametrize(
    ("change", "experiment_changes"),
    [("trainer.save_interval=5", False), ("optimizer.lr=3e-4", True), ("", False)],
)
def test_a_file_whose_content_stays_keeps_its_time(tmp_path, change, experiment_changes):
    resolve_config(tmp_path, model="tiny", site="local")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    resolve_config(tmp_path, model="tiny", site="local", set=change)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert (after["experiment.yaml"] != before["experiment.yaml"]) == experiment_changes
    assert (after["config.resolved.yaml"] != before["config.resolved.yaml"]) == bool(change)
