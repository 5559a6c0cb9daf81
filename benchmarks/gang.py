"""Two claims about jobs on SLURM, with a real one of two nodes on this machine.

The gang adds under 10 s to a bare `srun` of the same engines and trainer ranks, from the start of the job's command to
its end: two steps and a checkpoint. The bare job has no lease, copies nothing to its nodes, and nobody watches it; both
end with the same metrics, bit for bit.

A job of another rule is read under 2 s: SLURM's executor starts Snakemake twice in a job, and each reads the workflow
anew before the command runs. A workflow of one rule shows what of it is Snakemake's own.

All are interleaved. Run as root (see tests/support/slurm_localhost.sh) from the repository's root:

    python -m benchmarks.gang
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from benchmarks.claims import MissingEnvironment, report, start
from tests.support.slurm_cluster import Cluster, missing_slurm, running_cluster
from tests.support.slurm_folder import PROFILE, SlurmFolder
from tests.support.workflow_runs import FAST, ROOT, WorkflowFolder

from posttrain.plan.flags.environment import trainer_environment
from posttrain.plan.flags.flag import as_environment
from posttrain.plan.resolve import resolve
from posttrain.report.metrics import without_timings
from posttrain.rl.engines.launch_command import render_engine_command
from posttrain.store import Paths, receipt_of

GANG_GOAL, READ_GOAL, REPEATS = 10.0, 2.0, 5
JOB_SECONDS = 300.0
NODES = ("n0", "n1")
ENGINE_PORT, MEETING_PORT = 20000, 20090
TWO_STEPS = FAST | {
    "training.num_steps": 2,
    "parallel.pipeline_model_parallel_size": 2,
    "engine.num_engines": 2,
    "engine.num_threads": 1,
}
SRUN = "srun --overlap --mem 0 --cpu-bind none"
# A name that no other process has.
NAP = "3.14159"
ONE_RULE = f'rule all:\n    output:\n        "done",\n    shell:\n        "sleep {NAP} && touch {{output}}"\n'
RULE, SCRIPT = "download_dataset", "scripts/download_dataset.py"
OURS, ONE = "remote job until its command", "the same, workflow of one rule"


def main() -> None:
    """Measure, print the table and a line of JSON for each claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    repeats = parser.parse_args().repeats
    if reason := missing_slurm():
        raise MissingEnvironment(reason)
    with tempfile.TemporaryDirectory(prefix="gang-") as name:
        folder = Path(name)
        WorkflowFolder(folder / "first", folder / "store").run("stage_all_nodes", "download_dataset")
        with running_cluster(len(NODES)) as cluster:
            trainings = measure_trainings(cluster, folder, repeats)
            starts = measure_starts(cluster, folder, repeats)
    for what, times in (trainings | starts).items():
        print(f"{what:32} {statistics.median(times):6.2f} s  ({min(times):.2f} to {max(times):.2f})")
    added = statistics.median(trainings["gang"]) - statistics.median(trainings["bare srun"])
    report("seconds that the gang adds to a bare srun of the same engines and ranks", added, GANG_GOAL)
    read = statistics.median(starts[OURS]) - statistics.median(starts[ONE])
    report("seconds that reading this workflow adds to a remote job beside a workflow of one rule", read, READ_GOAL)
    report("seconds from a remote job's first process to its command", statistics.median(starts[OURS]), READ_GOAL)


def quick() -> None:
    """The start of one remote job, beside that of a workflow of one rule."""
    if reason := missing_slurm():
        raise MissingEnvironment(reason)
    with tempfile.TemporaryDirectory(prefix="gang-") as name, running_cluster(len(NODES)) as cluster:
        starts = measure_starts(cluster, Path(name), 1)
    report("seconds from a remote job's first process to its command", starts[OURS][0], READ_GOAL)


# ---- the gang ----


def measure_trainings(cluster: Cluster, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each training, by how it was started."""
    workflow = SlurmFolder(folder / "work", folder / "store", TWO_STEPS, cluster.environment, nodes=len(NODES))
    workflow.run("resolve_config")
    overrides = {"site.store": workflow.store, "site.results": workflow.results} | TWO_STEPS
    settings = " ".join(f"{key}={value}" for key, value in overrides.items())
    choice = {"model": "tiny", "site": "slurm_localhost", "nodes": len(NODES), "set": settings}
    paths = Paths(resolve(choice, ROOT / "config"))
    assert paths.config.exists(), "the workflow runs what is run here"
    seconds: dict[str, list[float]] = {"gang": [], "bare srun": []}
    for repeat in range(repeats):
        runs = {way: folder / f"{way.replace(' ', '_')}{repeat}" for way in seconds}
        seconds["gang"].append(job_seconds(cluster, runs["gang"], gang(paths, runs["gang"])))
        seconds["bare srun"].append(job_seconds(cluster, runs["bare srun"], bare(paths, runs["bare srun"])))
        one, other = (metrics(run) for run in runs.values())
        assert one == other, "both have trained the same"
    return seconds


def job_seconds(cluster: Cluster, folder: Path, command: str) -> float:
    """Run a shell command as a job of all nodes; return the seconds from its start to its end."""
    (folder / "train").mkdir(parents=True)
    clock = "date +%s.%N"
    lines = (
        "#!/bin/bash",
        "export OMP_WAIT_POLICY=PASSIVE",
        f"{clock} > started",
        command,
        f"echo $? $({clock}) > ended",
    )
    (folder / "job.sh").write_text("\n".join(lines) + "\n")
    place = ("--nodes", str(len(NODES)), "--exclusive", "--chdir", str(folder), "--output", str(folder / "job.log"))
    cluster.ask("sbatch", *place, str(folder / "job.sh"))
    deadline = time.monotonic() + JOB_SECONDS
    while not (words := text(folder / "ended").split()):
        assert time.monotonic() < deadline, text(folder / "job.log")[-4000:]
        time.sleep(0.2)
    code, ended = words
    assert code == "0", text(folder / "job.log")[-4000:]
    return float(ended) - float(text(folder / "started"))


def gang(paths: Paths, folder: Path) -> str:
    """Return the command of rule train."""
    words = {
        "--experiment": paths.experiment,
        "--config": paths.config,
        "--run-folder": folder / "train",
        "--torch-dist": paths.torch_dist,
        "--torch-dist-receipt": receipt_of(paths.torch_dist),
        "--rollout-weights": paths.rollout_weights,
        "--rollout-receipt": receipt_of(paths.rollout_weights),
        "--dataset": paths.dataset,
        "--dataset-receipt": receipt_of(paths.dataset),
        "--node-local": paths.node_local("{node}").with_name(folder.name),
        "--done": folder / "done.json",
    }
    return shlex.join([sys.executable, str(ROOT / "scripts/train.py"), *flat(words)])


def bare(paths: Paths, folder: Path) -> str:
    """Return what somebody would write who has only srun: engines in the background, ranks, the end of the engines."""
    config = paths.resolved.config
    engines = [
        render_engine_command(config, i, paths.rollout_weights, NODES[i], ENGINE_PORT) for i in range(len(NODES))
    ]
    words = {
        "--config": paths.config,
        "--run-name": folder.name,
        "--run-folder": folder / "train",
        "--dataset": paths.dataset,
        "--torch-dist": paths.torch_dist,
        "--model-folder": paths.rollout_weights,
    }
    urls = [word for engine in engines for word in ("--engine", engine.url)]
    place = {"WORLD_SIZE": len(NODES), "LOCAL_RANK": 0, "MASTER_ADDR": NODES[0], "MASTER_PORT": MEETING_PORT}
    rank = [sys.executable, "-m", "posttrain.cluster.trainer_rank", *flat(words), *urls]
    ranks = with_environment(place | as_environment(trainer_environment(config)), rank)
    return "\n".join(
        [
            *(
                f"{SRUN} --nodes 1 --ntasks 1 --nodelist {name} {with_environment(engine.env, engine.argv)} &"
                for name, engine in zip(NODES, engines, strict=True)
            ),
            f"{SRUN} --nodes {len(NODES)} --ntasks-per-node 1 bash -c 'RANK=$SLURM_PROCID exec \"$@\"' rank {ranks}",
            "code=$?; kill $(jobs -p); wait; (exit $code)",
        ]
    )


def flat(words: Mapping[str, object]) -> list[str]:
    """Return options and their values as words."""
    return [str(word) for pair in words.items() for word in pair]


def with_environment(variables: Mapping[str, object], words: Sequence[str]) -> str:
    """Return a command with variables of its own."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *words])


def metrics(folder: Path) -> list[dict[str, float]]:
    """Return what training measured, without its timings."""
    return [without_timings(json.loads(line)) for line in text(folder / "train" / "metrics.jsonl").splitlines()]


def text(path: Path) -> str:
    """Return a file's text, empty before there is one."""
    return path.read_text() if path.exists() else ""


# ---- the start of a job ----


def measure_starts(cluster: Cluster, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds from a remote job's first process to its command, ours and of a workflow of one rule."""
    (folder / "one_rule.smk").write_text(ONE_RULE)
    one_rule = ["--snakefile", str(folder / "one_rule.smk"), "--workflow-profile", str(PROFILE)]
    seconds: dict[str, list[float]] = {OURS: [], ONE: []}
    for repeat in range(repeats):
        ours = SlurmFolder(folder / f"ours{repeat}", folder / f"store{repeat}", environment=cluster.environment)
        seconds[OURS].append(start_seconds(ours, ours.command(RULE), SCRIPT))
        one = SlurmFolder(folder / f"one{repeat}", folder / "store", environment=cluster.environment)
        seconds[ONE].append(start_seconds(one, [sys.executable, "-m", "snakemake", *one_rule], NAP))
    return seconds


def start_seconds(workflow: SlurmFolder, command: Sequence[str], word: str) -> float:
    """Run a workflow of one job; return the seconds from the job's first process to the command with a word."""
    workflow.folder.mkdir()
    with (
        open(workflow.folder / "driver.log", "wb") as log,
        subprocess.Popen(command, cwd=workflow.folder, env=workflow.env, stdout=log, stderr=log) as driver,
    ):
        while (found := process_with(word)) is None:
            assert driver.poll() is None, text(workflow.folder / "driver.log")[-4000:]
            time.sleep(0.1)
        job = found.environ()["SLURM_JOB_ID"]
        first = min(process.create_time() for process in psutil.process_iter() if job_of(process) == job)
        assert driver.wait(120) == 0, text(workflow.folder / "driver.log")[-4000:]
    return found.create_time() - first


def process_with(word: str) -> psutil.Process | None:
    """Return the process that has a word on its command line which ends like this."""
    for process in psutil.process_iter(["cmdline"]):
        if any(each.endswith(word) for each in process.info["cmdline"] or ()):
            return process
    return None


def job_of(process: psutil.Process) -> str:
    """Return the number of the SLURM job that a process belongs to, empty for none."""
    try:
        return process.environ().get("SLURM_JOB_ID", "")
    except psutil.Error:
        return ""


if __name__ == "__main__":
    start(main, quick)
