"""Calibrations by gangs of ranks: undisturbed, in several layouts, and killed until they are through.

The ranks run what the product's own ranks run (`rl.training.calibration.calibrate`), forked off one process that has
imported everything: a kill costs a second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.megatron_single import fork_ranks, run_forked, test_config
from tests.support.tiny_checkpoint import TRAINED, make_random_checkpoint

from posttrain.config.calibration import CalibrationPass
from posttrain.config.schema import Architecture, Config

PASSES = {
    "coding": CalibrationPass(kind="made", made="coding", num_samples=9, max_tokens=90),
    "deep": CalibrationPass(kind="made", made="deep", num_samples=5, min_tokens=130, max_tokens=140),
}
POLL_SECONDS = 0.002


def prepare(folder: Path, arch: Architecture = TRAINED) -> None:
    """Put into a folder what a calibration begins with: weights, a tokenizer, conversations."""
    from tests.support.folders_in_parts import make_folder

    from posttrain.checkpoint.formats.torch_dist import Conversion
    from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
    from posttrain.rl.data.dataset_files import make_rows

    make_random_checkpoint(folder / "hf", arch, seed=6)
    make_tokenizer(arch.max_position_embeddings).save_pretrained(folder / "hf")
    make_folder(Conversion(folder / "hf", "s1", arch), folder / "torch_dist")
    for name, wanted in PASSES.items():
        make_rows(wanted, folder / name, folder / f"{name}.manifest.json")


def config_of(num_ranks: int, parallel: Mapping[str, int], arch: Architecture = TRAINED) -> Config:
    """Return the configuration of a gang."""
    config = test_config(arch, **parallel)
    return dataclasses.replace(
        config,
        hardware=dataclasses.replace(config.hardware, gpus_per_node=num_ranks),
        trainer=dataclasses.replace(config.trainer, max_tokens_per_gpu=160),
        serving=dataclasses.replace(config.serving, passes=PASSES, samples_per_shard=2),
    )


def calibrate_here(folder: Path, config: Config, output: Path, made_from: str = "weights") -> None:
    """Be one rank."""
    from posttrain.rl.training.calibration import calibrate

    conversations = {name: folder / name for name in PASSES}
    calibrate(config, folder / "torch_dist", folder / "hf", conversations, made_from, output)


def gang(folder: Path, config: Config, output: Path) -> None:
    """Run all ranks to their good end."""
    meeting = output.with_name(f"{output.name}-{time.monotonic_ns()}.meeting")
    run_forked(config.hardware.gpus_per_node, meeting, partial(calibrate_here, folder, config, output))


def killed_gang(folder: Path, config: Config, output: Path, shards: int, delay: float) -> bool:
    """Run all ranks and kill them a moment after so many more shards are finished; tells whether they were killed."""
    meeting = output.with_name(f"{output.name}-{time.monotonic_ns()}.meeting")
    goal = finished_shards(output) + shards
    ranks = fork_ranks(config.hardware.gpus_per_node, meeting, partial(calibrate_here, folder, config, output))
    alive = list(ranks)
    while alive:
        time.sleep(POLL_SECONDS)
        for rank in list(alive):
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                alive.remove(rank)
                assert status == 0, f"a rank ended with {os.waitstatus_to_exitcode(status)}"
        if len(alive) == len(ranks) and finished_shards(output) >= goal:
            time.sleep(delay)
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
                os.waitpid(rank, 0)
            return True
    return False


def finished_shards(output: Path) -> int:
    """Return how many shards of all passes have a durable state."""
    from posttrain.checkpoint.formats.safetensors_io import read_metadata

    return sum(int(read_metadata(path)["finished"]) for path in (output / "state").glob("*.safetensors"))


def contents(output: Path) -> dict[str, bytes]:
    """Return what a calibration has come to, without its states."""
    return {path.name: path.read_bytes() for path in sorted(output.iterdir()) if path.is_file()}


def main() -> None:
    """Do what is asked: layouts (name -> ranks, sizes), and kills in one of them; print what came of it."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    folder = Path(request["folder"])
    (folder / "out").mkdir(exist_ok=True)
    for name, (num_ranks, parallel) in request["layouts"].items():
        gang(folder, config_of(num_ranks, parallel), folder / "out" / name)
    kills = 0
    if wanted := request.get("kills"):
        rng, layout = random.Random(request.get("seed", 3)), request["killed"]
        config, attempt = config_of(*request["layouts"][layout]), 0
        while kills < wanted:
            output = folder / "out" / f"killed{attempt}"
            if killed_gang(folder, config, output, rng.choice((0, 1, 1, 2)), rng.uniform(0, 0.1)):
                kills += 1
                continue
            attempt += 1
            assert contents(output) == contents(folder / "out" / layout)
        gang(folder, config, output)
        assert contents(output) == contents(folder / "out" / layout)
    print(json.dumps({"kills": kills}))


if __name__ == "__main__":
    main()
