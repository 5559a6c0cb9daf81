"""Who unpickles in a whole run, in our code and in anybody's: seen from inside of every process.

`tests/test_unpickling.py` plants payloads at these places.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import UNPICKLED
from tests.support.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow

# File that unpickles and its function -> what it reads.
PLACES = {
    "posttrain/checkpoint/formats/torch_dist_format.py:find_class": "checkpoints, ranks' messages: lists of classes",
}


def test_nothing_else_unpickles_in_a_whole_run(undisturbed: WorkflowFolder) -> None:
    lines = (undisturbed.folder / UNPICKLED).read_text().splitlines()
    found = {"/".join(Path(line.partition(" ")[0]).parts[-4:]) for line in lines}
    assert found == set(PLACES)
