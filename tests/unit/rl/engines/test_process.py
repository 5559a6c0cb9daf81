"""Real processes: small servers in place of an engine where the engine itself does not matter."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from posttrain.rl.engines.launch_command import EngineCommand
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.engines.process import EngineProcess
from posttrain.rl.engines.secret import SECRET_VARIABLE

SECRET = "of the attempt"
SLEEP = "import time; time.sleep(60)"
WITH_CHILD = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); time.sleep(60)"


def wait_until(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def engine(tmp_path, code, name="engine 0"):
    command = EngineCommand((sys.executable, "-c", code), {"MARK": "set"}, "http://127.0.0.1:1")
    return EngineProcess(command, tmp_path / "logs" / "engine0.log", name, SECRET)


def family(pid):
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def test_output_goes_to_the_log_and_the_environment_is_set(tmp_path):
    process = engine(tmp_path, "import os; print('mark is', os.environ['MARK'])")
    process.start()
    log = tmp_path / "logs" / "engine0.log"
    wait_until(lambda: "mark is set" in log.read_text())
    process.stop()


def test_an_engine_inherits_no_setting_of_the_allocator(tmp_path, monkeypatch):
    """What a user has exported for the trainer, its segments that expand, would end an engine that is to sleep."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    process = engine(tmp_path, "import os; print(sorted(n for n in os.environ if 'ALLOC_CONF' in n), 'is all')")
    process.start()
    log = tmp_path / "logs" / "engine0.log"
    wait_until(lambda: "is all" in log.read_text())
    process.stop()
    assert "[] is all" in log.read_text()


def test_an_engine_learns_the_secret_from_its_environment_alone(tmp_path):
    process = engine(
        tmp_path, "import os, time; print(os.environ['POSTTRAIN_ENGINE_SECRET'], flush=True); time.sleep(60)"
    )
    process.start()
    log = tmp_path / "logs" / "engine0.log"
    wait_until(lambda: log.read_text() == f"{SECRET}\n")
    assert not [word for member in family(process.pid) for word in member.cmdline() if SECRET in word]
    process.stop()


def test_an_engine_without_a_secret_does_not_start(checkpoint, environment):
    del environment[SECRET_VARIABLE]
    ended = subprocess.run(embedded(checkpoint, 1), env=environment, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert "POSTTRAIN_ENGINE_SECRET = not set" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_private_folders_are_there_while_it_runs(tmp_path):
    code = "import os, pathlib; folder = os.environ['PRIVATE']; pathlib.Path(folder, 'left').touch(); print(folder)"
    command = EngineCommand((sys.executable, "-c", code), {}, "", private_folders=("PRIVATE",))
    process = EngineProcess(command, tmp_path / "log", "engine 0", SECRET)
    process.start()
    wait_until(lambda: (tmp_path / "log").read_text().endswith("\n"))
    folder = Path((tmp_path / "log").read_text().strip())
    assert (folder / "left").exists()
    process.stop()
    assert not folder.exists()


def test_a_process_that_ended_is_reported_with_the_end_of_its_log(tmp_path):
    process = engine(tmp_path, "import sys; print('cannot load the model'); sys.exit(3)", name="engine 4")
    process.start()

    def ended():
        try:
            process.check_alive()
        except RuntimeError as error:
            errors.append(str(error))
        return errors

    errors = []
    wait_until(ended)
    assert "engine 4 ended with exit code 3" in errors[0]
    assert "cannot load the model" in errors[0]
    process.stop()


def test_stop_ends_the_process_and_its_children_and_nobody_else(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", SLEEP])
    process = engine(tmp_path, WITH_CHILD)
    process.start()
    wait_until(lambda: len(family(process.pid)) == 3)  # who ends its family, the engine, its child
    members = family(process.pid)
    process.check_alive()
    process.stop()
    assert not any(member.is_running() for member in members)
    assert bystander.poll() is None
    process.stop()
    bystander.kill()
    bystander.wait()


STARTER = """
import sys, time
from pathlib import Path
from posttrain.rl.engines.launch_command import EngineCommand
from posttrain.rl.engines.process import EngineProcess
command = EngineCommand((sys.executable, "-c", sys.argv[1]), {}, "")
process = EngineProcess(command, Path(sys.argv[2]), "engine", "secret")
process.start()
print(process.pid, flush=True)
time.sleep(60)
"""


def test_an_engine_ends_when_the_one_who_started_it_is_killed(tmp_path):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, WITH_CHILD, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    pid = int(starter.stdout.readline())
    wait_until(lambda: len(family(pid)) == 3)
    members = family(pid)
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    wait_until(lambda: not any(member.is_running() for member in members))


def test_free_ports_are_free_and_different():
    ports = choose_free_ports(8)
    assert len(set(ports)) == 8
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


@pytest.fixture
def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", SECRET_VARIABLE: SECRET}


def embedded(folder: Path, port: int):
    return [
        sys.executable,
        "-m",
        "posttrain.rl.engines.embedded",
        "--model-path",
        str(folder),
        "--port",
        str(port),
    ]


def test_a_port_in_use_is_one_message_and_exit_code_1(checkpoint, environment):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(embedded(checkpoint, port), env=environment, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert f"--port = {port} on 127.0.0.1 (Address already in use)" in ended.stderr


def test_the_embedded_engine_from_start_to_end(checkpoint, environment, tmp_path):
    """One real process: ready, asked, told to end; a checkpoint that is none ends it with a message."""
    import asyncio

    from posttrain.rl.engines.client import EngineClient
    from posttrain.rl.engines.responses import GenerateRequest

    (port,) = choose_free_ports(1)
    url = f"http://127.0.0.1:{port}"
    process = EngineProcess(
        EngineCommand(tuple(embedded(checkpoint, port)), environment, url), tmp_path / "log", "engine", SECRET
    )
    bad = subprocess.Popen(
        embedded(tmp_path, choose_free_ports(1)[0]), env=environment, stderr=subprocess.PIPE, text=True
    )
    process.start()

    async def story():
        async with EngineClient([url], SECRET, 30) as client:
            await client.wait_ready(60, process.check_alive)
            return await client.generate([GenerateRequest([5, 6], 1, 3)], 0)

    assert len(asyncio.run(story())) == 1
    handle = psutil.Process(process.pid)
    handle.terminate()
    assert handle.wait(20) in (0, None)
    with pytest.raises(RuntimeError, match="ended with exit code 0"):
        process.check_alive()
    assert "told to end" in (tmp_path / "log").read_text()
    _, said = bad.communicate(timeout=30)
    assert bad.returncode == 1
    assert "config.json: cannot be read" in said
    assert "Traceback" not in said
