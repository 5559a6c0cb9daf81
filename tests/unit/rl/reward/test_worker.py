"""What a reward function does to its process reaches neither the trainer nor the next answer."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from posttrain.config.own_reward import inspect_own
from posttrain.rl.reward.answer import Answer, Failure
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.reward.job import MAX_REASON_CHARACTERS, Job
from posttrain.rl.reward.own import OwnFunction

SOURCE = """
import asyncio, builtins, decimal, gc, os, resource, signal, sys, threading, time

KEPT = []


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "right?":
        return {"score": probe(), "pid": os.getpid()}
    exec(solution_str)
    return 0.5


def probe():
    os.stat("rewards.py")
    print("", end="")
    os.write(1, b"")
    assert "LEFT" not in os.environ
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL, "a handler"
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "an alarm"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "blocked signals"
    assert sys.getrecursionlimit() == 1000 and gc.isenabled() and len([1, 2]) == 2, "the interpreter"
    assert sys.gettrace() is None and print and exit, "the interpreter"
    assert threading.active_count() == 1, "a thread"
    mask = os.umask(0o22)
    os.umask(mask)
    assert mask != 0o777
    bytearray(20 << 20)
    KEPT_FILES = [os.open("/dev/null", os.O_RDONLY) for _ in range(60)]
    for number in KEPT_FILES:
        os.close(number)
    return 1.0
"""
MEMORY_BYTES = 400 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "rewards.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def ask(source: Path):
    grader = OwnFunction(inspect_own(f"{source}:compute_score"))
    here = Path.cwd()
    os.chdir(source.parent)
    try:
        with GraderPool(20.0, num_workers=1, memory_bytes=MEMORY_BYTES) as pool:
            yield lambda *texts: asyncio.run(
                pool.grade_all([Job(grader, (Answer(text),), source=str(source)) for text in texts])
            )
    finally:
        os.chdir(here)


def test_what_can_be_put_back_is_put_back_in_the_same_process(ask) -> None:
    left = (
        "os.chdir('/')",
        "os.environ['LEFT'] = '1'; os.environ.pop('PATH')",
        "signal.signal(signal.SIGALRM, lambda *_: 1 / 0); signal.alarm(1)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})",
        "os.close(1)",
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
        "sys.stdout = None",
        "sys.setrecursionlimit(200); gc.disable(); os.umask(0o777)",
        "builtins.print = builtins.exit = None",
        "sys.settrace(lambda *_: None)",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
    )
    outcomes = ask("right?", *(text for one in left for text in (one, "right?")))
    assert [one if isinstance(one, Failure) else one[0].score for one in outcomes] == [1.0, *[0.5, 1.0] * len(left)]
    assert len({one[0].parts["pid"] for one in outcomes[::2]}) == 1


@pytest.mark.parametrize(
    "left",
    [
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "KEPT.append(bytearray(300 << 20))",
    ],
    ids=["thread", "memory"],
)
def test_a_process_that_cannot_be_put_back_is_replaced(ask, left: str) -> None:
    before, outcome, after = ask("right?", left, "right?")
    assert outcome[0].score == 0.5
    assert after[0].score == 1.0
    assert after[0].parts["pid"] != before[0].parts["pid"]


def test_memory_that_another_answer_has_kept_is_not_missing(ask) -> None:
    # Less than half is kept, which is allowed; with this answer's own it is too much, in that process.
    kept, outcome = ask("KEPT.append(bytearray(150 << 20))", "KEPT.append(bytearray(300 << 20))")
    assert [kept[0].score, outcome[0].score] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sys.exit(0)", "SystemExit: 0"),
        ("sys.exit('enough')", "SystemExit: enough"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("raise GeneratorExit", "GeneratorExit: "),
        ("raise BaseException('x')", "BaseException: x"),
        ("raise asyncio.CancelledError", "CancelledError: "),
        ("{}['gold']", "KeyError: 'gold'"),
        ("exec('def f(): f()\\nf()', {})", "RecursionError: maximum recursion depth exceeded"),
        ("raise type('Rude', (Exception,), {'__str__': lambda self: 1 / 0})()", "Rude: it cannot be shown"),
    ],
)
def test_whatever_is_raised_is_an_error_with_its_place(ask, source: Path, text: str, reason: str) -> None:
    first, second = ask(text, "right?")
    assert first.kind == "error"
    assert first.reason.startswith(reason)
    assert first.reason.endswith(f"({source}:10, in compute_score)")
    assert second[0].score == 1.0


def test_texts_and_metrics_have_bounds(ask) -> None:
    (told,) = ask("raise ValueError('x' * 3_000_000 + chr(10))")
    assert len(told.reason) < MAX_REASON_CHARACTERS + 300
    assert "(3000001 characters)" in told.reason


def test_workers_end_with_a_trainer_that_is_killed(source: Path) -> None:
    code = (
        "import asyncio, os; from posttrain.rl.reward.graders import *; from posttrain.rl.reward.job import Job\n"
        "from posttrain.config.own_reward import inspect_own; from posttrain.rl.reward.own import OwnFunction\n"
        f"own = OwnFunction(inspect_own({str(source) + ':compute_score'!r}))\n"
        "jobs = [Job(own, (Answer('time.sleep(600)'),))]\n"
        "asyncio.run(GraderPool(600, num_workers=1).grade_all(jobs))"
    )
    trainer = psutil.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not (workers := trainer.children()):
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(trainer.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(workers, timeout=10)
        assert (len(gone), alive) == (1, [])
    finally:
        trainer.kill()
        trainer.wait()
