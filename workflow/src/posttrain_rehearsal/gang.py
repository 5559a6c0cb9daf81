"""Forks the ranks of a rehearsal, in the environment of `make env-rehearsal`.

    python -m posttrain_rehearsal.gang RESOLVED FOLDER

writes `{rank}.json` into the folder: the rank's trace and its error, if any.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import secrets
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any


def main() -> None:
    """Fork all ranks and wait for them; the first failure ends the others."""
    resolved, folder = Path(sys.argv[1]), Path(sys.argv[2])
    from posttrain.cluster.processes import die_with_parent

    die_with_parent(os.getppid())
    gang = os.getpid()
    from posttrain.store.resolved_file import read_resolved
    from posttrain_rehearsal import stand_ins
    from posttrain_rehearsal.rank_subset import is_quick, members, rehearsed_config, stage_size
    from posttrain_rehearsal.recorder import Recorder
    from posttrain_rehearsal.sampled_shapes import sampled_shapes_of

    # Megatron's warnings address developers of the trainer.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    asked, recorder = read_resolved(resolved), Recorder()
    whole = asked.config
    stand_ins.install(recorder, whole)
    import torch.distributed as dist

    import posttrain.rl.training.loop  # noqa: F401 what all ranks need is imported once
    from posttrain_rehearsal import disk

    config, drawn = rehearsed_config(asked), sampled_shapes_of(asked)
    ranks = members(config, is_quick(asked))
    disk.converted(config.model.architecture, folder / "torch_dist")
    # Prefix of all keys: processes without it cannot read or write messages.
    secret = secrets.token_hex(16)
    port_file = folder / "port"
    children: dict[int, int] = {}
    # Frozen objects are skipped by the children's garbage collections, so their pages stay shared.
    gc.collect()
    gc.freeze()
    for rank in ranks:
        child = os.fork()
        if child == 0:
            die_with_parent(gang)
            _be(rank, ranks, config, drawn, recorder, folder, port_file, secret, stage_size(config))
        children[child] = rank
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port_file.with_suffix(".partial").write_text(str(store.port))
    port_file.with_suffix(".partial").rename(port_file)
    failed = False
    while children:
        child, status = os.wait()
        rank = children.pop(child)
        if status and not failed:
            failed = True
            time.sleep(1)  # lets ranks that fail for the same reason report it
            for other in children:
                os.kill(other, signal.SIGTERM)
        print(f"rank {rank} ended, {len(children)} to go", flush=True)


def _be(
    rank: int,
    ranks: list[int],
    config: Any,
    drawn: Any,
    recorder: Any,
    folder: Path,
    port_file: Path,
    secret: str,
    of_stage: int,
) -> None:
    """Run one rank, write its trace, and exit."""
    import torch
    import torch.distributed as dist

    from posttrain_rehearsal.messages import Messages
    from posttrain_rehearsal.script import STEPS, rehearse

    torch.set_num_threads(1)
    while not port_file.exists():
        time.sleep(0.05)
    met = dist.TCPStore("127.0.0.1", int(port_file.read_text()), timeout=timedelta(seconds=60))
    store = dist.PrefixStore(secret, met)
    if rank == ranks[0]:
        # One rank reports for all, which run nearly in step.
        recorder.announce = lambda phase: print(
            f"rank {rank}: {f'step {phase.step} of {STEPS}, ' if phase.step else ''}{phase.name}", flush=True
        )
    started, error, messages = time.perf_counter(), None, Messages(store, rank, ranks, of_stage)
    try:
        rehearse(config, drawn, rank, recorder, messages, folder)
    except BaseException as raised:
        error = {"type": type(raised).__name__, "message": str(raised), "trace": traceback.format_exc()}
    phases = [dataclasses.asdict(phase) for phase in recorder.phases]
    for phase in phases:
        phase["holders"] = [[*key, size] for key, size in phase["holders"].items()]
    content = {
        "rank": rank,
        "error": error,
        "seconds": time.perf_counter() - started,
        "phases": phases,
        "groups": recorder.created,
        "collectives": recorder.collectives,
        "counted": recorder.counted,
        "reductions": recorder.reductions,
        "late": recorder.late,
    }
    messages.end()
    (folder / f"{rank}.json").write_text(json.dumps(content))
    os._exit(1 if error else 0)


if __name__ == "__main__":
    main()
