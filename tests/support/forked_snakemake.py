"""Many calls of the real Snakemake in the time of a few: one process imports everything, and a fork of it is a call."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.workflow_runs import ROOT

SERVER = """
import json, os, sys
import snakemake.cli
# What the Snakefile imports: a fork finds it there.
import posttrain.cluster.driver, posttrain.plan.preflight.refusals, posttrain.rl.training.lineage
import posttrain.cluster.container, posttrain.cluster.slurm_job, posttrain.plan.job_needs
for line in sys.stdin:
    call = json.loads(line)
    child = os.fork()
    if child == 0:
        output = os.open(call["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(call["folder"])
        os.environ.update(call["environment"])
        sys.argv = ["snakemake", *call["words"]]
        snakemake.cli.main(call["words"])
        raise SystemExit("main() has ended the process already")
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class ForkedSnakemake:
    """A process that has imported Snakemake, and runs one call at a time in a fork of itself."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name, "output.txt")
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def __call__(self, folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Return exit code and all output of a call in a folder."""
        command: Sequence[str] = ["--snakefile", str(ROOT / "Snakefile"), *words]
        call = {"folder": str(folder), "words": command, "output": str(self._output)}
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({**call, "environment": dict(environment or {})}) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, self._output.read_text()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._folder.cleanup()


@functools.cache
def forked_snakemake() -> ForkedSnakemake:
    """Return the one of this test session."""
    started = ForkedSnakemake()
    atexit.register(started.close)
    return started
