"""Makes the tiny GLM-5 that the default run trains, in the layout of a Hub repository."""

from __future__ import annotations

import dataclasses
import time

from posttrain.artifacts import Receipt, claim, record_files, write_receipt
from posttrain.checkpoint.parts.steps import folder_parser, read_architecture
from posttrain.checkpoint.tiny.model import make_tiny_model
from posttrain.cli import run
from posttrain.data.sort_digits import generate_prompts, num_possible_prompts

MAX_WARM_UP_PROMPTS = 8192
MAX_HELDOUT_PROMPTS = 512


def main() -> None:
    """Draw the warm-up's prompts, make and warm up the model, and say so in the receipt."""
    started = time.time()
    parser = folder_parser(__doc__, has_source=False)
    parser.add_argument("--architecture", type=read_architecture, required=True, help="dimensions, as JSON")
    parser.add_argument("--num-digits", type=int, required=True, help="digits per prompt of the task")
    parser.add_argument("--seed", type=int, required=True, help="seed of weights, prompts and warm-up")
    parser.add_argument("--num-threads", type=int, default=1, help="another number gives other bytes")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.num_threads)
    architecture = dataclasses.asdict(args.architecture)
    settings = {"architecture": architecture, "num_digits": args.num_digits, "seed": args.seed}
    if not claim(args.receipt, Receipt("make_tiny_model", (), {}, settings), args.folder):
        return
    train, heldout = map(min, num_possible_prompts(args.num_digits), (MAX_WARM_UP_PROMPTS, MAX_HELDOUT_PROMPTS))
    train_rows, heldout_rows = generate_prompts(args.num_digits, train, heldout, args.seed)
    make_tiny_model(args.folder, args.architecture, train_rows, heldout_rows, args.seed)
    write_receipt(args.receipt, Receipt("make_tiny_model", record_files(args.folder), {}, settings), started)


if __name__ == "__main__":
    run(main)
