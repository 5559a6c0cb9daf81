"""Ends running workflows at points that can be seen from outside, and finds what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from tests.support.workflow_runs import WorkflowFolder

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.store import FileRecord, partial_of, read_receipt, require_files

POLL_SECONDS = 0.003
# A process that follows a dead driver ends at once; this is what the kernel and a busy machine may take.
GONE_SECONDS = 10.0

SUPERVISOR = "scripts/train.py"
NODE = "posttrain.cluster.node"
TRAINER = "posttrain.cluster.trainer_rank"
ENGINE = "posttrain.rl.engines.embedded"
# Rules with more than one job in the tests' configuration.
NUM_JOBS = {
    "convert_hf_to_torch_dist": 2,
    "quantize": 2,
    "stage_to_node_local": 2,
    "export_hf": 2,
    "evaluate": 2,
}
# All but training, which has tests of its own, in the order of the data. With each rule: what makes it count as done,
# below the store or the results.
OUTPUTS = {
    "make_tiny_model": ["made/*.receipt.json"],
    "list_hf_checkpoint": ["tiny/*/hf.manifest.json"],
    "download_hf_checkpoint": ["tiny/*/hf.parts/*.receipt.json"],
    "finalize_hf_checkpoint": ["tiny/*/hf.receipt.json"],
    "download_dataset": ["datasets/*.receipt.json"],
    "patch_hf_config": ["tiny/*/hf_patched-*.receipt.json"],
    "convert_hf_to_torch_dist": ["tiny/*/torch_dist-*.parts/*.receipt.json"],
    "finalize_torch_dist": ["tiny/*/torch_dist-????????.receipt.json"],
    "quantize": ["tiny/*/rollout_fp8-*.parts/*.receipt.json"],
    "finalize_quantized": ["tiny/*/rollout_fp8-????????.receipt.json"],
    "approve_data": ["tiny-*/data_check.json"],
    "resolve_config": ["tiny-*/experiment.yaml", "tiny-*/config.resolved.yaml"],
    "stage_to_node_local": ["tiny-*/node_local/*.json", "tiny-*/node_local.staged"],
    "export_hf": ["tiny-*/hf.parts/*.receipt.json"],
    "finalize_export_hf": ["tiny-*/hf.receipt.json"],
    "check_export": ["tiny-*/export_check.json"],
    "evaluate": ["tiny-*/evaluation/*.json"],
    "render_report": ["tiny-*/summary.json", "tiny-*/report.html"],
}


@dataclass
class Driver:
    """A running `snakemake` in a process group of its own, its output in a file.

    Args:
        workflow: Where it runs.
        process: The driver itself.
        log_path: What it and its steps print.
    """

    workflow: WorkflowFolder
    process: subprocess.Popen
    log_path: Path

    @property
    def output(self) -> str:
        """What was printed so far."""
        return self.log_path.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], object], timeout: float = 120) -> None:
        """Return when the condition holds; fails when the driver ends before, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"the driver ended before the point was reached:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"the point was not reached:\n{self.output[-4000:]}"
            time.sleep(POLL_SECONDS)

    def wait_for_file(self, pattern: str, timeout: float = 120) -> None:
        """Return when the training run's folder holds a file or folder of this name."""
        self.wait_until(lambda: any(self.workflow.results.glob(f"*/train/{pattern}")), timeout)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the driver alone, and wait for its end."""
        self.process.send_signal(number)
        self.process.wait(60)

    def finish(self, timeout: float = 300) -> tuple[int, str]:
        """Wait for the end; returns exit code and output."""
        try:
            self.process.wait(timeout)
        finally:
            self.process.kill()
        return self.process.returncode, self.output


def start(workflow: WorkflowFolder, *targets: str, options: tuple[str, ...] = ()) -> Driver:
    """Start a workflow whose end the test decides."""
    workflow.folder.mkdir(parents=True, exist_ok=True)
    number = len(list(workflow.folder.glob("driver*.log"))) + 1
    log_path = workflow.folder / f"driver{number:03d}.log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            # The test must see a point that lasts a quarter of a second, on few and busy cores.
            ["nice", "-n", "5", *workflow.command(*targets, options=options)],
            cwd=workflow.folder,
            env=workflow.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_listen_to_signals,
        )
    return Driver(workflow, process, log_path)


def _listen_to_signals() -> None:
    """As in a terminal; of tests that run in the background or under nohup, children inherit that these are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_or_end(driver: Driver, seconds: float) -> bool:
    """Wait so long; returns whether the driver has ended by then."""
    deadline = time.monotonic() + seconds
    while driver.process.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return driver.process.poll() is not None


@dataclass(frozen=True)
class Kill:
    """One SIGKILL of a rule's script.

    Args:
        rule: Its name.
        seconds: After the start of the process.
    """

    rule: str
    seconds: float


def kill_at_times(workflow: WorkflowFolder, points: Mapping[str, Sequence[float]], *targets: str) -> list[Kill]:
    """Give the same command again and again until it succeeds, and kill scripts at chosen times on the way.

    Args:
        workflow: Where to run.
        points: For each rule, after how many seconds each next process of its script is killed; when they are used up,
            its processes are left alone. A process that ends before its time uses its point up, too.
        targets: What to make.

    Returns:
        The kills that hit.
    """
    left = {rule: list(times) for rule, times in points.items()}
    kills: list[Kill] = []
    for _ in range(1 + sum(map(len, points.values()))):
        driver = start(workflow, *targets)
        due: dict[psutil.Process, Kill] = {}
        while driver.process.poll() is None:
            for process, rule in scripts_of(workflow):
                if process not in due and left.get(rule):
                    due[process] = Kill(rule, left[rule].pop(0))
            kills += _kill_what_is_due(due)
            time.sleep(POLL_SECONDS)
        if driver.process.returncode == 0:
            return kills
        assert "Traceback" not in driver.output, driver.output[-4000:]
    raise AssertionError(f"more failures than kills:\n{driver.output[-4000:]}")


def _kill_what_is_due(due: dict[psutil.Process, Kill]) -> list[Kill]:
    """Kill every process whose time has come; returns those that were still there."""
    hit = []
    for process, kill in due.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            is_due = time.time() - process.create_time() >= kill.seconds
            if is_due and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                hit.append(kill)
    return hit


def scripts_of(workflow: WorkflowFolder) -> list[tuple[psutil.Process, str]]:
    """Return the running scripts of a workflow, each with its rule."""
    rules = {}
    for process in processes_of(workflow):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = process.cmdline()
            if len(command) > 1 and Path(command[1]).parent.name == "scripts":
                rules[process] = Path(command[1]).stem
    return [(process, rules[process]) for process in _without_forks(list(rules))]


def seconds_by_rule(logs: Path) -> dict[str, float]:
    """Return how long the longest job of each rule took, from Snakemake's benchmark files."""
    seconds: dict[str, float] = {}
    for path in logs.glob("*/*.benchmark.tsv"):
        measured = float(path.read_text().splitlines()[1].split("\t")[0])
        seconds[path.parent.name] = max(seconds.get(path.parent.name, 0.0), measured)
    return seconds


def processes_of(workflow: WorkflowFolder) -> list[psutil.Process]:
    """Return every living process that works in the workflow's folder, whoever started it."""
    return [process for process in psutil.process_iter() if _works_in(process, workflow.folder)]


def find_processes(workflow: WorkflowFolder, word: str) -> list[psutil.Process]:
    """Return the Python processes of a workflow whose command line holds a word, a script or a module."""
    return _without_forks([process for process in processes_of(workflow) if _runs(process, word)])


def rank_process(workflow: WorkflowFolder, rank: int) -> psutil.Process:
    """Return the process of a trainer rank."""
    (found,) = (p for p in find_processes(workflow, TRAINER) if p.environ()["RANK"] == str(rank))
    return found


def attempts_of(workflow: WorkflowFolder) -> list[dict[str, Any]]:
    """Return the ended attempts of a workflow's training."""
    return [json.loads(line) for line in (workflow.run_folder / "train" / "attempts.jsonl").read_text().splitlines()]


def keep_rollouts(driver: Driver, folder: Path, until: str = "") -> None:
    """Link every finished chunk into a folder until the driver ends, or a file of the training (`until`) is there.

    Training deletes the chunks of a step when a later checkpoint is committed.
    """
    folder.mkdir(exist_ok=True)
    results = driver.workflow.results
    while driver.process.poll() is None and not (until and any(results.glob(f"*/train/{until}"))):
        # A folder may go between its listing and a look into it.
        with contextlib.suppress(FileNotFoundError):
            for chunk in results.glob("*/train/rollouts/step_*/chunk_*.json"):
                with contextlib.suppress(FileExistsError):
                    os.link(chunk, folder / f"{chunk.parent.name}-{chunk.name}")
        time.sleep(0.02)


def assert_gone(workflow: WorkflowFolder, seconds: float = GONE_SECONDS) -> None:
    """Fail when a process of the workflow still lives after so many seconds."""
    deadline = time.monotonic() + seconds
    while left := processes_of(workflow):
        assert time.monotonic() < deadline, [(p.pid, p.cmdline()[:8]) for p in left]
        time.sleep(POLL_SECONDS)


def finished_jobs(workflow: WorkflowFolder) -> Counter[str]:
    """Count, over all drivers of a workflow, how often a job of each rule was brought to its end."""
    logs = [path.read_text(errors="replace") for path in workflow.folder.glob("driver*.log")]
    return Counter(rule for log in logs for rule in re.findall(r"^Finished jobid: \d+ \(Rule: (\w+)\)", log, re.M))


def check_claims(workflow: WorkflowFolder) -> int:
    """Compare every receipt of a workflow with what it is about, byte by byte; returns how many there are."""
    receipts = [*workflow.store.rglob("*.receipt.json"), *workflow.results.rglob("*.receipt.json")]
    for receipt in receipts:
        require_files(_folder_of(receipt), receipt, content=True)
    done = list(workflow.results.glob("*/train/done.json"))
    for receipt in done:
        require_files(receipt.parent, receipt, content=True)
    return len(receipts) + len(done)


def files_made(workflow: WorkflowFolder) -> dict[str, tuple[FileRecord, ...]]:
    """Return what every receipt of a folder says was made, by its place in store and results.

    Those of single files are about what has times in it: metrics, results of evaluations, the report.
    """
    return {
        path.relative_to(root).as_posix(): read_receipt(path).files
        for root in (workflow.store, workflow.results)
        for path in root.rglob("*.receipt.json")
        if _folder_of(path) != path.parent
    }


def training_state(workflow: WorkflowFolder, step: int) -> dict[str, torch.Tensor]:
    """Return weights, main weights and moments of a checkpoint."""
    reader = TorchDistReader(workflow.run_folder / "train" / "checkpoints" / f"step_{step:06d}")
    return {key: reader.read(key) for key in reader.keys}


def assert_same_training(workflow: WorkflowFolder, other: WorkflowFolder) -> None:
    """Compare two finished trainings: metrics without timings, and every bit of the last checkpoint."""
    rows = other.metrics()
    assert workflow.metrics() == rows
    last = int(rows[-1]["step"])
    ours, theirs = training_state(workflow, last), training_state(other, last)
    assert ours.keys() == theirs.keys()
    assert any("exp_avg_sq" in key for key in ours), "the optimizer's moments are among them"
    assert not [key for key in ours if not torch.equal(ours[key], theirs[key])]


def _without_forks(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Leave out children of others in the list: between fork and exec a child has its parent's command line."""
    pids = {process.pid for process in processes}
    alone = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.ppid() not in pids:
                alone.append(process)
    return alone


def _folder_of(receipt: Path) -> Path:
    """Return the folder that a receipt, or the receipt of a part, is about; unfinished ones have another name.

    The receipt of single files stands beside them.
    """
    name = receipt.name.removesuffix(".receipt.json")
    parent = receipt.parent
    folder = parent.with_name(parent.name.removesuffix(".parts")) if parent.suffix == ".parts" else parent / name
    return next((found for found in (folder, partial_of(folder)) if found.is_dir()), parent)


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _runs(process: psutil.Process, word: str) -> bool:
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return bool(command) and "python" in Path(command[0]).name and any(part.endswith(word) for part in command[1:4])
