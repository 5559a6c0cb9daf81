"""Full fault counts: every rule, the driver and training killed at random times, 20 times each (`make test-faults`).

After each kill the same command is given again; what comes out in the end is compared with the undisturbed run. Results
go to `.test-results/faults.json`. `POSTTRAIN_FAULT_KILLS` sets another number of kills. A count that was interrupted
goes on where it was, with the same files.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.end_to_end.test_engines_apart import APART
from tests.end_to_end.test_kubernetes import folder_of_pods
from tests.support.fault_parts import Count
from tests.support.fault_record import FaultRecord
from tests.support.interruptions import (
    ENGINE,
    NODE,
    NUM_JOBS,
    OUTPUTS,
    SUPERVISOR,
    TRAINER,
    Kill,
    assert_gone,
    assert_same_training,
    check_claims,
    files_made,
    find_processes,
    finished_jobs,
    kill_at_times,
    seconds_by_rule,
    start,
    wait_or_end,
)
from tests.support.kubernetes_server import KubernetesServer
from tests.support.workflow_runs import FAST, WorkflowFolder

pytestmark = [pytest.mark.timeout(3600)]

NUM_KILLS = int(os.environ.get("POSTTRAIN_FAULT_KILLS", "20"))
SEED = 20
# Long enough for training, the longest step, to get somewhere; short enough that kills hit every part of the chain.
DRIVER_SECONDS = 10.0
# A step that is still importing when its driver dies has not written yet, and ends when it would begin.
IMPORT_SECONDS = 30.0
# What to ask for where a rule's own name is no target, because it has several jobs.
TARGETS = {
    "download_hf_checkpoint": "finalize_hf_checkpoint",
    "convert_hf_to_torch_dist": "finalize_torch_dist",
    "quantize": "finalize_rollout_fp8",
    "finalize_quantized": "finalize_rollout_fp8",
    "stage_to_node_local": "stage_all_nodes",
    "export_hf": "finalize_export_hf",
    "evaluate": "render_report",
}
# Rules whose jobs another one joins.
JOINED = {rule: target for rule, target in TARGETS.items() if target in OUTPUTS} | {"quantize": "finalize_quantized"}
# What is made in two steps when it is asked for -> what its folder's name begins with.
ON_DEMAND = {"finalize_serving": "nvfp4", "finalize_bf16": "bf16"}


@pytest.fixture(scope="module")
def usual_seconds(undisturbed: WorkflowFolder) -> dict[str, float]:
    """How long each rule takes when nobody disturbs it."""
    return seconds_by_rule(undisturbed.store.parent / "first/logs") | seconds_by_rule(undisturbed.folder / "logs")


@pytest.mark.faults("kills")
def test_every_rule(
    undisturbed: WorkflowFolder, usual_seconds: dict[str, float], count: Count, faults: FaultRecord
) -> None:
    workflow = WorkflowFolder(count.folder / "work", count.folder / "store")
    for rule in OUTPUTS:
        counted = {row["rule"]: row for row in count.rows}
        if rule not in counted:
            started = time.monotonic()
            # Snakemake does not make a file anew that is missing where what was made of it is there.
            outputs = [*OUTPUTS[rule], *OUTPUTS.get(JOINED.get(rule, ""), [])]
            kills = kill_rule(workflow, rule, outputs, random.Random(f"{SEED} {rule}"), usual_seconds[rule])
            assert check_claims(workflow)
            row = {"rule": rule, "kills": [dataclasses.asdict(kill) for kill in kills]}
            count.add([counted.setdefault(rule, row | {"seconds": time.monotonic() - started})])
        row = counted[rule]
        faults.add(rule, [Kill(**kill) for kill in row["kills"]], row["seconds"])
    workflow.run("all")
    assert files_made(workflow).items() <= files_made(undisturbed).items()
    assert_same_training(workflow, undisturbed)
    assert workflow.summary["final_weights_sha256"] == undisturbed.summary["final_weights_sha256"]
    faults.equal = True


@pytest.mark.faults("kills")
@pytest.mark.parametrize("target", ON_DEMAND)
def test_steps_on_demand(undisturbed: WorkflowFolder, target: str, tmp_path: Path, faults: FaultRecord) -> None:
    settings, folder = dict(undisturbed.settings), f"tiny/*/{ON_DEMAND[target]}"
    if target == "finalize_bf16":
        (fp8,) = undisturbed.store.glob("tiny/*/rollout_fp8-????????")
        settings |= {"model.source.kind": "folder", "model.source.folder": fp8}
    calm = WorkflowFolder(tmp_path / "calm", tmp_path / "calm_store", settings)
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store", settings)
    for store in (calm.store, workflow.store):
        shutil.copytree(undisturbed.store / "made", store / "made")
    calm.run(target)
    usual_seconds = seconds_by_rule(calm.folder / "logs")
    rng = random.Random(SEED)
    whole = f"{folder}-????????.receipt.json"
    for rule, outputs in (("quantize", [f"{folder}-*.parts/*.receipt.json", whole]), ("finalize_quantized", [whole])):
        started = time.monotonic()
        kills = kill_rule(workflow, rule, outputs, rng, usual_seconds[rule], target)
        faults.add(f"{rule} of {target}", kills, time.monotonic() - started)
    assert files_made(workflow) == files_made(calm)
    assert check_claims(workflow) == len(files_made(calm))
    faults.equal = True


@pytest.fixture
def training(place: str, undisturbed: WorkflowFolder, tmp_path: Path) -> Iterator[WorkflowFolder]:
    """A training whose engine stays awake beside the trainer, sleeps while it works, or has a node of its own."""
    if place == "apart":
        with KubernetesServer(tmp_path) as server:
            yield folder_of_pods(server, undisturbed.store, APART, nodes=2)
    else:
        sleep = {"engine.sleep": "always" if place == "colocated" else "never"}
        yield WorkflowFolder(tmp_path / "work", undisturbed.store, FAST | sleep)


@pytest.mark.faults("training")
@pytest.mark.parametrize("place", ["beside", "colocated", "apart"])
@pytest.mark.parametrize("whom", ["driver of training", "processes of training"])
def test_training(
    training: WorkflowFolder,
    place: str,
    undisturbed: WorkflowFolder,
    usual_seconds: dict[str, float],
    whom: str,
    count: Count,
    faults: FaultRecord,
) -> None:
    """As many trainings as it takes; each is compared with the undisturbed one."""
    started = time.monotonic()
    while len(count.rows) < NUM_KILLS:
        shutil.rmtree(training.folder, ignore_errors=True)
        rng = random.Random(f"{SEED} {len(count.rows)}")
        most = NUM_KILLS - len(count.rows)
        kills = disturb_training(training, whom, rng, usual_seconds["train"], most)
        assert_same_training(training, undisturbed)
        count.add(dataclasses.asdict(kill) for kill in kills)
    faults.add(f"{whom}, engines {place}", [Kill(**row) for row in count.rows], time.monotonic() - started)
    faults.equal = True


@pytest.mark.faults("training")
def test_driver_of_the_whole_chain(undisturbed: WorkflowFolder, tmp_path: Path, faults: FaultRecord) -> None:
    """From the model to the report; a step that has finished is not done again."""
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store")
    shutil.copytree(undisturbed.store / "made", workflow.store / "made")
    rng, started = random.Random(SEED), time.monotonic()
    kills: list[Kill] = []
    driver = start(workflow)
    while not wait_or_end(driver, seconds := rng.uniform(0, DRIVER_SECONDS) if len(kills) < NUM_KILLS else math.inf):
        driver.end(signal.SIGKILL)
        kills.append(Kill("driver", seconds))
        assert_gone(workflow, IMPORT_SECONDS)
        check_claims(workflow)
        driver = start(workflow)
    faults.add("driver of the whole chain", kills, time.monotonic() - started)
    assert driver.process.returncode == 0, driver.output[-4000:]
    finished = finished_jobs(workflow)
    assert finished == {rule: NUM_JOBS.get(rule, 1) for rule in finished}
    assert files_made(workflow).items() <= files_made(undisturbed).items()
    assert_same_training(workflow, undisturbed)
    faults.equal = True


def kill_rule(
    workflow: WorkflowFolder, rule: str, outputs: list[str], rng: random.Random, length: float, target: str = ""
) -> list[Kill]:
    """Run the chain up to a rule, its script killed at random times; where too few hit, the rule is done again."""
    target = target or TARGETS.get(rule, rule)
    kills: list[Kill] = []
    while len(kills) < NUM_KILLS:
        for root in (workflow.store, workflow.results):
            for output in {path for pattern in outputs for path in root.glob(pattern)}:
                output.unlink()
        points = {rule: [rng.uniform(0, length) for _ in range(NUM_KILLS - len(kills))]}
        kills += kill_at_times(workflow, points, target)
    return kills


def disturb_training(workflow: WorkflowFolder, whom: str, rng: random.Random, length: float, most: int) -> list[Kill]:
    """Train to the end, with at most so many kills on the way."""
    kills: list[Kill] = []
    while True:
        driver = start(workflow, "train")
        while not wait_or_end(driver, rng.uniform(0, length) if len(kills) < most else math.inf):
            seconds = time.time() - psutil.Process(driver.process.pid).create_time()
            if whom.startswith("driver"):
                driver.end(signal.SIGKILL)
                kills.append(Kill("driver", seconds))
            elif role := kill_one_of(workflow, rng):
                kills.append(Kill(role, seconds))
        if driver.process.returncode == 0:
            return kills
        assert_gone(workflow, IMPORT_SECONDS)
        check_claims(workflow)
        assert "Traceback" not in driver.output, driver.output[-4000:]


def kill_one_of(workflow: WorkflowFolder, rng: random.Random) -> str:
    """Kill a process of training; returns its role, empty when there is none."""
    living = {role: find_processes(workflow, role) for role in (SUPERVISOR, NODE, TRAINER, ENGINE)}
    roles = [role for role, processes in living.items() if processes]
    if not roles:
        return ""
    role = rng.choice(roles)
    try:
        rng.choice(living[role]).kill()
    except psutil.NoSuchProcess:
        return ""
    return role
