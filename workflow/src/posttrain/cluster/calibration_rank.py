"""The process of a calibration rank: `python -m posttrain.cluster.calibration_rank`.

It reads its rank and the rendezvous from the environment (`rendezvous`). `main` imports heavy modules only after the
arguments are checked.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from posttrain import cli


def parse_arguments() -> argparse.Namespace:
    """Parse the command line that the head wrote."""
    return cli.command_line(
        __doc__,
        config=(Path, "config.resolved.yaml of the ranks"),
        torch_dist=(Path, "weights"),
        model_folder=(Path, "checkpoint with the tokenizer"),
        conversations={"type": Path, "nargs": "+", "required": True, "help": "a folder for each pass, in their order"},
        made_from=(str, "digest of weights and conversations"),
        folder=(Path, "gets what was seen"),
    )


def main() -> None:
    """Join the other ranks and run all passes."""
    args = parse_arguments()
    from posttrain.config.derived import calibration_passes
    from posttrain.config.load import load_resolved

    config = load_resolved(args.config)
    from posttrain.rl.training.calibration import calibrate

    conversations = dict(zip(calibration_passes(config), args.conversations, strict=True))
    calibrate(config, args.torch_dist, args.model_folder, conversations, args.made_from, args.folder)


if __name__ == "__main__":
    cli.run(main, role=f"rank {os.environ.get('RANK', '0')}")
