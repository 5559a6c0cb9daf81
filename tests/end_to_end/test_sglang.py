"""GRPO with a real SGLang server: the same client, the same trainer, weight updates included.

SGLang on a CPU cannot serve sparse attention, so the model is of the DeepSeek-V3 class: MLA, experts, no indexer. Its
weights are random, and it learns from the reward alone to answer with one given digit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.support.fault_parts import Count
from tests.support.interruptions import Driver, assert_gone, assert_same_training, attempts_of, find_processes, start
from tests.support.listening import assert_all_known, watched_sockets
from tests.support.plain_routes import share_of_others
from tests.support.sglang_environment import PYTHON, require_mooncake, require_sglang
from tests.support.tiny_checkpoint import TINY_DEEPSEEK, TINY_GLM4_MOE, TINY_QWEN3, make_random_checkpoint
from tests.support.workflow_runs import FAST, WorkflowFolder

from posttrain.cluster.processes import GRACE_SECONDS, ORPHAN_SECONDS
from posttrain.config.schema import Architecture
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.rl.rollout.rollout_store import RolloutStore

ARCHITECTURE = dataclasses.replace(TINY_DEEPSEEK, rms_norm_eps=1e-6, num_nextn_predict_layers=0)
ARCHITECTURES = {
    "deepseek": ARCHITECTURE,
    "glm4_moe": dataclasses.replace(TINY_GLM4_MOE, num_nextn_predict_layers=0),
    "qwen3": TINY_QWEN3,
}

SERVER = "sglang_server.py"
TWO_ENGINES = {
    "engine.num_engines": 2,
    "engine.groups_per_request": 1,
    "engine.sleep": "always",
    "rollout.max_response_tokens": 32,
    "algorithm.zero_advantages": "update",
}
NUM_FAULTS, NUM_STEPS = 20, 9
# Responses so long that new weights find some of them half done.
AHEAD = {
    "engine.num_engines": 2,
    "rollout.max_staleness": 1,
    "algorithm.preset": "tis",
    "rollout.num_samples_per_prompt": 16,
    "rollout.max_response_tokens": 16,
    "training.global_batch_size": 128,
    "training.num_steps": 12,
    "trainer.mismatch_interval": 1,
    "trainer.save_interval": 12,
    "logging.keep_rollouts": "true",
    "reward.min_own_label": 0,
}
SEVENS = """def share(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count(ground_truth) / 16
"""
# Of one rank, with the one in which weights go to the engine.
GLOO_GROUPS = 25 + 1

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


@pytest.fixture(autouse=True)
def environment() -> None:
    require_sglang()


@pytest.fixture
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return getattr(request, "param", ARCHITECTURE)


@pytest.fixture
def model(tmp_path: Path, architecture: Architecture) -> Path:
    from posttrain.checkpoint.tiny.tokenizer import make_tokenizer

    folder = tmp_path / "model"
    make_random_checkpoint(folder, architecture, seed=1)
    make_tokenizer(architecture.max_position_embeddings).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    # What SGLang asks of this class and transformers does not write.
    config |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> dict[str, Path]:
    files = {"train_file": tmp_path / "train.jsonl", "heldout_file": tmp_path / "heldout.jsonl"}
    for offset, path in enumerate(files.values()):
        rows = ({"prompt": f"{i + 1000 * offset:04d}", "label": "7"} for i in range(64))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


@pytest.fixture
def settings(model: Path, prompts: dict[str, Path], architecture: Architecture) -> dict[str, object]:
    return {
        **FAST,
        # Where it is of another kind than `tiny`; a group of keys has the defaults there too.
        **{
            f"model.architecture.{key}": value
            for key, value in dataclasses.asdict(architecture).items()
            if not isinstance(value, dict)
        },
        **{f"data.{key}": path for key, path in prompts.items()},
        "model.source.kind": "folder",
        "model.source.folder": model,
        "data.kind": "jsonl",
        "rollout.fp8": "false",
        "rollout.rollout_batch_size": 8,
        "rollout.num_samples_per_prompt": 32,
        "rollout.max_response_tokens": 1,
        "training.global_batch_size": 256,
        "training.num_steps": 10,
        "trainer.save_interval": 10,
        "optimizer.lr": 1e-2,
        "engine.kind": "sglang",
        "engine.python": PYTHON,
        "engine.num_threads": 1,
        "engine.groups_per_request": 8,
    }


# A model is converted, a real SGLang starts, and ten steps are trained.
@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.faults("slow"))])
def test_grpo_learns_with_a_real_sglang_server(tmp_path: Path, settings: dict[str, object], is_killed: bool) -> None:
    """Also when it is killed on the way: the engine that starts then has no weights but what training sends it.

    Engine and trainer take turns, and tokens go to the engine's experts. Meanwhile another user tries every socket,
    those of SGLang's own processes too.
    """
    settings |= {"trainer.save_interval": 3, "engine.sleep": "always"}
    settings |= {"algorithm.routing_replay": "true", "logging.keep_rollouts": "true"}
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store", settings)
    starts = 1 + is_killed
    with watched_sockets(workflow) as found:
        if is_killed:
            kill_at(workflow, "checkpoints/step_000003")
        finish_without_weights(workflow, starts)
    assert_no_secret(workflow, starts)

    rows = workflow.metrics()
    assert [row["step"] for row in rows] == list(range(1, 11))
    for row in (rows[0], rows[-1]):
        assert row["mismatch/abs_diff_mean"] <= 1e-3, "trainer against SGLang on the very weights served"
        assert row["train/first_update_ratio_max_abs_deviation"] == 0.0
    rewards = [row["rollout/reward_mean"] for row in rows]
    assert rewards[0] < 0.1 < 0.5 < rewards[-1], f"the reward does not rise: {rewards}"
    groups = RolloutStore(workflow.run_folder / "train/rollouts").read_step(0, 8)
    assert share_of_others(Path(str(settings["model.source.folder"])), groups) <= 1e-3, "routers as they are"
    assert_all_known(found, starts * GLOO_GROUPS)
    assert {"sglang_server.py", "sglang::scheduler"} <= {at.program for at in found}


@pytest.mark.faults("slow")
def test_a_resumed_run_starts_sglang_without_weights_and_has_the_same_bits(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    settings |= {"training.num_steps": 3, "trainer.save_interval": 1, "rollout.max_response_tokens": 1}
    straight, killed = (WorkflowFolder(tmp_path / name, tmp_path / "store", dict(settings)) for name in ("one", "two"))
    straight.run("train", timeout=420)
    killed.settings |= {"engine.sleep": "always"}  # the same bits, too
    kill_at(killed, "checkpoints/step_000001")
    finish_without_weights(killed, starts=2)
    assert_same_training(killed, straight)


@pytest.mark.faults("slow")
@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES, indirect=True)
def test_classes_learn_in_bf16_with_two_engines(
    tmp_path: Path, settings: dict[str, object], architecture: Architecture
) -> None:
    """10,000 tokens and more, over 20 updates and more: trainer beside engine, until one answer has over 0.9.

    The entropy of its one token is below half of ln V then.
    """
    settings |= {"training.num_steps": 45, "trainer.save_interval": 45, "engine.num_engines": 2}
    settings |= {"trainer.params_dtype": "bf16", "engine.dtype": "bfloat16"}
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store", settings)
    workflow.run("train", timeout=900)
    rows = workflow.metrics()
    assert rows[-1]["rollout/reward_mean"] > 0.9
    compared = [row["mismatch/abs_diff_mean"] for row in rows if "mismatch/abs_diff_mean" in row]
    assert len(compared) > 1
    assert max(compared) <= 5e-3


@pytest.mark.faults("slow")
@pytest.mark.parametrize("mode", ["recompute", "keep", "abort", "finish"])
def test_grpo_learns_with_two_engines_that_run_ahead(tmp_path: Path, settings: dict[str, object], mode: str) -> None:
    """What happens to running requests when new weights come does not keep the reward from rising."""
    workflow = WorkflowFolder(tmp_path / "work", tmp_path / "store", settings | AHEAD)
    workflow.settings["rollout.on_new_weights"] = mode
    workflow.settings["data.reward"] = f"{tmp_path / 'sevens.py'}:share"
    (tmp_path / "sevens.py").write_text(SEVENS)
    workflow.run("train", timeout=900)
    rows = workflow.metrics()
    rewards = [row["rollout/reward_mean"] for row in rows]
    assert rewards[0] < 0.1 < 0.5 < rewards[-1], f"the reward does not rise: {rewards}"
    compared = [row["mismatch/abs_diff_mean"] for row in rows if "mismatch/abs_diff_mean" in row]
    # With "finish" every step but the first trains on tokens of the weights before.
    assert len(compared) > (mode != "finish")
    assert max(compared) <= 1e-5, "trainer against SGLang, on tokens of the very weights served"
    store = QueueStore(workflow.run_folder / "train/rollouts")
    ages, num_versions = set[int](), set[int]()
    for step in range(len(rows)):
        for one in (one for group in store.read_step(step, 8) for one in group.trajectories):
            ages |= {step - span.version for span in one.versions}
            num_versions.add(len(one.versions))
    assert ages == {0, 1}
    assert (max(num_versions) > 1) == (mode != "finish")


@pytest.mark.faults("slow")
def test_an_engine_that_ends_in_a_rollout_is_replaced(tmp_path: Path, settings: dict[str, object]) -> None:
    """One of two; the other one meets the trainer again, too, in another group, and the run has the same bits."""
    settings |= TWO_ENGINES | {"training.num_steps": 3}
    straight, hit = (WorkflowFolder(tmp_path / name, tmp_path / "store", dict(settings)) for name in ("one", "two"))
    straight.run("train", timeout=420)
    driver = start(hit, "train")
    driver.wait_until(lambda: len(find_processes(hit, SERVER)) == 2)
    server, first_step = find_processes(hit, SERVER)[0], hit.run_folder / "train/metrics.jsonl"
    while not first_step.exists() and driver.process.poll() is None:
        time.sleep(0.001)
    time.sleep(0.5)  # the second rollout takes longer, and all of it is answered at once
    server.send_signal(signal.SIGKILL)
    assert driver.finish(420)[0] == 0, driver.output[-4000:]
    assert_same_training(hit, straight)
    assert [attempt["reason"] for attempt in attempts_of(hit)] == ["done"]


@pytest.mark.faults("rollouts")
@pytest.mark.timeout(3600)
def test_sglang_engines_that_end_again_and_again(tmp_path: Path, settings: dict[str, object], count: Count) -> None:
    """One of two in every rollout but the first; one that is hit behind it ends the attempt, and does not count."""
    settings |= TWO_ENGINES | {"training.num_steps": NUM_STEPS, "trainer.save_interval": 1}
    settings |= {"launch.max_idle_attempts": 20}
    straight = WorkflowFolder(tmp_path / "straight", tmp_path / "store", dict(settings))
    straight.run("train", timeout=900)
    while sum(row["replaced"] for row in count.rows) < NUM_FAULTS:
        number = len(count.rows)
        run, chance = WorkflowFolder(tmp_path / f"run_{number}", tmp_path / "store", settings), random.Random(number)
        driver = start(run, "train")
        for step in range(1, NUM_STEPS):
            wait_for_step(driver, step)
            time.sleep(chance.uniform(0.2, 0.8))
            with contextlib.suppress(psutil.NoSuchProcess):
                chance.choice(find_processes(run, SERVER)).send_signal(signal.SIGKILL)
        assert driver.finish(900)[0] == 0, driver.output[-4000:]
        assert_same_training(run, straight)
        logs = run.run_folder.glob("train/attempts/*/node-*.log")
        replaced = sum(log.read_text().count("it starts again") for log in logs)
        assert replaced, "nobody was hit within a rollout"
        count.add([{"killed": NUM_STEPS - 1, "replaced": replaced, "attempts": len(attempts_of(run))}])


def wait_for_step(driver: Driver, step: int) -> None:
    """Wait until so many steps are done and both engines are there: the next rollout has begun."""
    run, deadline = driver.workflow, time.monotonic() + 300
    while (
        sum(path.read_bytes().count(b"\n") for path in run.results.glob("*/train/metrics.jsonl")) < step
        or len(find_processes(run, SERVER)) < 2
    ):
        assert driver.process.poll() is None, driver.output[-4000:]
        assert time.monotonic() < deadline, driver.output[-4000:]
        time.sleep(0.01)


@pytest.mark.faults("slow")
@pytest.mark.parametrize("architecture", [TINY_QWEN3, ARCHITECTURE], ids=["qwen3", "deepseek"], indirect=True)
def test_prefill_apart_from_decode_has_the_bits_of_engines_that_do_both(
    tmp_path: Path, settings: dict[str, object], architecture: Architecture
) -> None:
    """Caches go from one process to the other by Mooncake over TCP; all take turns with the trainer."""
    require_mooncake()
    settings |= {"training.num_steps": 3, "rollout.max_response_tokens": 4, "rollout.num_samples_per_prompt": 4}
    settings |= {"training.global_batch_size": 32, "engine.sleep": "always"}
    settings |= {"algorithm.zero_advantages": "update"}  # whatever is answered, each step has other weights
    if architecture.n_routed_experts:  # a prompt's tokens went through the one engine, a response's through the other
        settings |= {"algorithm.routing_replay": "true"}
    apart = {"engine.pd.num_prefill_engines": 1, "engine.pd.gpus_per_prefill_engine": 1}
    one, two = (
        WorkflowFolder(tmp_path / name, tmp_path / "store", settings | more)
        for name, more in (("one", {}), ("two", apart))
    )
    one.run("train", timeout=600)
    with watched_sockets(two) as found:
        two.run("train", timeout=600)
    assert_same_training(two, one)
    assert_all_known(found, GLOO_GROUPS, r"127\.0\.0\.1|0\.0\.0\.0|::")
    everywhere = [at for at in found if at.address in ("0.0.0.0", "::") and at.kind == "tcp"]
    assert {at.program for at in everywhere} == {"sglang::scheduler"}, "Mooncake's, which takes no address"
    logs = [path.read_text() for path in sorted(two.run_folder.glob("train/attempts/001/engine*.log"))]
    assert all(f"'disaggregation_mode': '{role}'" in log for role, log in zip(("decode", "prefill"), logs, strict=True))


def assert_no_secret(workflow: WorkflowFolder, starts: int) -> None:
    """SGLang writes all of its arguments into its log; the one that nobody may see does not show there."""
    logs = [path.read_text() for path in workflow.run_folder.glob("train/attempts/*/engine0.log")]
    assert ["'api_key': '(hidden)'" in log for log in logs] == [True] * starts
    files = [path for path in workflow.run_folder.rglob("*") if path.is_file()]
    assert not [path for path in files if re.search(rb"Bearer [0-9a-f]{16}", path.read_bytes())]


def kill_at(workflow: WorkflowFolder, point: str) -> None:
    """Kill a training when it has reached a point, and delete the node's copy of the weights."""
    driver = start(workflow, "train")
    driver.wait_for_file(point, timeout=900)
    driver.end(signal.SIGKILL)
    # SGLang answers what it has begun, for as long as it is given time, and what it leaves behind gets some more.
    assert_gone(workflow, 2 * GRACE_SECONDS + ORPHAN_SECONDS)
    shutil.rmtree(workflow.folder / "node_local", ignore_errors=True)


def finish_without_weights(workflow: WorkflowFolder, starts: int) -> None:
    """Give the command, once more if it is not the first; no engine reads weights, and none are copied for a resume."""
    driver = start(workflow, "train")
    assert driver.finish(900)[0] == 0, driver.output[-4000:]
    logs = sorted(workflow.run_folder.glob("train/attempts/*/engine0.log"))
    assert ["'load_format': 'dummy'" in log.read_text() for log in logs] == [True] * starts
    assert (workflow.folder / "node_local").exists() == (starts == 1)
