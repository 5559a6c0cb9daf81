"""Makes the tiny GLM-5 that the default run trains, in the layout of a Hub repository."""

from __future__ import annotations

import dataclasses
import time

from posttrain.artifacts import Receipt, claim, record_files, write_receipt
from posttrain.checkpoint.parts.steps import FOLDER
from posttrain.checkpoint.tiny.model import make_tiny_model
from posttrain.cli import RESOLVED, command_line, run
from posttrain.data.sort_digits import generate_prompts, num_possible_prompts

MAX_WARM_UP_PROMPTS = 8192
MAX_HELDOUT_PROMPTS = 512


def main() -> None:
    """Draw the warm-up's prompts, make and warm up the model, and say so in the receipt."""
    started = time.time()
    args = command_line(
        __doc__,
        **FOLDER,
        resolved=RESOLVED,
        num_digits=(int, "digits per prompt of the task"),
        seed=(int, "seed of weights, prompts and warm-up"),
        num_threads={"type": int, "default": 1, "help": "another number gives other bytes"},
    )
    import torch

    torch.set_num_threads(args.num_threads)
    architecture = args.resolved.config.model.architecture
    settings = {"architecture": dataclasses.asdict(architecture), "num_digits": args.num_digits, "seed": args.seed}
    if not claim(args.receipt, Receipt("make_tiny_model", (), {}, settings), args.folder):
        return
    train, heldout = map(min, num_possible_prompts(args.num_digits), (MAX_WARM_UP_PROMPTS, MAX_HELDOUT_PROMPTS))
    train_rows, heldout_rows = generate_prompts(args.num_digits, train, heldout, args.seed)
    make_tiny_model(args.folder, architecture, train_rows, heldout_rows, args.seed)
    write_receipt(args.receipt, Receipt("make_tiny_model", record_files(args.folder), {}, settings), started)


if __name__ == "__main__":
    run(main)
