"""What Snakemake itself plans: its jobs with what they wait for, their messages and resources, through its API."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.workflow_runs import ROOT

ASKED = ("nodes", "gpus", "runtime")


def planned_jobs(folder: Path, configs: Sequence[Mapping[str, object]]) -> list[dict[str, list[dict[str, Any]]]]:
    """Return the jobs of each configuration by name, that of the rule, and when, where it makes two things.

    Args:
        folder: An empty one, where Snakemake runs.
        configs: What `--config` gives.

    Returns:
        Rows with "name", "after" (names), "message", "settings" (a param, "" without) and "resources" (those in
        `ASKED`; runtime in minutes).
    """
    command = [sys.executable, "-m", "tests.support.planned_jobs", json.dumps(configs)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, list[dict[str, Any]]]] = []
    for line in (folder / "jobs.jsonl").read_text().splitlines():
        found.append({})
        for job in json.loads(line):
            found[-1].setdefault(job["name"], []).append(job)
    return found


def _plan(config: dict[str, object]) -> list[dict[str, Any]]:
    from snakemake.api import SnakemakeApi
    from snakemake.settings.types import ConfigSettings, OutputSettings, ResourceSettings

    def name_of(job: Any) -> str:
        given = job.wildcards_dict
        quantised = {"export_fp8": "after", "rollout_start": "start"}
        when = quantised.get(given.get("quantized", "").partition("-")[0], given.get("when", ""))
        return f"{job.rule.name} {when}".strip()

    with SnakemakeApi(OutputSettings(dryrun=True)) as api:
        planned = api.workflow(ResourceSettings(cores=2), ConfigSettings(config=config), snakefile=ROOT / "Snakefile")
        planned.dag().execute_workflow(executor="dryrun")
        dag = planned._workflow.dag
        return [
            {
                "name": name_of(job),
                "after": [name_of(before) for before in dag.dependencies[job]],
                "message": job.message,
                "settings": job.params.get("settings", ""),
                "resources": {key: job.resources[key] for key in ASKED if key in job.resources.keys()},  # noqa: SIM118
            }
            for job in dag.jobs
        ]


def main() -> None:
    """Write a line for each configuration; each is planned in a process of its own, which has imported everything."""
    import snakemake.api  # noqa: F401

    import posttrain.cluster.driver
    import posttrain.plan.preflight.refusals
    import posttrain.rl.training.lineage  # noqa: F401

    for config in json.loads(sys.argv[1]):
        child = os.fork()
        if not child:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                jobs = _plan(config)
            with Path("jobs.jsonl").open("a") as file:
                file.write(json.dumps(jobs) + "\n")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, config


if __name__ == "__main__":
    main()
