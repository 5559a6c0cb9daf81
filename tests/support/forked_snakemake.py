"""Many calls of the real Snakemake in the time of a few: one process imports everything, and a fork of it is a call."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# With its parser come Snakemake's plugins, and with the rules what they import.
SERVER = """
import gc, json, os, re, sys
from pathlib import Path
import snakemake.cli
snakemake.cli.get_argument_parser()
for path in Path("workflow/rules").glob("*.smk"):
    exec("\\n".join(re.findall(r"^(?:from|import) posttrain.*", path.read_text(), re.MULTILINE)))
gc.freeze()
for line in sys.stdin:
    call = json.loads(line)
    child = os.fork()
    if child == 0:
        output = os.open(call["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(descriptor, number)
        os.chdir(call["folder"])
        os.umask(call["umask"])
        os.environ.clear()
        os.environ.update(call["environment"])
        exec(call["before"])
        sys.argv = ["snakemake", *call["words"]]
        snakemake.cli.main(call["words"])
        raise SystemExit("main() has ended the process already")
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def forked_snakemake(
    folder: Path,
    *words: str,
    environment: Mapping[str, str] | None = None,
    before: str = "",
    timeout: float = 600,
) -> tuple[int, str]:
    """Return exit code and all output of a call of Snakemake.

    Args:
        folder: Where it runs.
        words: Of its command line.
        environment: Added to the present one.
        before: Python that runs first.
        timeout: In seconds.
    """
    call = {
        "folder": str(folder),
        "words": ["--snakefile", str(ROOT / "Snakefile"), *words],
        "environment": {**os.environ, **(environment or {})},
        "umask": _umask(),
        "before": before,
    }
    return _server().call(call, timeout)


class _Server:
    """A process that has imported Snakemake, and runs one call at a time in a fork of itself; it ends with this one."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # Unbuffered, so that what was not read yet can be waited for.
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd=ROOT
        )
        atexit.register(self._close)

    def call(self, call: Mapping[str, object], timeout: float) -> tuple[int, str]:
        assert self._process.stdin
        assert self._process.stdout
        output = Path(self._folder.name, "output")
        self._process.stdin.write(json.dumps({**call, "output": str(output)}).encode() + b"\n")
        child, code = int(self._process.stdout.readline()), b""
        try:
            assert select.select([self._process.stdout], [], [], timeout)[0], f"no end within {timeout} s"
            code = self._process.stdout.readline()
        finally:
            if not code:  # too late, or the test was interrupted
                os.kill(child, signal.SIGKILL)
                self._process.stdout.readline()
        return int(code), output.read_text(errors="replace")

    def _close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


@functools.cache
def _server() -> _Server:
    return _Server()


def _umask() -> int:
    present = os.umask(0o077)
    os.umask(present)
    return present
