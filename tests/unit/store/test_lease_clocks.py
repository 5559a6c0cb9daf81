"""Leases where clocks are wrong: they are set, or differ between machines."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
from tests.support.lease_holders import elsewhere, plant

from posttrain.store import lease as lease_module
from posttrain.store.lease import Lease, LeaseHeldError, check_epoch


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats every hundredth of a second."""
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)


HOURS = 3 * 3600.0


def hold_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Lease:
    """Take a lease as a process on another host does; its heart beats in this one."""
    with monkeypatch.context() as there:
        there.setattr(lease_module.socket, "gethostname", lambda: "elsewhere")
        return Lease(folder, folder / "lease").__enter__()


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = time.time
    monkeypatch.setattr(lease_module.time, "time", lambda: real() + seconds)


@pytest.mark.parametrize("jump", [-HOURS, HOURS])
def test_a_clock_that_is_set_takes_the_lease_from_nobody_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, jump: float
) -> None:
    holder = hold_elsewhere(tmp_path, monkeypatch)
    set_clock(monkeypatch, jump)
    with pytest.raises(LeaseHeldError, match=r"is being written by .* on elsewhere"):
        Lease(tmp_path, tmp_path / "lease").__enter__()
    check_epoch(holder.folder, 1)
    when = "in the future" if jump < 0 else "ago"
    assert f"{when}; watching for another" in caplog.text
    holder.__exit__(None, None, None)
    with Lease(tmp_path, tmp_path / "lease") as second:
        assert second.epoch == 2


@pytest.mark.parametrize("age", [-HOURS, 0.0, HOURS])
def test_a_dead_holder_keeps_nobody_out_for_long_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float
) -> None:
    """Of several that wait for its end exactly one follows it."""
    monkeypatch.setattr(lease_module, "WATCH_SECONDS", 0.5)
    monkeypatch.setattr(lease_module, "HEARTBEAT_DEAD_SECONDS", 1.0)
    plant(tmp_path / "lease", elsewhere(), heartbeat_unix=time.time() - age)
    begun, epochs = time.monotonic(), []

    def follow(job: str) -> None:
        with contextlib.suppress(LeaseHeldError):
            epochs.append(Lease(tmp_path, tmp_path / "lease", job, wait_seconds=1.5).__enter__().epoch)

    waiting = [threading.Thread(target=follow, args=(f"job:{number}",)) for number in range(4)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(30)
    assert epochs == [2]
    assert time.monotonic() - begun >= 0.5
