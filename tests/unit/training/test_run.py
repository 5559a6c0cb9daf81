from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.planner.resolve import resolve
from posttrain.training.assembly import open_run

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("finished", [0, 2])
def test_a_rank_that_sees_a_newer_checkpoint_than_its_head_did_does_not_begin(tmp_path: Path, finished: int) -> None:
    """A shared folder that the head saw late: training from there would do steps twice."""
    for step in (2, 4):
        (tmp_path / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    config = resolve({"model": "tiny", "site": "local"}, ROOT / "config").config
    nothing = tmp_path / "nothing"
    run = open_run(config, "run", tmp_path, nothing, nothing, nothing, ["http://nobody"], "secret", print, finished)
    with pytest.raises(RuntimeError, match=f"step 4 is committed, but the head of the job saw only step {finished}"):
        run.__enter__()
