"""Runs the real workflow from tests: snakemake in a folder of its own, over a store that a test session shares."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.forked_snakemake import ROOT, forked_snakemake

from posttrain.config.request import RESERVED_NAMES
from posttrain.plan.resolve import resolve
from posttrain.store import Paths

# Small enough for seconds, large enough for every branch: two updates per rollout, a checkpoint in the middle.
FAST = {
    "training.num_steps": 4,
    "training.global_batch_size": 16,
    "rollout.rollout_batch_size": 4,
    "rollout.num_samples_per_prompt": 8,
    "engine.groups_per_request": 2,
    "trainer.save_interval": 2,
    "data.num_heldout_prompts": 16,
    "evaluation.num_samples_per_prompt": 1,
    "logging.wandb": "false",
}


def run_snakemake(
    folder: Path, *words: str, snakefile: Path = ROOT / "Snakefile", python_options: Sequence[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run snakemake in a folder and return how it ended; what it prints, errors included, is `stdout`.

    With options of Python, be it none, in a process that imports everything anew, as users do.
    """
    command = [sys.executable, *(python_options or ()), "-m", "snakemake", "--snakefile", str(snakefile), *words]
    if python_options is not None:
        return subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
        )
    return subprocess.CompletedProcess(command, *forked_snakemake(folder, *command[3:]))


@dataclass
class WorkflowFolder:
    """A working directory of the workflow.

    Args:
        folder: Where snakemake runs; results, logs and node-local copies go below it.
        store: Checkpoints that several runs share.
        settings: Overrides, as in `set=`.
        environment: Added to the environment.
    """

    folder: Path
    store: Path
    settings: dict[str, object] = field(default_factory=lambda: dict(FAST))
    environment: dict[str, str] = field(default_factory=dict)

    def command(
        self, *targets: str, config: Mapping[str, object] | None = None, options: Sequence[str] = ()
    ) -> list[str]:
        """Return the command line of a run."""
        overrides = {"site.store": self.store, "site.results": self.results} | self.settings
        words = {"set": " ".join(f"{key}={value}" for key, value in overrides.items()), **(config or {})}
        pairs = [f"{key}={value}" for key, value in words.items()]
        return [
            *(sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")),
            *("--cores", "2", *options, *targets, "--config", *pairs),
        ]

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def paths(self) -> Paths:
        """Where the files lie of a run on the command line."""
        words = self.command()
        choice = dict(word.split("=", 1) for word in words[words.index("--config") + 1 :])
        return Paths(resolve({"model": "tiny", "site": "local", **choice}, ROOT / "config"))

    @property
    def env(self) -> dict[str, str]:
        # As in a shell that has not activated the environment.
        folders = [f for f in os.environ["PATH"].split(os.pathsep) if Path(f) != Path(sys.executable).parent]
        return {**os.environ, "PATH": os.pathsep.join(folders), "OMP_WAIT_POLICY": "PASSIVE", **self.environment}

    def start(self, *targets: str, **arguments) -> subprocess.Popen:
        """Start a run and return its process, the driver."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            self.command(*targets, **arguments),
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *targets: str, timeout: float = 600, **arguments) -> str:
        """Run to the end and return what was printed; fails the test when the run fails."""
        code, output = self.attempt(*targets, timeout=timeout, **arguments)
        assert code == 0, f"the workflow ended with {code}:\n{output[-6000:]}"
        return output

    def attempt(self, *targets: str, timeout: float = 600, **arguments) -> tuple[int, str]:
        """Run to the end and return exit code and output."""
        self.folder.mkdir(parents=True, exist_ok=True)
        program, words = (command := self.command(*targets, **arguments))[:3], command[3:]
        if program == [sys.executable, "-m", "snakemake"]:  # and not as another user
            return forked_snakemake(self.folder, *words, environment=self.env, timeout=timeout)
        process = self.start(*targets, **arguments)
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return process.returncode, output

    def dry_run(self, *targets: str, **arguments) -> str:
        """Return what a dry run prints."""
        return self.run(*targets, options=["-n"], **arguments)

    @property
    def run_folder(self) -> Path:
        """The one run below `results`."""
        (run,) = (path for path in self.results.iterdir() if path.name not in RESERVED_NAMES)
        return run

    @property
    def summary(self) -> dict:
        return json.loads((self.run_folder / "summary.json").read_text())

    def metrics(self) -> list[dict[str, float]]:
        """Return the metric rows without timings: equal rows mean equal computation."""
        from posttrain.report.metrics import without_timings

        lines = (self.run_folder / "train" / "metrics.jsonl").read_text().splitlines()
        return [without_timings(json.loads(line)) for line in lines]

    def forget_results(self) -> None:
        """Delete everything but the store."""
        shutil.rmtree(self.folder, ignore_errors=True)
