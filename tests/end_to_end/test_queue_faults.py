"""Ranks and engines that are killed while engines run ahead: nothing promised is lost, nothing is trained on twice.

The product's generator, queue, files, client and training loop, without a model. A rank ends at one of its operations
on files or between two phases of a step, an engine at one of its calls, several times in a training. What is expected
is computed here from the files alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.fault_parts import Count
from tests.support.fault_record import FaultRecord
from tests.support.forked_programs import ONE_THREAD, ForkedProgram
from tests.support.megatron_single import CONFIG_DIR

from posttrain.checkpoint.tiny.tokenizer import STOP_TOKENS, make_tokenizer
from posttrain.config.load import Resolved, dump_resolved
from posttrain.plan.resolve import resolve
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.types import TrajectoryGroup

pytestmark = [pytest.mark.faults("queued"), pytest.mark.timeout(3600)]
NUM_STEPS, NUM_GROUPS, GROUP_SIZE, NUM_ENGINES = 8, 3, 2, 2
NUM_EVENTS = int(os.environ.get("POSTTRAIN_QUEUE_FAULTS", "200"))
SETTINGS = {
    "training.num_steps": NUM_STEPS,
    "training.global_batch_size": NUM_GROUPS * GROUP_SIZE,
    "rollout.rollout_batch_size": NUM_GROUPS,
    "rollout.num_samples_per_prompt": GROUP_SIZE,
    "rollout.max_response_tokens": 8,
    "rollout.fp8": "false",
    "data.reward": "exact_match",
    "trainer.save_interval": 3,
    "trainer.num_threads": 1,
    "engine.num_engines": NUM_ENGINES,
    "algorithm.preset": "tis",
}
SAMPLING = {"rollout.dynamic_sampling": "true", "rollout.max_oversampling": 2}
EPISODES = {
    "data.environment": "ENVIRONMENT:Guess",
    "data.reward": "environment",
    "rollout.max_response_tokens": 60,
    "reward.max_failure_share": 1,
}
GUESS = """import os
from pathlib import Path


class Guess:
    def __init__(self, seed):
        self.num_turns, self.most = 0, 2 + seed % 2

    async def reset(self, row):
        Path(__file__).with_name(f"serving-{os.getpid()}").touch()
        return row["messages"], None

    async def step(self, action):
        self.num_turns += 1
        self.is_right = action["content"] == "7777"
        return [{"role": "user", "content": "more"}], self.num_turns == self.most

    async def reward(self, trajectory):
        return float(self.is_right)
"""
WORKER = "posttrain.rl.environments.worker"
# A rank that writes no file for so long hangs; busy cores take ten times as long to import its modules as quiet ones.
QUIET_SECONDS = 180.0
# A worker that follows its trainer ends at once; busy cores take longer.
GONE_SECONDS = 60.0
RUNS = {
    "recompute": {"rollout.on_new_weights": "recompute", "rollout.max_staleness": 2},
    "keep": {"rollout.on_new_weights": "keep", "rollout.max_staleness": 1},
    "finish": {"rollout.on_new_weights": "finish", "rollout.max_staleness": 3},
    "abort": {"rollout.on_new_weights": "abort", "rollout.max_staleness": 2},
    "recompute, dynamic sampling": {"rollout.on_new_weights": "recompute", "rollout.max_staleness": 2, **SAMPLING},
    "abort, dynamic sampling": {"rollout.on_new_weights": "abort", "rollout.max_staleness": 1, **SAMPLING},
    "synchronous, dynamic sampling": {"rollout.max_staleness": 0, **SAMPLING},
    "tail": {
        "rollout.on_new_weights": "abort",
        "rollout.max_staleness": 2,
        "rollout.tail_fraction": 0.7,
        "engine.sleep": "always",
    },
    "episodes": {"rollout.on_new_weights": "abort", "rollout.max_staleness": 2, **EPISODES},
    "synchronous episodes": {"rollout.max_staleness": 0, **EPISODES},
}
# The moments of a training without kills: about this many.
NUM_MOMENTS, NUM_CALLS = 110, 60
ENVIRONMENT = {**os.environ, **ONE_THREAD}


def prepare(folder: Path, settings: dict[str, Any]) -> None:
    """Put into a folder what a rank begins with."""
    folder.mkdir(parents=True)
    (folder / "own.py").write_text(GUESS)
    words = " ".join(f"{key}={value}" for key, value in (SETTINGS | settings).items())
    words = words.replace("ENVIRONMENT", str(folder / "own.py"))
    config = resolve({"model": "tiny", "site": "local", "set": words}, CONFIG_DIR).config
    (folder / "config.yaml").write_text(dump_resolved(Resolved(config, {}, "run")))
    tokenizer = make_tokenizer(config.model.architecture.max_position_embeddings)
    tokenizer.save_pretrained(folder / "hf")
    stops = {"eos_token_id": tokenizer.convert_tokens_to_ids([*STOP_TOKENS])}
    (folder / "hf/generation_config.json").write_text(json.dumps(stops))


class Training:
    """One training, in as many attempts as it takes.

    Args:
        folder: From `prepare`.
        chance: Decides when ranks and engines end.
    """

    def __init__(self, folder: Path, chance: random.Random):
        self.folder, self._chance = folder, chance
        self._has_episodes = "own.py" in (folder / "config.yaml").read_text()
        self.num_kills = self.num_engine_deaths = self.num_worker_deaths = 0
        self._promised = dict[int, TrajectoryGroup]()
        self._taken = dict[int, list[TrajectoryGroup]]()

    def live_through(self) -> None:
        """Begin attempts until one finishes; after each, note and compare what is on disk."""
        while not self._attempt():
            self._note_files()
            assert self.num_kills + self.num_engine_deaths < 100, "no attempt gets further"

    def _attempt(self) -> bool:
        """Run a rank with engines of its own; return whether it has finished."""
        deaths_before = self.num_engine_deaths
        ports = choose_free_ports(NUM_ENGINES)
        with started_engines(ports, self._draw(NUM_CALLS)) as engines:
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            words = [str(self.folder), str(self._draw(NUM_MOMENTS)), *urls]
            rank = ForkedProgram("tests.support.queue_rank", words, ENVIRONMENT)
            began = time.time()
            while rank.poll() is None:
                self._replace_dead(engines)
                self._kill_worker()
                if time.time() - max(began, self._last_written()) > QUIET_SECONDS:
                    rank.kill()
                    pytest.fail(f"{self.folder}: the rank hangs\n{rank.communicate(10)[0][-4000:]}")
                time.sleep(0.005)
            self._replace_dead(engines)
        output, _ = rank.communicate(10)
        self._check_no_worker_is_left()
        self.num_kills += rank.returncode == -signal.SIGKILL
        if rank.returncode in (0, -signal.SIGKILL):
            return rank.returncode == 0
        # An engine that dies while it gets weights ends the attempt.
        assert self.num_engine_deaths > deaths_before, output[-6000:]
        assert "engine" in output.splitlines()[-1], output[-6000:]
        assert "do not generate" not in output.splitlines()[-1], "asked while weights were sent"
        return False

    def _last_written(self) -> float:
        """Return when an entry of the run's folders was last made or removed, in seconds of the epoch."""
        folders = [self.folder, self.folder / "run", self.folder / "run/rollouts"]
        return max(folder.stat().st_mtime for folder in folders if folder.exists())

    def _workers(self) -> list[psutil.Process]:
        """Return the processes of this training's environments."""
        everyone = psutil.process_iter(["cmdline"])
        words = [(one, one.info["cmdline"] or []) for one in everyone]
        return [one for one, line in words if WORKER in line and any(str(self.folder) in word for word in line)]

    def _kill_worker(self) -> None:
        """End a process of environments, or its supervisor, now and then: one that has begun to play an episode.

        One that still imports is left alone: on busy cores no environment would ever begin.
        """
        if self._has_episodes and self._chance.random() < 0.01:
            workers = self._workers()
            for worker in workers:
                if (note := self.folder / f"serving-{worker.pid}").exists():
                    note.unlink()
                    with contextlib.suppress(psutil.NoSuchProcess):
                        family = [worker, *(one for one in workers if one.pid == worker.ppid())]
                        self._chance.choice(family).kill()
                        self.num_worker_deaths += 1
                    return

    def _check_no_worker_is_left(self) -> None:
        """No process of an environment outlives its trainer."""
        until = time.monotonic() + GONE_SECONDS
        while left := self._workers():
            assert time.monotonic() < until, f"left over: {left}"
            time.sleep(0.05)

    def _replace_dead(self, engines: dict[int, ForkedProgram]) -> None:
        """Start engines that have ended again, as a supervisor does."""
        for port, engine in engines.items():
            if engine.poll() is not None:
                assert engine.returncode == -signal.SIGKILL, engine.communicate(10)[0]
                self.num_engine_deaths += 1
                engines[port] = start_engine(port, self._draw(NUM_CALLS))

    def _draw(self, most: int) -> int:
        """Return when a process ends; 0, never, for every fifth."""
        return self._chance.choice((0, 1, 1, 1, 1)) * self._chance.randint(1, most)

    def _note_files(self) -> None:
        """Note finished groups, and those that steps have; what was noted before is still there, or was trained on."""
        store, trained = QueueStore(self.folder / "run/rollouts"), self.trained()
        ready = {group.position: group for group in store.read_groups()}
        for path in (self.folder / "run/rollouts").glob("step_*"):
            step = int(path.name.removeprefix("step_"))
            if (groups := store.read(step, 0)) is not None:
                assert self._taken.setdefault(step, groups) == groups, f"step {step} has other groups than before"
        known = ready | {
            group.position: group for groups in (*trained.values(), *self._taken.values()) for group in groups
        }
        for position, group in self._promised.items():
            assert known.get(position) == group, f"the group at position {position} was stored, and is lost"
        self._promised |= known

    def trained(self) -> dict[int, list[TrajectoryGroup]]:
        """Return step -> groups that it was trained on; a step that is trained again gets the same groups."""
        path, found = self.folder / "run/trained.jsonl", dict[int, list[TrajectoryGroup]]()
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        for row in map(json.loads, lines):
            groups = [TrajectoryGroup.from_dict(group) for group in row["groups"]]
            assert found.setdefault(row["step"], groups) == groups, f"step {row['step']} trained on other groups again"
        return found

    def check(self, max_staleness: int, may_drop: bool) -> None:
        """Check what the whole training promises."""
        trained = self.trained()
        assert sorted(trained) == list(range(NUM_STEPS))
        for step, groups in trained.items():
            spans = [span for group in groups for one in group.trajectories for span in one.versions]
            assert all(span.version is not None and 0 <= step - span.version <= max_staleness for span in spans)
            assert all(sum(span.num_tokens for span in one.versions) == one.num_sampled
                       for group in groups for one in group.trajectories)  # fmt: skip
            assert [len(group.trajectories) for group in groups] == [GROUP_SIZE] * NUM_GROUPS
            episodes = [one for group in groups for one in group.trajectories if "episode/turns" in one.parts]
            assert all(one.reward is None or one.parts["episode/turns"] in (2, 3) for one in episodes), (
                "half an episode"
            )
        positions = [group.position for groups in trained.values() for group in groups]
        assert len({*positions}) == len(positions) == NUM_GROUPS * NUM_STEPS, "a group was trained on twice"
        done = QueueStore(self.folder / "run/rollouts").read_done(NUM_STEPS)
        accounted = {*range(done[0]), *done[1]}
        assert accounted >= {*positions}
        assert may_drop or accounted == {*range(NUM_GROUPS * NUM_STEPS)} == {*positions}, "a position is left out"
        lost = {place: group for place, group in self._promised.items() if place not in positions}
        assert not lost, f"groups at positions {sorted(lost)} were stored and never trained on"
        by_position = {group.position: group for groups in trained.values() for group in groups}
        assert all(by_position[place] == group for place, group in self._promised.items())


@contextmanager
def started_engines(ports: Sequence[int], last_call: int) -> Iterator[dict[int, ForkedProgram]]:
    """Start engines, of which the first ends at a call; port -> engine."""
    engines = {port: start_engine(port, last_call if port == ports[0] else 0) for port in ports}
    try:
        yield engines
    finally:
        for engine in engines.values():
            engine.kill()
            engine.communicate(10)


def start_engine(port: int, last_call: int) -> ForkedProgram:
    return ForkedProgram("tests.support.mortal_engine", [str(port), str(last_call)], ENVIRONMENT)


@pytest.mark.parametrize("name", list(RUNS))
def test_what_a_run_promises_holds_after_kills(name: str, count: Count, tmp_path: Path, faults: FaultRecord) -> None:
    settings, moments, began = RUNS[name], Counter[str](), time.monotonic()
    while sum(row["kills"] + row["engine_deaths"] for row in count.rows) < NUM_EVENTS / len(RUNS):
        number = len(count.rows)
        prepare(tmp_path / f"run_{number}", settings)
        training = Training(tmp_path / f"run_{number}", random.Random(f"{name} {number}"))
        training.live_through()
        training.check(
            settings["rollout.max_staleness"], bool({"rollout.dynamic_sampling", "data.environment"} & {*settings})
        )
        path = training.folder / "moments.txt"
        told = path.read_text().split("\n")[:-1] if path.exists() else []
        row = {"kills": training.num_kills, "engine_deaths": training.num_engine_deaths, "moments": told}
        row["worker_deaths"] = training.num_worker_deaths
        count.add([row])
    for row in count.rows:
        moments.update(row["moments"])
    assert sum(row["kills"] for row in count.rows) == moments.total()
    seconds = time.monotonic() - began
    faults.add_counts("kills", {f"{name}: {moment}": times for moment, times in moments.items()}, seconds)
    if deaths := sum(row.get("worker_deaths", 0) for row in count.rows):
        faults.add_counts("kills", {f"{name}: a process of environments": deaths}, seconds)
    faults.add_counts("kills", {f"{name}: an engine": sum(row["engine_deaths"] for row in count.rows)}, seconds)
    faults.equal = True
