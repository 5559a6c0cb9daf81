"""A claim about the shared file system: before its first step a training opens few files there.

At most 500 for each trainer rank and each engine whose environment is in an image: modules of the clone, configuration,
checkpoints. What the environment adds where it lies on the shared disk, too, stands in the table.

strace writes down what all processes of a training open, on one node with two ranks. The node's own disk and system
cost the shared file system nothing and are left out. Run from the repository's root:

    python -m benchmarks.opened_files
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.claims import MissingEnvironment, report, start
from tests.support.workflow_runs import FAST, ROOT, WorkflowFolder

GOAL = 500
ONE_STEP = FAST | {
    "training.num_steps": 1,
    "hardware.gpus_per_node": 2,
    "parallel.tensor_model_parallel_size": 2,
    "trainer.num_threads": 1,
    "engine.num_threads": 1,
}
RANK, ENGINE = "trainer rank", "engine"
# What is counted by itself. Whatever else these start counts as theirs.
PROGRAMS = {
    "scripts/train.py": "head",
    "posttrain.cluster.node": "node",
    "posttrain.cluster.trainer_rank": RANK,
    "posttrain.rl.engines.embedded": ENGINE,
}
SHARED, ENVIRONMENT = ("clone", "store", "run"), "environment"
OPENS, STARTS = ("open", "openat", "openat2", "creat"), ("clone", "clone3", "fork", "vfork")
CALL = re.compile(r"(\d+\.\d+) (\w+)\((.*)\) += (-?\d+)(?:<([^>]*)>)?")
PYTHON = re.compile(r'"[^"]*/python[^"/]*"')
# Of the node's supervisor; a rank rewrites it whenever it enters a phase of a step.
PROGRESS_FILE = re.compile(r"/ranks-[^/]+/\d+$")


@dataclass
class Traced:
    """A process or a thread.

    Args:
        program: Its name among `PROGRAMS`; empty for another program, and for what runs none of its own.
        started: Ids of the threads and processes that it has started.
        opened: (Unix time, place) of each file that it opened.
        first_step: When it began to train (Unix time); None where it does not.
    """

    program: str = ""
    started: list[int] = field(default_factory=list)
    opened: list[tuple[float, str]] = field(default_factory=list)
    first_step: float | None = None


def main() -> None:
    """Trace a training, print the table and the claim."""
    if reason := missing_strace():
        raise MissingEnvironment(reason)
    with tempfile.TemporaryDirectory(prefix="opened-") as folder:
        store = Path(folder) / "store"
        WorkflowFolder(Path(folder) / "first", store).run("stage_all_nodes")
        counts = before_first_step(WorkflowFolder(Path(folder) / "work", store, ONE_STEP))
    places = (*SHARED, ENVIRONMENT)
    print(f"{'':16}" + "".join(f"{place:>12}" for place in places))
    for program, opened in counts:
        print(f"{program:16}" + "".join(f"{opened[place]:12}" for place in places))
    claim = "files that a rank or engine opens on the shared file system before the first step, environment in an image"
    report(claim, most_shared(counts), GOAL)


def quick() -> None:
    """Trace a process that opens a few files, and read what strace wrote."""
    if reason := missing_strace():
        raise MissingEnvironment(reason)
    with tempfile.TemporaryDirectory(prefix="opened-") as name:
        folder = Path(name)
        (folder / "weights").write_text("x")
        words = ["strace", "-ff", "-ttt", "-y", "-e", f"trace={','.join(OPENS)}", "-o", str(folder / "of")]
        subprocess.run([*words, "cat", str(folder / "weights")], check=True, stdout=subprocess.DEVNULL)
        traced = [read(path, {"store": (f"{folder}/",)}) for path in folder.glob("of.*")]
    opened = sum(len(process.opened) for process in traced)
    assert opened == 1, traced
    report("files that `cat FILE` opens in its folder", opened, 1)


def missing_strace() -> str:
    """Return why nothing can be traced; empty where it can."""
    return "" if shutil.which("strace") else "strace is missing: make env-strace"


def most_shared(counts: list[tuple[str, Counter[str]]]) -> int:
    """Return how many files that rank or engine opens outside of its environment which opens the most."""
    opened = [opened for program, opened in counts if program in (RANK, ENGINE)]
    return max(sum(places[place] for place in SHARED) for places in opened)


def before_first_step(workflow: WorkflowFolder) -> list[tuple[str, Counter[str]]]:
    """Train one step, and return the files that each program opened before it.

    Returns:
        (program, files by place) of each process of `PROGRAMS`.
    """
    processes = trace(workflow)
    begun = [process.first_step for process in processes.values() if process.first_step]
    assert len(begun) == workflow.settings["hardware.gpus_per_node"], "every rank has begun its first step"
    counts = []
    for process in processes.values():
        if process.program:
            end = process.first_step or max(begun)
            opened = [file for part in with_helpers(process, processes) for file in part.opened]
            counts.append((process.program, Counter(place for time, place in opened if time < end)))
    return sorted(counts, key=lambda count: list(PROGRAMS.values()).index(count[0]))


def with_helpers(process: Traced, processes: Mapping[int, Traced]) -> Iterator[Traced]:
    """Yield a process and what it has started, but for what is counted by itself."""
    yield process
    for child in (processes[started] for started in process.started if started in processes):
        if not child.program:
            yield from with_helpers(child, processes)


def trace(workflow: WorkflowFolder) -> dict[int, Traced]:
    """Train in a workflow's folder, and return all processes and threads by id."""
    workflow.folder.mkdir(parents=True)
    traces = workflow.folder.with_name(f"{workflow.folder.name}.trace")
    traces.mkdir()
    # A file for each thread; times; the paths of descriptors; whole words; the kernel lets all other calls pass.
    options = ["-ff", "-ttt", "-y", "-s", "4096", "--seccomp-bpf", "-e", "signal=none"]
    words = ["strace", *options, "-e", f"trace={','.join((*OPENS, *STARTS, 'execve'))}", "-o", str(traces / "of")]
    ended = subprocess.run(
        [*words, *workflow.command("train")],
        cwd=workflow.folder,
        env=workflow.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    places = {
        ENVIRONMENT: (f"{sys.prefix}/", f"{sys.base_prefix}/"),
        "node": (f"{workflow.folder}/node_local/",),
        "run": (f"{workflow.folder}/",),
        "store": (f"{workflow.store}/",),
        "clone": (f"{ROOT}/",),
    }
    return {int(path.suffix[1:]): read(path, places) for path in traces.iterdir()}


def read(path: Path, places: Mapping[str, tuple[str, ...]]) -> Traced:
    """Return what strace wrote of one process or thread.

    Args:
        path: Its file.
        places: Name -> folders with a slash at their end, the narrower ones first; what lies in none is left out.
    """
    process = Traced()
    for line in path.read_text(errors="replace").splitlines():
        if not (call := CALL.match(line)):
            continue
        time, name, arguments, result, opened = float(call[1]), call[2], call[3], int(call[4]), call[5]
        if name in STARTS and result > 0:
            process.started.append(result)
        # A shell's command line names the program, too.
        elif name == "execve" and result == 0 and PYTHON.match(arguments):
            process.program = next((program for word, program in PROGRAMS.items() if word in arguments), "")
        elif opened:
            # Its supervisor reads it, too.
            if process.program == RANK and PROGRESS_FILE.search(opened):
                process.first_step = process.first_step or time
            if place := place_of(opened, places):
                process.opened.append((time, place))
    return process


def place_of(file: str, places: Mapping[str, tuple[str, ...]]) -> str:
    """Return the first place that a file lies in, empty for none."""
    return next((name for name, folders in places.items() if f"{file}/".startswith(folders)), "")


if __name__ == "__main__":
    start(main, quick)
