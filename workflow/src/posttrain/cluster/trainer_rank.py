"""The process of a trainer rank: `python -m posttrain.cluster.trainer_rank`, also under torchrun.

It reads its rank, the rendezvous and the engines' secret from the environment (`rendezvous`, `rl.engines.secret`).
`main` imports heavy modules only after the arguments are checked.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from posttrain import cli
from posttrain.rl.engines.secret import take_secret
from posttrain.rl.training import graceful_shutdown
from posttrain.store.lease import check_epoch
from posttrain.types import Prompt


def parse_arguments() -> argparse.Namespace:
    """Parse the command line that the supervisor wrote."""
    return cli.command_line(
        __doc__,
        config=(Path, "config.resolved.yaml"),
        run_name=str,
        run_folder=Path,
        torch_dist=(Path, "initial weights"),
        model_folder=(Path, "checkpoint with the tokenizer"),
        dataset=Path,
        data_check={"type": Path, "help": "what approve_data wrote; without it, all prompts are trained on"},
        engine={"action": "append", "help": "URL of an engine; repeated for several. None: rollouts are on disk"},
        until={"type": int, "default": 0, "help": "the step to end after; by default the run's last"},
        finished={"type": int, "help": "finished steps of the checkpoint to load; by default the newest"},
        lease_folder={"type": Path, "help": "lease to check before each commit"},
        epoch={"type": int, "help": "epoch of that lease"},
    )


def main() -> None:
    """Join the other ranks and train to the end."""
    arguments = parse_arguments()
    secret = take_secret() if arguments.engine else ""
    from posttrain.config.load import load_resolved
    from posttrain.config.suites import HELD_OUT
    from posttrain.store import suite_folders

    config = load_resolved(arguments.config)
    from posttrain.rl.training.assembly import open_run
    from posttrain.rl.training.loop import train

    may_commit = partial(check_epoch, arguments.lease_folder, arguments.epoch) if arguments.lease_folder else _always
    with open_run(
        config,
        run_name=arguments.run_name,
        run_folder=arguments.run_folder,
        torch_dist=arguments.torch_dist,
        model_folder=arguments.model_folder,
        read_prompts=partial(_prompts, arguments.dataset, arguments.data_check),
        engine_urls=arguments.engine or (),
        engine_secret=secret,
        may_commit=may_commit,
        finished=arguments.finished,
        eval_folders={HELD_OUT: arguments.dataset, **suite_folders(config)},
    ) as run:
        is_done = train(run, arguments.until)
    if not is_done:
        sys.exit(graceful_shutdown.SAVED_EXIT_CODE)


def _prompts(dataset: Path, data_check: Path | None) -> list[Prompt]:
    """Return the prompts of a dataset without those that `approve_data` found too long."""
    from posttrain.rl.data.dataset import load_prompts
    from posttrain.rl.data.prompt_lengths import read_left_out

    return load_prompts(dataset / "train.jsonl", read_left_out(data_check) if data_check else ())


def _always() -> None:
    """Allow every commit: torchrun starts runs without a lease."""


if __name__ == "__main__":
    graceful_shutdown.block()  # before any other thread, which would receive the signal
    cli.run(main, role=f"trainer {os.environ.get('RANK', '0')}")
