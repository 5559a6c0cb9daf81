import subprocess
import sys

import pytest
from tests.support.begun_runs import begin_run, workflow_of
from tests.support.resolved_words import resolved_words

from posttrain.store.lease import Lease

SECONDS = 60


@pytest.fixture
def attach(tmp_path):
    def start(run):
        command = [
            sys.executable,
            "-m",
            "posttrain",
            "attach",
            *resolved_words(workflow_of(tmp_path, run=run), tmp_path),
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def test_where_nothing_runs_it_says_so_at_once(tmp_path, attach):
    begin_run(tmp_path, "old")
    output, error = attach("old").communicate(timeout=SECONDS)
    assert "nothing trains old, at step 6 of 40, its newest checkpoint at 4" in output, error
    assert "other has not begun" in attach("other").communicate(timeout=SECONDS)[0]


def test_it_waits_for_who_holds_the_run_and_tells_how_that_ended(tmp_path, attach):
    paths = begin_run(tmp_path, "old")
    with Lease(paths.train, paths.lease):
        waiting = attach("old")
        while "attached to process" not in waiting.stderr.readline():
            assert waiting.poll() is None
    output, error = waiting.communicate(timeout=SECONDS)
    assert waiting.returncode == 1
    assert "has ended: trainer rank 0 was ended" in error
    assert output == ""


def test_what_has_no_step_left_goes_on_with_the_next_command(tmp_path, attach):
    paths = begin_run(tmp_path, "old")
    (paths.checkpoints / "step_000004").rename(paths.checkpoints / "step_000040")
    waiting = attach("old")
    assert "has done all 40 steps" in waiting.communicate(timeout=SECONDS)[0]
    assert waiting.returncode == 0
