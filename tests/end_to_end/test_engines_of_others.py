"""Evaluations by a real SGLang that somebody else has started, with other weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.end_to_end.test_sglang import architecture, model, prompts, settings  # noqa: F401 fixtures
from tests.support.evaluations import measured, target
from tests.support.sglang_environment import require_sglang
from tests.support.tiny_checkpoint import make_random_checkpoint
from tests.support.workflow_runs import ROOT, WorkflowFolder

from posttrain.config.schema import Architecture
from posttrain.plan.resolve import resolve
from posttrain.rl.engines.launch_command import render_engine_command
from posttrain.rl.engines.ports import LOOPBACK, choose_free_ports
from posttrain.rl.engines.process import started_engines
from posttrain.rl.engines.secret import SECRET_VARIABLE

SECRET = "the secret of somebody else's engines"

pytestmark = [pytest.mark.faults("slow"), pytest.mark.sglang]


def test_sglang_at_an_address_measures_as_one_that_is_started(
    tmp_path: Path,
    settings: dict[str, object],  # noqa: F811
    model: Path,  # noqa: F811
    architecture: Architecture,  # noqa: F811
) -> None:
    """It loads what is measured; asked once more it has it already."""
    require_sglang()
    settings |= {"rollout.max_response_tokens": 8, "engine.start_timeout_seconds": 600}
    own = WorkflowFolder(tmp_path / "own", tmp_path / "store", dict(settings))
    own.run(target(own))
    others = tmp_path / "others"
    shutil.copytree(model, others)
    make_random_checkpoint(others, architecture, seed=2)
    shutil.copy(model / "config.json", others)
    words = " ".join(f"{key}={value}" for key, value in settings.items())
    config = resolve({"model": "tiny", "site": "local", "set": words}, ROOT / "config").config
    (port,) = choose_free_ports(1)
    command = render_engine_command(config, 0, others, LOOPBACK, port)
    asked = settings | {"evaluation.addresses": f"[{LOOPBACK}:{port}]"}
    with started_engines({0: command}, tmp_path / "logs", SECRET):
        found = []
        for name in ("first", "second"):
            by_address = WorkflowFolder(tmp_path / name, own.store, dict(asked), {SECRET_VARIABLE: SECRET})
            by_address.run(target(by_address))
            found.append(measured(by_address))
            assert not Path(target(by_address)).with_suffix(".engines").exists()
    assert found == [measured(own)] * 2
    log = (tmp_path / "logs" / "engine0.log").read_text()
    assert log.count("POST /update_weights_from_disk") == 1
