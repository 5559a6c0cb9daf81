from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_BYTES = 4096
# In a process of its own: the limit holds for every file, the report of the tests too.
WRITE = """
import sys
from pathlib import Path
from posttrain.artifacts import append_json_line, write_text
path, limit = Path(sys.argv[1]), int(sys.argv[2])
try:
    {write}
except OSError as error:
    print(error.filename, error.strerror, error, sep="\\n")
"""


@pytest.mark.parametrize("write", ["write_text(path, 'x' * 2 * limit)", "append_json_line(path, {'x': 'y' * limit})"])
def test_a_write_for_which_there_is_no_room_names_the_file(tmp_path: Path, write: str) -> None:
    path = tmp_path / "file.json"
    said = subprocess.run(
        [sys.executable, "-c", WRITE.format(write=write), str(path), str(LIMIT_BYTES)],
        # The system refuses the write, as on a full disk.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES)),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    filename, reason, message = said
    assert filename == str(path)
    assert reason == "File too large"
    assert str(path) in message
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []
