"""Writes the metrics as a W&B run, in a separate thread.

Importing wandb and starting its service takes one to two seconds, so a thread does both while the first step
computes.

Offline (the default) nothing leaves the machine: the run is in `wandb/offline-run-*` below the run's folder, and
`wandb sync` uploads it later. An offline run cannot be continued, and steps that are repeated after a kill would
appear in it twice. So each attempt removes the previous attempt's W&B run and writes it again from `metrics.jsonl`.
Online, the run with the same id is continued, and the server ignores steps that it already has.

The command line, machine, console, code and environment are not recorded, because they could contain secrets. The
library itself reads the API key, only online, from WANDB_API_KEY or from the file that `wandb login` writes.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.config.load import digest8
from posttrain.config.schema import Logging
from posttrain.report.wandb_login import login_of_wandb
from posttrain.store import write_text

# The end of a run does not wait longer for the service: `wandb sync` sends the rest from disk.
FINISH_TIMEOUT_SECONDS = 60.0
# No prompts, no telemetry, and nothing of the environment in the run.
PRIVATE_SETTINGS: Mapping[str, Any] = {
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


class WandbWriter:
    """Feeds a W&B run from a queue.

    Args:
        folder: The training run's folder.
        run_name: Name of the run.
        settings: Mode, project, entity, group and tags.
        rows: Rows of the finished steps, with which an offline run begins.
        config: The configuration shown in W&B.
    """

    def __init__(
        self,
        folder: Path,
        run_name: str,
        settings: Logging,
        rows: Sequence[Mapping[str, float]],
        config: Mapping[str, Any],
    ):
        if settings.wandb_mode == "online" and not login_of_wandb():
            raise RuntimeError(
                "logging.wandb_mode=online needs `wandb login`, or WANDB_API_KEY in the environment; or use offline"
            )
        self._folder, self._run_name, self._settings, self._config = folder, run_name, settings, dict(config)
        self._rows: queue.SimpleQueue[Mapping[str, float] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        for row in rows if settings.wandb_mode == "offline" else ():
            self._rows.put(row)
        # A daemon thread: a trainer that fails must not wait for W&B.
        self._thread = threading.Thread(target=self._write, name="wandb", daemon=True)
        self._thread.start()

    def log(self, row: Mapping[str, float]) -> None:
        """Queue one row.

        Raises:
            RuntimeError: When the thread has failed.
        """
        self._raise_if_failed()
        self._rows.put(row)

    def close(self) -> None:
        """Write the queued rows and finish the run.

        Raises:
            RuntimeError: The thread has failed, or does not end in time.
        """
        self._rows.put(None)
        self._thread.join(FINISH_TIMEOUT_SECONDS)
        self._raise_if_failed()
        if self._thread.is_alive():
            raise RuntimeError(
                f"W&B did not finish the run within {FINISH_TIMEOUT_SECONDS:.0f} s; see {self._folder}/wandb"
            )

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            remedy = "set='logging.wandb=false' goes on without W&B; metrics.jsonl is complete"
            raise RuntimeError(f"W&B failed: {self._error}; {remedy}") from self._error

    def _write(self) -> None:
        # Read at import; otherwise the library reports its own errors to its authors.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb

            run = self._start(wandb)
            while (row := self._rows.get()) is not None:
                run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))
            run.finish()
            # The file is complete only after the library's own process has ended.
            wandb.teardown()
        # Keep any error for the trainer, which raises it at the next step.
        except Exception as error:
            self._error = error

    def _start(self, wandb: ModuleType) -> Any:
        is_offline = self._settings.wandb_mode == "offline"
        run_id = stored_run_id(self._folder, self._run_name)
        if is_offline:
            _remove_offline_runs(self._folder, run_id)
        return wandb.init(
            project=self._settings.wandb_project,
            entity=self._settings.wandb_entity or None,
            group=self._settings.wandb_group or None,
            tags=self._settings.wandb_tags,
            name=self._run_name,
            id=run_id,
            dir=str(self._folder),
            config=self._config,
            resume=None if is_offline else "allow",
            settings=wandb.Settings(mode=self._settings.wandb_mode, **PRIVATE_SETTINGS),
        )


def stored_run_id(folder: Path, run_name: str) -> str:
    """Return the run's W&B id: derived from its name once, then read from the run's folder."""
    path = folder / "wandb_run_id.txt"
    if not path.exists():
        write_text(path, digest8(run_name) + "\n")
    return path.read_text(encoding="utf-8").strip()


def _remove_offline_runs(folder: Path, run_id: str) -> None:
    """Remove the offline runs of earlier attempts; their steps are written again from metrics.jsonl."""
    for earlier in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
        shutil.rmtree(earlier)
