"""A command beside engines that its job starts: here the embedded one, on this machine as the only node."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.support.evaluation_inputs import make_inputs

from posttrain.cluster.beside_engines import job_of
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"
# Asks an engine as scripts do, and ends in its own way.
ASKS = """
import asyncio, sys
from pathlib import Path
from posttrain.store.resolved_file import read_resolved
from posttrain.rl.engines.engine_endpoints import client_of, engines_to_ask
from posttrain.rl.engines.responses import GenerateRequest
config = read_resolved(Path(sys.argv[1])).config
async def ask(engines):
    async with client_of(config, engines) as client:
        return await client.generate([GenerateRequest([5], 1, 3)], 0)
with engines_to_ask(config, Path(), Path("nowhere")) as engines:
    print("answered:", asyncio.run(ask(engines))[0].finish_reason)
sys.exit(7)
"""


def start(folder: Path, code: str) -> subprocess.Popen[str]:
    arguments = list(map(str, make_inputs(folder, "engine.num_threads=1")))
    own = ["--checkpoint", str(folder / "hf"), "--folder", str(folder / "engines")]
    command = ["--", sys.executable, "-c", code, arguments[1]]
    words = [sys.executable, "-m", "posttrain.cluster.beside_engines", *arguments[:2], *own, *command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def engines_below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    below = psutil.Process(process.pid).children(recursive=True)
    return [child for child in below if "posttrain.rl.engines.embedded" in child.cmdline()]


# Ten seconds: a real engine, and a command that imports its client.
def test_a_command_is_told_where_engines_are_and_its_exit_code_is_the_end(tmp_path: Path) -> None:
    process = start(tmp_path, ASKS)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 7, output
    assert "answered: " in output
    assert "ready on" in (tmp_path / "engines" / "node0" / "engine0.log").read_text()
    assert not (tmp_path / "nowhere").exists()


def test_what_asks_ends_with_the_engine(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(300)")
    deadline = time.monotonic() + 60
    while not (found := engines_below(process)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    found[0].kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "engine 0 ended with exit code -9" in output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


@pytest.mark.parametrize(("words", "nodes"), [({"set": "evaluation.precision=source"}, 2), ({}, 1)])
def test_the_nodes_of_an_evaluation_are_its_own(words: dict[str, str], nodes: int) -> None:
    """No spare one; nor are those of the training job, or the engines' among them."""
    apart = "engine.own_nodes=8 engine.gpus_per_engine=64 engine.num_engines=1 engine.pd.num_prefill_engines=0"
    asked = {"model": "glm5", "site": "example_slurm", "nodes": 24, "set": f"{apart} {words.get('set', '')}"}
    resolved = resolve(asked, CONFIG_DIR)
    assert [job_of(resolved, precision).config.nodes for precision in ("original", "fp8")] == [2, 1]
    served = job_of(resolved).config
    assert (served.nodes, served.engine.own_nodes, served.site.slurm.spare_nodes) == (nodes, 0, 0)
