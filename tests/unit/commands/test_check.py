import json
import socket

from tests.support.forked_programs import run_posttrain
from tests.support.resolved_words import resolved_words


def check(folder, overrides=""):
    roots = f"site.store={folder}/store site.results={folder}/results site.node_local={folder}/local"
    workflow = {"model": "tiny", "site": "local", "set": f"{roots} {overrides}"}
    chosen = [*resolved_words(workflow, folder), "--output", folder / "check.json"]
    return run_posttrain("check", *chosen)


def test_a_machine_that_has_everything_passes(tmp_path):
    done = check(tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(("ok", "skipped")) for line in done.stdout.splitlines())
    checks = json.loads((tmp_path / "check.json").read_text())["checks"]
    assert {row["status"] for row in checks} == {"ok", "skipped"}


def test_all_problems_come_in_one_report_without_a_traceback(tmp_path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = check(tmp_path, f"engine.port={port} engine.kind=sglang engine.python=/no/python")
    assert done.returncode == 1
    assert "2 problems" in done.stderr
    assert f"engine.port = {port}: Address already in use" in done.stderr
    assert "engine.python = '/no/python'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "check.json").exists()


def test_a_reward_service_that_is_not_there_is_found_before_a_gpu_is_taken(tmp_path):
    done = check(tmp_path, "data.reward=far reward.services.far.url=http://127.0.0.1:9/score")
    assert done.returncode == 1
    assert "reward.services.far.url = http://127.0.0.1:9/score: connection: ConnectError" in done.stderr
    assert "Traceback" not in done.stderr
