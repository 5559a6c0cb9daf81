"""A rank that trains on a queue of groups without a model, and may end with SIGKILL at one of its moments.

    python -m tests.support.queue_rank FOLDER LAST_MOMENT URL...

Generator, queue, files, engine client, graders, publisher and training loop are the product's. An update is a line in
`trained.jsonl`, a checkpoint the number of finished steps. A moment is an operation on a file below the folder, or a
boundary of a step's phases.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from benchmarks.async_rollouts import OneTensor, ScriptedRun
from tests.support.mortal_engine import RIGHT

from posttrain import store
from posttrain.config.derived import is_off_policy, runs_ahead
from posttrain.config.load import load_resolved
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.event_loop import EventLoop, LoopThread
from posttrain.rl.environments.kinds import environments_of
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.rl.rollout.source import QueueSource
from posttrain.rl.training.loop import train
from posttrain.rl.weight_sync.engine_layout import EngineShards
from posttrain.rl.weight_sync.publish import WeightPublisher
from posttrain.types import Prompt, RolloutResult

SECRET, BOUNDARY = "secret", "posttrain.boundary"
PROMPTS = [Prompt(i, ({"role": "user", "content": f"{i:04d}"},), RIGHT) for i in range(256)]
OPERATIONS = {"os.rename": "rename", "os.remove": "remove", "os.mkdir": "mkdir", "shutil.rmtree": "rmtree"}


def end_at(last_moment: int, folder: Path) -> None:
    """End this process before its n-th moment, whose name goes to `moments.txt`; 0: never."""
    left = last_moment

    def observe(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if name := _moment(event, arguments, str(folder / "run")):
            left -= 1
            if not left:
                place = os.open(folder / "moments.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.write(place, f"{name}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(observe)


def _moment(event: str, arguments: tuple[Any, ...], folder: str) -> str:
    """Return the name of a moment, "" for an event that is none."""
    if event == BOUNDARY:
        return str(arguments[0])
    if event not in (*OPERATIONS, "open") or not str(arguments[0]).startswith(folder):
        return ""
    path = Path(str(arguments[1] if event == "os.rename" else arguments[0]))
    if event == "open":
        return f"write {_kind(path)}" if int(arguments[2]) & (os.O_WRONLY | os.O_RDWR) else ""
    return f"{OPERATIONS[event]} {_kind(path)}"


def _kind(path: Path) -> str:
    """Return what stands in a file: "group" of `.group_00000123.json.4711-0.tmp` or `group_00000123.json`."""
    return path.name.lstrip(".").partition("_")[0].partition(".")[0]


class QueueRun(ScriptedRun):
    """A run whose update is a line in a file."""

    def train_on(self, *_: Any) -> tuple[list[Any], None]:
        """Note the step's groups."""
        sys.audit(BOUNDARY, "before the update")
        store.append_json_line(self.traces / "trained.jsonl", {"step": self._step, "groups": self._rows})
        sys.audit(BOUNDARY, "after the update")
        return [], None

    def collect(self, step: int) -> RolloutResult:
        """Keep what a step trains on."""
        rollout = super().collect(step)
        self._step, self._rows = step, [group.as_dict() for group in rollout.groups]
        return rollout

    def publish(self, finished: int, has_new_engine: bool = False) -> None:
        """Publish between two boundaries."""
        sys.audit(BOUNDARY, "before a publish")
        super().publish(finished, has_new_engine)
        sys.audit(BOUNDARY, "after a publish")

    def checkpoint_is_due(self, finished: int) -> bool:
        """Save at intervals and at the end."""
        return finished % self.config.trainer.save_interval == 0 or finished == self.config.training.num_steps

    def log_step(self, step: int, rollout: RolloutResult, *_: Any) -> dict[str, float]:
        """Write no metrics."""
        return {}


class FinishedSteps:
    """Checkpoints that consist of the number of finished steps.

    Args:
        path: The file.
        rollouts: The run's groups.
    """

    def __init__(self, path: Path, rollouts: QueueStore):
        self._path, self._rollouts, self._writing = path, rollouts, 0

    def restore(self) -> int:
        """Return the finished steps of the newest checkpoint."""
        return int(store.read_json(self._path)["finished"]) if self._path.exists() else 0

    def remove_leftovers(self) -> None:
        """Leave nothing behind."""

    def begin_save(self, finished: int, canary: object) -> None:
        """Begin; the next rollout does not change the state."""
        self._writing = finished

    def finish_save(self, clock: object) -> None:
        """Commit, and delete what the checkpoint covers."""
        if finished := self._writing:
            store.write_json(self._path, {"finished": finished})
            self._rollouts.forget_before(finished)
            self._writing = 0


def main(folder: Path, last_moment: int, urls: Sequence[str]) -> None:
    """Train to the end, or until the moment comes."""
    config = load_resolved(folder / "config.yaml")
    run_folder, rollouts = folder / "run", QueueStore(folder / "run/rollouts")
    run_folder.mkdir(exist_ok=True)
    meeting = folder / f"meeting-{os.getpid()}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    with ExitStack() as stack:
        runner: EventLoop = stack.enter_context(LoopThread() if is_off_policy(config) else asyncio.Runner())
        client = EngineClient(urls, SECRET, 30.0)
        runner.run(client.__aenter__())
        graders = stack.enter_context(GraderPool.of(config))
        environments = stack.enter_context(environments_of(config)) if config.data.environment else None
        tokenizer = ChatTokenizer(folder / "hf")
        generator = TrajectoryGenerator(config, PROMPTS, tokenizer, client, rollouts, graders, environments)
        source = QueueSource(runner, None, 30.0, client, generator, runs_ahead(config))
        shards = EngineShards(OneTensor(), client, runner)  # type: ignore[arg-type]
        publisher = WeightPublisher(config, shards, folder / "served", folder / "hf")
        state: Any = FinishedSteps(run_folder / "checkpoint.json", rollouts)
        given: dict[str, Any] = {"policy": None, "objective": None, "comparison": None, "sinks": None}
        run = QueueRun(config, source=source, publisher=publisher, state=state, traces=run_folder, **given)
        end_at(last_moment, folder)
        train(run)
        runner.run(client.__aexit__(None, None, None))
    print(json.dumps({"finished": state.restore()}))
    # Threads of a loop that has failed requests would keep the process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
