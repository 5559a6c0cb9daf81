"""A rank is slow when it was so in most of the last steps; measured on a process that is stopped most of the time."""

from __future__ import annotations

import signal
import subprocess
import sys

from posttrain.rl.training.slow_ranks import SlowRanks

PROBES = """
import torch
from posttrain.rl.training.slow_ranks import probe_seconds
torch.set_num_threads(1)
probe_seconds()
print("ready", flush=True)
for _ in range(3):
    input()
    print(probe_seconds(), flush=True)
"""


def test_one_probe_of_three_decides_nothing() -> None:
    watch = SlowRanks()
    slow, well, busy = [1.0, 1.0, 5.0, 1.0], [1.0, 1.0, 1.0, 1.0], [5.0, 5.0, 5.0, 5.0]
    found = [watch.observe(seconds) for seconds in (slow, well, well, slow, busy, slow)]
    assert found == [{}, {}, {}, {}, {2: 5.0}, {2: 5.0}]


def test_of_two_ranks_the_slower_one_is_found() -> None:
    watch = SlowRanks()
    assert [watch.observe([1.0, 4.0]) for _ in range(3)][-1] == {1: 4.0}


def test_a_rank_that_is_stopped_most_of_the_time() -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", PROBES], stdin=-1, stdout=-1, text=True) for _ in range(3)]
    watch, named = SlowRanks(), {}
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 3
        hindered = ranks[1]
        throttle = subprocess.Popen([sys.executable, "-c", THROTTLE, str(hindered.pid)])
        for _ in range(3):
            named = watch.observe([probe_of(rank) for rank in ranks])
        throttle.kill()
        throttle.wait()
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
            rank.kill()
            rank.communicate()
    assert list(named) == [1]


THROTTLE = """
import os, signal, sys, time
while True:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.004)
"""


def probe_of(rank: subprocess.Popen) -> float:
    rank.stdin.write("\n")
    rank.stdin.flush()
    return float(rank.stdout.readline())
