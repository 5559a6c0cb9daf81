"""Whole trainings with a model whose processes are killed at random moments (`make test-faults`).

The product's ranks train over gloo, embedded engines sample, environments and sandboxes run in processes of their own.
Synchronous trainings with seeded environments have to end with the tokens, rewards and weights of one that nobody
disturbs. Where engines run ahead, groups are compared with what the files promised after each kill, and the weights at
the end with those of a training on the recorded groups.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.end_to_end.test_faults import IMPORT_SECONDS, kill_one_of
from tests.support.fault_parts import Count
from tests.support.fault_record import FaultRecord
from tests.support.interruptions import (
    Driver,
    Kill,
    assert_gone,
    assert_same_training,
    check_claims,
    start,
    wait_or_end,
)
from tests.support.killed_processes import (
    EARLY_SHARE,
    ENGINE,
    MOST_SECONDS,
    RANK,
    RUN,
    SANDBOX,
    SERVER,
    WORKER,
    KilledTraining,
)
from tests.support.queue_promises import Promises, check_whole
from tests.support.queued_trainings import finish, prepare, rows_of, start_ranks
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.checkpoint.tiny.tokenizer import STOP_TOKENS, make_tokenizer
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.types import Trajectory, TrajectoryGroup

pytestmark = pytest.mark.timeout(7200)
NUM_AGENT_KILLS = int(os.environ.get("POSTTRAIN_AGENT_FAULTS", "100"))
NUM_AHEAD_KILLS = int(os.environ.get("POSTTRAIN_AHEAD_FAULTS", "200"))
NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 8, 3, 4
KILLS_PER_TRAINING = 13
OWN = '''"""Environments that follow from their seeds and from what the model has written, and a reward."""

import asyncio
import random

from posttrain.rl.environments.calculator import Calculator
from posttrain.rl.environments.python_tool import PythonTool

PROGRAM = "import time\\ntime.sleep(0.1)\\nprint({} % 997)"


def vowels(text):
    """Return about the share of vowels and digits, which a random model can raise; never 1."""
    return sum(letter in "aeiou0123456789" for letter in text) / (len(text) + 1)


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return vowels(solution_str)


def number_of(text):
    return sum(map(ord, text))


def call_of(name, argument, value):
    function = {"name": name, "arguments": {argument: value}}
    return {"content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


class Seeded:
    """Asks two or three times, and answers with random numbers."""

    def __init__(self, seed):
        self.random, self.num_turns, self.said = random.Random(seed), 0, ""

    async def reset(self, row):
        self.most = 2 + self.random.randrange(2)
        return row["messages"], None

    async def step(self, action):
        await asyncio.sleep(0.02)
        self.num_turns, self.said = self.num_turns + 1, self.said + action["content"]
        return [{"role": "user", "content": str(self.random.randrange(100))}], self.num_turns == self.most

    async def reward(self, trajectory):
        return vowels(self.said)


class Calculating(Calculator):
    """Computes with what the model has written, whatever that is."""

    said = ""

    async def step(self, action):
        if self.said.count("|") == 2:
            return [], True
        self.said += action["content"] + "|"
        return await super().step(call_of("calculator", "expression", f"{number_of(action['content'])} * 3"))

    async def reward(self, trajectory):
        return vowels(self.said)


class Programming(PythonTool):
    """Runs a program in a sandbox after each turn but the last."""

    said = ""

    async def step(self, action):
        if self.said.count("|") == 2:
            return [], True
        self.said += action["content"] + "|"
        return await super().step(call_of("python", "code", PROGRAM.format(number_of(action["content"]))))

    async def reward(self, trajectory):
        return vowels(self.said)
'''
SETTINGS: dict[str, Any] = {
    "training__num_steps": NUM_STEPS,
    "training__global_batch_size": NUM_GROUPS * GROUP_SIZE,
    "rollout__rollout_batch_size": NUM_GROUPS,
    "rollout__num_samples_per_prompt": GROUP_SIZE,
    "rollout__max_response_tokens": 24,
    "rollout__fp8": "false",
    "trainer__save_interval": 3,
    "optimizer__lr": 1e-3,
    "engine__num_engines": 2,
    "data__reward": "OWN:compute_score",
}
EPISODES = {
    "data__environment": "OWN:Seeded",
    "data__reward": "environment",
    "rollout__max_response_tokens": 48,
    "environment__max_turn_tokens": 8,
    "reward__max_failure_share": 1,
}
# Each response is a batch of its own, so that its bits do not depend on what else runs.
ALONE = {"engine__max_running_requests": 1}
SYNCHRONOUS = {"rollout__max_staleness": 0, "algorithm__preset": "grpo", **EPISODES, **ALONE}
TWO_RANKS = {"hardware__gpus_per_node": 2, "parallel__pipeline_model_parallel_size": 2}
TURNS = {"engine__sleep": "always"}
AGENTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "seeded": ({}, (RANK, ENGINE)),
    "seeded, engines and trainer in turn": (TURNS, (RANK, ENGINE)),
    "calculator, two ranks": ({"data__environment": "OWN:Calculating", **TWO_RANKS}, (RANK, ENGINE)),
    "python": ({"data__environment": "OWN:Programming"}, (RANK, ENGINE)),
    "python, workers and sandboxes": ({"data__environment": "OWN:Programming"}, (RANK, ENGINE, WORKER, SANDBOX)),
    "served": ({"data__environment": "SERVED"}, (RANK, ENGINE, SERVER, WORKER)),
}
JOBS = ("driver of training", "processes of training")
KILLS_PER_TEST = NUM_AGENT_KILLS / (len(AGENTS) + len(JOBS))
SAMPLING = {"rollout__dynamic_sampling": "true", "rollout__max_oversampling": 2}
TAIL = {"rollout__tail_fraction": 0.67, "rollout__on_new_weights": "abort", **TURNS}
AHEAD: dict[str, dict[str, Any]] = {
    **{
        f"{mode}, staleness {bound}": {"rollout__on_new_weights": mode, "rollout__max_staleness": bound}
        for mode in ("recompute", "keep", "finish", "abort")
        for bound in (1, 4)
    },
    **{
        f"{mode}, staleness {bound}, episodes": {"rollout__on_new_weights": mode, "rollout__max_staleness": bound}
        | EPISODES
        for mode, bound in (("recompute", 4), ("keep", 1), ("finish", 4), ("abort", 1))
    },
    "recompute, staleness 4, dynamic sampling": {"rollout__max_staleness": 4, **SAMPLING},
    "abort, staleness 1, dynamic sampling, episodes": {
        "rollout__on_new_weights": "abort",
        "rollout__max_staleness": 1,
        **SAMPLING,
        **EPISODES,
    },
    "tail, staleness 1": {"rollout__max_staleness": 1, **TAIL},
    "tail, staleness 4": {"rollout__max_staleness": 4, **TAIL},
    "tail, staleness 4, episodes": {"rollout__max_staleness": 4, **TAIL, **EPISODES},
}


def prepare_run(folder: Path, settings: dict[str, Any], port: int = 0) -> list[str]:
    """Make a training's folder; returns the arguments of the server of its environment, if it has one."""
    own = folder.parent / "own.py"
    own.write_text(OWN)
    places = {"OWN": str(own), "SERVED": f"http://127.0.0.1:{port}"}
    words = {key: str(value) for key, value in (SETTINGS | settings).items()}
    for name, place in places.items():
        words = {key: value.replace(name, place) for key, value in words.items()}
    config = prepare(folder, **words)
    tokenizer = make_tokenizer(config.model.architecture.max_position_embeddings)
    stops = {"eos_token_id": tokenizer.convert_tokens_to_ids([*STOP_TOKENS])}
    (folder / "hf/generation_config.json").write_text(json.dumps(stops))
    return [f"{own}:Seeded", "--num-workers", "2"] if "SERVED" in map(str, settings.values()) else []


def train_through(training: KilledTraining, num_kills: int, promises: Promises | None = None) -> None:
    """Train to the end, with at most so many kills on the way."""
    with training.servers():
        while not training.attempt(num_kills - training.kills.total()):
            if promises:
                promises.note_files()


def steps_of(folder: Path, run: str = RUN) -> list[list[TrajectoryGroup]]:
    """Return the groups that each step was trained on."""
    store = QueueStore(folder / run / "rollouts")
    assert len(rows_of(folder, run)) == NUM_STEPS
    return [store.read_step(step, NUM_GROUPS) for step in range(NUM_STEPS)]


def assert_same_state(first: Path, second: Path) -> None:
    """Both trainings have the same bits in the end: weights, main weights and moments."""
    last = f"checkpoints/step_{NUM_STEPS:06d}"
    ours, theirs = TorchDistReader(first / last), TorchDistReader(second / last)
    assert ours.keys == theirs.keys
    assert any("exp_avg_sq" in key for key in ours.keys)
    assert not [key for key in ours.keys if not torch.equal(ours.read(key), theirs.read(key))]


def check_trained_as_recorded(folder: Path) -> None:
    """A training on the recorded groups, without engines, has the same weights: each was trained on once, whole."""
    (folder / "again").mkdir()
    (folder / "again/rollouts").symlink_to(folder / RUN / "rollouts")
    num_ranks = 2 if "pipeline_model_parallel_size: 2" in (folder / "config.yaml").read_text() else 1
    for rank in start_ranks(folder, "again", [], count=num_ranks):
        finish(rank)
    assert_same_state(folder / RUN, folder / "again")


def content_of(one: Trajectory) -> Trajectory:
    """Return a trajectory without timings."""
    return dataclasses.replace(one, parts={key: x for key, x in one.parts.items() if not key.startswith("perf/")})


def check_same_as(calm: list[list[TrajectoryGroup]], killed: list[list[TrajectoryGroup]]) -> int:
    """Compare what was trained on, up to the step of the first trajectory that a killed environment has failed.

    Returns:
        How many trajectories have failed.
    """
    num_failed = 0
    for ours, theirs in zip(killed, calm, strict=True):
        expected = {group.position: group for group in theirs}
        has_changed = num_failed > 0
        for group in ours:
            for index, one in enumerate(group.trajectories):
                check_whole(one)
                num_failed += bool(one.failure)
                if not has_changed and not one.failure and group.position in expected:
                    assert content_of(one) == content_of(expected[group.position].trajectories[index])
        if {*expected} != {group.position for group in ours}:
            num_failed += 1
    return num_failed


def counted(count: Count, name: str, faults: FaultRecord, began: float) -> None:
    kills = sum((Counter(row["kills"]) for row in count.rows), Counter[str]())
    by_target = {f"{name}: {target}": times for target, times in kills.items()}
    faults.add_counts("kills", by_target, time.monotonic() - began)
    faults.equal = True


def row_of(training: KilledTraining) -> dict[str, Any]:
    return {"kills": training.kills, "phases": training.phases, "attempts": training.num_attempts}


def num_kills(count: Count) -> int:
    return sum(sum(row["kills"].values()) for row in count.rows)


@pytest.mark.faults("agents")
@pytest.mark.parametrize("name", list(AGENTS))
def test_agents_are_trained_the_same_after_kills(name: str, count: Count, tmp_path: Path, faults: FaultRecord) -> None:
    settings, targets = AGENTS[name]
    began, num_ranks = time.monotonic(), 2 if "two ranks" in name else 1
    (port,) = choose_free_ports(1)
    served = prepare_run(tmp_path / "calm", SYNCHRONOUS | settings, port)
    train_through(KilledTraining(tmp_path / "calm", random.Random(0), (), num_ranks, served, port), 0)
    calm = steps_of(tmp_path / "calm")
    assert any(torch.tensor([one.reward for one in group.trajectories]).std() > 0 for group in calm[0])
    while (left := KILLS_PER_TEST - num_kills(count)) > 0:
        number = len(count.rows)
        folder, chance = tmp_path / f"run_{number}", random.Random(f"{name} {number}")
        served = prepare_run(folder, SYNCHRONOUS | settings, port)
        training = KilledTraining(folder, chance, targets, num_ranks, served, port)
        train_through(training, min(KILLS_PER_TRAINING, max(1, round(left))))
        num_failed = check_same_as(calm, steps_of(folder))
        if not {WORKER, SANDBOX, SERVER} & {*training.kills}:
            assert not num_failed, "nothing has failed"
        if not num_failed:
            assert_same_state(tmp_path / "calm" / RUN, folder / RUN)
        check_trained_as_recorded(folder)
        count.add([row_of(training) | {"failed": num_failed}])
    counted(count, name, faults, began)


def disturb_job(workflow: WorkflowFolder, whom: str, chance: random.Random, most: int) -> list[Kill]:
    """Train to the end, with at most so many kills on the way."""
    kills, began = list[Kill](), time.monotonic()
    while True:
        driver = start(workflow, "train")
        while not ended_before_kill(driver, chance, is_calm=len(kills) == most):
            seconds = time.monotonic() - began
            if whom.startswith("driver"):
                driver.end(signal.SIGKILL)
                kills.append(Kill("driver", seconds))
            elif role := kill_one_of(workflow, chance):
                kills.append(Kill(role, seconds))
        if driver.process.returncode == 0:
            return kills
        assert_gone(workflow, IMPORT_SECONDS)
        check_claims(workflow)
        assert "Traceback" not in driver.output, driver.output[-4000:]


def ended_before_kill(driver: Driver, chance: random.Random, is_calm: bool) -> bool:
    """Wait for a random moment, mostly one after the first step of an attempt; returns whether the driver has ended."""
    results, moment = driver.workflow.results, chance.uniform(0, MOST_SECONDS)
    if is_calm:
        return wait_or_end(driver, math.inf)
    if chance.random() > EARLY_SHARE:
        before = num_begun(results)
        while num_begun(results) == before and not wait_or_end(driver, 0.02):
            pass
    return wait_or_end(driver, moment)


def num_begun(results: Path) -> int:
    """Return how many attempts have loaded their weights."""
    logs = [path.read_text(errors="replace") for path in results.glob("*/train/attempts/*/trainer0.log")]
    return sum("engines were ready" in log for log in logs)


@pytest.fixture(scope="module")
def calm_job(store: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkflowFolder:
    """A training of the workflow, with an environment, that nobody disturbs."""
    folder = tmp_path_factory.mktemp("calm")
    (folder / "own.py").write_text(OWN)
    settings = FAST | {key.replace("__", "."): str(value) for key, value in (EPISODES | ALONE).items()}
    settings |= {"data.environment": f"{folder / 'own.py'}:Seeded", "training.num_steps": NUM_STEPS}
    calm = WorkflowFolder(folder / "work", store, settings)
    calm.run("train", timeout=900)
    return calm


@pytest.mark.faults("agents")
@pytest.mark.parametrize("whom", JOBS)
def test_agents_of_a_whole_job_are_trained_the_same(
    whom: str, calm_job: WorkflowFolder, count: Count, tmp_path: Path, faults: FaultRecord
) -> None:
    """The driver, and what it starts: the head, its node, the rank and the engine."""
    began = time.monotonic()
    while (left := math.ceil(KILLS_PER_TEST - len(count.rows))) > 0:
        number = len(count.rows)
        workflow = WorkflowFolder(tmp_path / f"run_{number}", calm_job.store, calm_job.settings)
        kills = disturb_job(workflow, whom, random.Random(f"{whom} {number}"), left)
        assert_same_training(workflow, calm_job)
        count.add(dataclasses.asdict(kill) for kill in kills)
    faults.add(f"{whom}, an agent", [Kill(**row) for row in count.rows], time.monotonic() - began)
    faults.equal = True


@pytest.mark.faults("ahead")
@pytest.mark.parametrize("name", list(AHEAD))
def test_what_engines_that_run_ahead_promise(name: str, count: Count, tmp_path: Path, faults: FaultRecord) -> None:
    settings, began = AHEAD[name], time.monotonic()
    has_episodes, may_drop = "data__environment" in settings, "rollout__dynamic_sampling" in settings
    targets = (RANK, ENGINE, WORKER) if has_episodes else (RANK, ENGINE)
    while (left := NUM_AHEAD_KILLS / len(AHEAD) - num_kills(count)) > 0:
        number = len(count.rows)
        folder, chance = tmp_path / f"run_{number}", random.Random(f"{name} {number}")
        prepare_run(folder, settings)
        training, promises = (
            KilledTraining(folder, chance, targets),
            Promises(folder / RUN, NUM_STEPS, (NUM_GROUPS, GROUP_SIZE)),
        )
        train_through(training, min(KILLS_PER_TRAINING, max(1, round(left))), promises)
        promises.check(steps_of(folder), settings["rollout__max_staleness"], may_drop or has_episodes)
        check_trained_as_recorded(folder)
        count.add([row_of(training)])
    counted(count, name, faults, began)
