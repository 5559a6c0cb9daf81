"""What schedulers and drivers do to a training, on a real SLURM: the bits of the undisturbed run."""

from __future__ import annotations

import grp
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.disturbed_run import TWO_RANKS, DisturbedRun
from tests.support.fault_record import FaultRecord
from tests.support.interruptions import assert_same_training, check_claims, start
from tests.support.requirements import require
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_folder import SlurmFolder, as_user
from tests.support.workflow_runs import WorkflowFolder

from posttrain.store.lease import read_holder

pytestmark = [pytest.mark.faults("queue"), pytest.mark.timeout(1800)]

Disturb = Callable[..., DisturbedRun]
ROLLING_OUT = "rollouts/step_000000/chunk_0000.json"
SAVING = "checkpoints/step_000002.partial"


def test_scancel(disturb: Disturb, one_machine: WorkflowFolder, cluster: Cluster, faults: FaultRecord) -> None:
    run = disturb()
    for moment, point in (("rolling out", ROLLING_OUT), ("saving", SAVING)):
        run.reach(point)
        run.happens(f"scancel while {moment}")
        cluster.ask("scancel", run.job)
        run.fail()
        run.start_driver()
    run.finish()
    run.check(one_machine, faults)


def test_the_end_of_a_jobs_time(
    disturb: Disturb, one_machine: WorkflowFolder, cluster: Cluster, faults: FaultRecord
) -> None:
    """Seen in time, training saves and the job is requeued; a rank that stands still cannot, and the job is ended."""
    run = disturb()
    run.reach("attempts/001")
    job = run.job
    run.happens("time limit near")
    cluster.end_in(job, 58)
    cluster.wait_until_queued(job)
    cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    cluster.start_now(job)
    run.reach("rollouts/step_000002/chunk_0000.json")
    assert run.job == job
    run.rank(1).suspend()
    run.happens("time limit over")
    cluster.end_in(job, 5)
    run.fail()
    assert cluster.state(job) == "TIMEOUT"
    run.start_driver()
    run.finish()
    run.check(one_machine, faults)
    assert "asked to end" in run.rows()[0]["reason"]


def test_killed_drivers(disturb: Disturb, one_machine: WorkflowFolder, cluster: Cluster, faults: FaultRecord) -> None:
    """The job lives on; the next drivers' jobs wait for it in the queue and train nothing again."""
    run = disturb()
    run.reach(ROLLING_OUT)
    job = run.job
    run.happens("driver killed while rolling out")
    run.driver.end(signal.SIGKILL)
    run.start_driver()
    run.wait_for_jobs(2)
    output = run.driver.output
    assert "is being trained by process" in output
    assert f"in slurm:{job}" in output
    run.happens("driver killed while its job waits")
    run.driver.end(signal.SIGKILL)
    run.start_driver()
    run.finish()
    run.check(one_machine, faults)
    (done,) = run.rows()
    assert done["job"] == f"slurm:{job}"


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["both live", "the first is cancelled"])
def test_two_drivers_at_once(
    disturb: Disturb, one_machine: WorkflowFolder, cluster: Cluster, faults: FaultRecord, is_cancelled: bool
) -> None:
    """Both submit before either job runs: the second job goes behind the first, and does what is left."""
    run = disturb()
    other = start(run.workflow, "train")
    run.reach("rollouts/step_000001/chunk_0000.json")
    holder = read_holder(run.train / "lease")
    assert holder is not None
    first = holder.job.removeprefix("slurm:")
    run.wait_for_jobs(2)
    (second,) = set(cluster.jobs()) - {first}
    run.happens(f"two drivers at once, {'the first cancelled' if is_cancelled else 'both live'}")
    cluster.wait_until(lambda: f"Dependency=afterany:{first}" in cluster.ask("scontrol", "show", "job", second))
    if is_cancelled:
        cluster.ask("scancel", first)
    cluster.wait_until(lambda: first not in cluster.jobs())
    cluster.start_now(second)
    codes = sorted(driver.finish()[0] for driver in (run.driver, other))
    assert codes == [0, int(is_cancelled)]
    run.check(one_machine, faults)
    assert [row["job"] for row in run.rows()][-1] == f"slurm:{second if is_cancelled else first}"


def test_two_users_on_one_store(
    cluster: Cluster,
    store: Path,
    one_machine: WorkflowFolder,
    two_users: tuple[str, str],
    faults: FaultRecord,
    bystanders: None,
) -> None:
    """Each with a driver and folders of their own: everything is built once, and both train."""
    group = grp.getgrgid(pwd.getpwnam(two_users[0]).pw_gid).gr_name
    folders = [
        SlurmFolder(
            Path(pwd.getpwnam(user).pw_dir, "training"),
            common := Path(pwd.getpwnam(user).pw_dir).parent / "store",
            TWO_RANKS | {"site.store_group": group, "site.node_local": f"/local_nvme/{user}"},
            cluster.environment | {"HOME": pwd.getpwnam(user).pw_dir},
            nodes=2,
            user=user,
        )
        for user in two_users
    ]
    shutil.copytree(store / "made", common / "made")
    for path in [common, *common.rglob("*")]:
        shutil.chown(path, two_users[0], group)
        path.chmod(0o2775 if path.is_dir() else 0o664)
    started = time.monotonic()
    for folder in folders:
        folder.folder.mkdir()
        shutil.chown(folder.folder, folder.user)
    for driver in [start(folder, "train") for folder in folders]:
        code, output = driver.finish(timeout=600)
        assert code == 0, output[-4000:]
    histories = list(common.rglob("*.history.jsonl"))
    assert {len(path.read_text().splitlines()) for path in histories} == {1}
    makers = {pwd.getpwuid(path.stat().st_uid).pw_name for path in histories}
    assert makers <= set(two_users)
    for folder in folders:
        assert folder.run_folder.owner() == folder.user
        assert check_claims(folder)
        assert_same_training(folder, one_machine)
    events = ["two users build on one store", "two users train from one store"]
    faults.add_events(Counter(events), time.monotonic() - started)
    faults.equal = True


@pytest.fixture
def two_users() -> Iterator[tuple[str, str]]:
    """Two users of this machine with a group in common and a home each, gone with the test."""
    names, group = ("posttrain-ada", "posttrain-bob"), "posttrain-test"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place, ExitStack() as stack:
        Path(place).chmod(0o755)
        _call(stack, ["groupadd", group], ["groupdel", group])
        for name in names:
            home = Path(place, name)
            words = ["--no-log-init", "--create-home", "--home-dir", home, "--gid", group, name]
            _call(stack, ["useradd", *words], ["userdel", name])
            home.chmod(0o755)
        # Through a shell, as jobs are: setpriv itself finds what its user may not.
        words = [*as_user(names[0]), "sh", "-c", 'exec "$0" -c ""', sys.executable]
        tried = subprocess.run(words, capture_output=True, check=False)
        require("users", f"other users cannot run {sys.executable}" if tried.returncode else "")
        yield names


def _call(stack: ExitStack, command: list[object], undo: list[str]) -> None:
    """Run a command, and another at the end of the block."""
    subprocess.run(list(map(str, command)), check=True)
    stack.callback(subprocess.run, undo, check=True)
