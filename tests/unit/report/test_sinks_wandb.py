import struct
import subprocess
import sys
import textwrap
import time

import pytest
from tests.support.canaries import CANARIES, found_below
from wandb.proto import wandb_internal_pb2

from posttrain.config.schema import Logging
from posttrain.report.sinks import MetricSinks
from posttrain.report.sinks_wandb import stored_run_id

FILE_HEADER_BYTES, BLOCK_BYTES, CHUNK_HEADER = 7, 32768, struct.Struct("<IHB")
FULL, LAST = 1, 4


def read_history(path):
    """Return the history rows of a .wandb file: chunks in 32 KiB blocks, each record a protobuf."""
    data, place, parts, history = path.read_bytes(), FILE_HEADER_BYTES, b"", []
    while place + CHUNK_HEADER.size <= len(data):
        if BLOCK_BYTES - place % BLOCK_BYTES < CHUNK_HEADER.size:
            place += BLOCK_BYTES - place % BLOCK_BYTES
            continue
        _, length, kind = CHUNK_HEADER.unpack_from(data, place)
        parts += data[place + CHUNK_HEADER.size : place + CHUNK_HEADER.size + length]
        place += CHUNK_HEADER.size + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                items = {
                    (item.key or "/".join(item.nested_key)): float(item.value_json) for item in record.history.item
                }
                history.append(items)
    return history


def write_steps(folder, steps, last_step=None):
    with MetricSinks(folder, "my-run", Logging(), last_step=last_step, config={"optimizer": {"lr": 1e-6}}) as sinks:
        for step in steps:
            sinks.log(step, {"train/loss": step / 3, "rollout/reward_mean": step / 10})


@pytest.fixture
def canaries(monkeypatch):
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("canaries")
def test_an_offline_run_holds_each_step_once_also_after_resuming_and_no_secret(tmp_path):
    write_steps(tmp_path, range(1, 8))
    run_id = stored_run_id(tmp_path, "my-run")
    write_steps(tmp_path, range(5, 11), last_step=4)
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 1
    assert stored_run_id(tmp_path, "my-run") == run_id
    history = read_history(runs[0] / f"run-{run_id}.wandb")
    assert [row["_step"] for row in history] == list(range(1, 11))
    assert [row["train/loss"] for row in history] == [step / 3 for step in range(1, 11)]
    assert [row["rollout/reward_mean"] for row in history] == [step / 10 for step in range(1, 11)]
    assert found_below([tmp_path]) == []


def test_starting_it_does_not_hold_up_the_first_step(tmp_path):
    # In a process of its own, so that importing wandb counts.
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from posttrain.config.schema import Logging
        from posttrain.report.sinks import MetricSinks
        started = time.perf_counter()
        sinks = MetricSinks(Path(sys.argv[1]), "my-run", Logging())
        sinks.log(1, {"train/loss": 0.5})
        first_step = time.perf_counter() - started
        sinks.close()
        print(first_step, time.perf_counter() - started)
        """
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True)
    first_step, whole = map(float, done.stdout.split())
    assert first_step < 0.3 * whole
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_the_run_id_is_made_from_the_name_and_then_kept(tmp_path):
    first = stored_run_id(tmp_path / "a", "my-run")
    assert stored_run_id(tmp_path / "b", "my-run") == first
    assert stored_run_id(tmp_path / "c", "other-run") != first
    assert stored_run_id(tmp_path / "a", "renamed") == first


def test_online_without_a_key_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="needs `wandb login`, or WANDB_API_KEY in the environment"):
        MetricSinks(tmp_path, "my-run", Logging(wandb_mode="online"))


def log_until_it_fails(sinks):
    for step in range(1, 200):
        sinks.log(step, {"train/loss": 0.5})
        time.sleep(0.05)


def test_a_failure_in_the_thread_reaches_the_trainer_and_keeps_the_file(tmp_path):
    # The folder of the W&B run cannot be made: a file has its name.
    (tmp_path / "wandb").write_text("in the way")
    sinks = MetricSinks(tmp_path, "my-run", Logging())
    with pytest.raises(RuntimeError, match=r"W&B failed: .*logging\.wandb=false"):
        log_until_it_fails(sinks)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") >= 1
