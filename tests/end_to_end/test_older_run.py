"""A store and a half-finished run of version 0.1 go on under this version.

The folder was made at commit dc71a9d by `snakemake --cores 2 --configfile small.yaml`, ended by SIGKILL when its
first checkpoint, after step 2 of 4, was there; leases of the store, the W&B run and logs were left out. Losses are
those of an undisturbed run of that commit; this version rounds otherwise (fused attention, other packing). That the
checkpoint is loaded bit by bit is seen in `tests/unit/rl/megatron_backend/test_checkpoint.py`.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from tests.support.workflow_runs import run_snakemake

from posttrain.config.load import read_yaml

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "fixtures" / "version_0_1.tar.xz"
RUN = "tiny-e10851cf"
WORDS = ("--cores", "2", "--configfile", "small.yaml", "--config", "set=logging.wandb=false")
# Losses of the undisturbed run's last two steps.
LOSSES = (-0.006704917177557945, 0.0034064711071550846)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(FOLDER) as archive:
        archive.extractall(folder, filter="data")
    return folder


# Two steps are trained: a trainer and an engine start.
def test_nothing_is_made_anew_and_the_run_goes_on_as_it_began(folder: Path) -> None:
    store = {path: path.read_bytes() for path in folder.glob("resources/**/*") if path.is_file()}
    before = read_yaml(folder / "results" / RUN / "experiment.yaml")
    planned = run_snakemake(folder, "-n", *WORDS).stdout
    jobs = planned.partition("Job stats:")[2].partition("total")[0]
    assert not {"make_tiny_model", "finalize_torch_dist", "quantize", "finalize_quantized", "stage_to_node_local"} & {
        *jobs.split()
    }
    done = run_snakemake(folder, "train", *WORDS)
    assert done.returncode == 0, done.stdout[-3000:]
    assert all(path.read_bytes() == content for path, content in store.items() if "lease" not in str(path))
    assert read_yaml(folder / "results" / RUN / "experiment.yaml") == before
    assert "resuming after step 2" in done.stdout
    rows = [json.loads(line) for line in (folder / "results" / RUN / "train/metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["train/loss"] for row in rows[2:]] == pytest.approx(LOSSES, rel=1e-3)


def test_an_update_without_signal_is_what_it_was_in_a_run_that_began_so(folder: Path) -> None:
    resolved = read_yaml(folder / "results" / RUN / "config.resolved.yaml")
    assert resolved["algorithm"]["zero_advantages"] == "update"
    planned = run_snakemake(folder, *WORDS[:-2], "-n", "--config", "set=training.seed=43").stdout
    assert RUN not in planned, "another experiment is another run, with what this version does"


@pytest.mark.faults("slow")
def test_it_ends_with_a_report(folder: Path) -> None:
    done = run_snakemake(folder, *WORDS)
    assert done.returncode == 0, done.stdout[-3000:]
    assert json.loads((folder / "results" / RUN / "summary.json").read_text())["num_steps"] == 4
