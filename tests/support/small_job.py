"""Training jobs of a second: engines are shell scripts in the place of `engine.python`, ranks are the real program."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.support.workflow_runs import ROOT

from posttrain.cluster.job import TrainingJob
from posttrain.config.load import dump_resolved
from posttrain.plan.resolve import resolve
from posttrain.store import Receipt, write_receipt

# A command line that a rank answers at once.
ENDS_WELL = ("--help",)
STAYS = "exec sleep 600"


def make_job(
    folder: Path, engine: str, arguments: tuple[str, ...] = ENDS_WELL, nodes: int = 1, more: str = ""
) -> TrainingJob:
    """Return a job whose engine is a shell script, run in the job's folder, and whose weights are no files.

    Args:
        folder: Gets all of it.
        engine: The script.
        arguments: Of a rank.
        nodes: That it trains on.
        more: Further settings.
    """
    script = folder / "engine"
    script.write_text(f"#!/bin/bash\ncd {folder}\n{engine}\n")
    script.chmod(0o755)
    choice = {"model": "tiny", "site": "local", "nodes": nodes, "set": f"engine.python={script} {more}"}
    (folder / "config.yaml").write_text(dump_resolved(resolve(choice, ROOT / "config")))
    weights, receipt = folder / "weights", folder / "weights.receipt.json"
    weights.mkdir()
    write_receipt(receipt, Receipt("finalize_torch_dist", (), {}, {}), time.time())
    return TrainingJob(
        config_path=folder / "config.yaml",
        run_folder=folder,
        torch_dist=weights,
        torch_dist_receipt=receipt,
        rollout_weights=weights,
        rollout_receipt=receipt,
        node_local=folder / "{node}",
        arguments=arguments,
    )


def required_arguments(folder: Path) -> tuple[str, ...]:
    """Return a command line that a rank accepts; the files it names do not exist."""
    names = ("--config", "--run-name", "--run-folder", "--dataset")
    return tuple(word for name in names for word in (name, str(folder / "nothing.yaml")))


def attempts_of(folder: Path) -> list[dict[str, Any]]:
    """Return the ended attempts of a job."""
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
