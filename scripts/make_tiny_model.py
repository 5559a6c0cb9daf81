"""Makes the demo's tiny model in Hub layout."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from posttrain.checkpoint.parts.steps import FOLDER
from posttrain.checkpoint.tiny.model import make_tiny_model
from posttrain.checkpoint.tiny.tokenizer import ARITHMETIC, DIGITS, Vocabulary, calculation, vocabulary_of
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.data import Data, task_of
from posttrain.rl.data.arithmetic import generate_products
from posttrain.rl.data.dataset_files import reading_of
from posttrain.rl.data.reasoning_gym import generate_rows
from posttrain.rl.data.sort_digits import generate_prompts, num_possible_prompts
from posttrain.store import Receipt, claim, record_files, write_receipt

MAX_WARM_UP_PROMPTS = 8192
MAX_PRODUCTS = 3600
# A task may have few different prompts.
TASK_WARM_UP_PROMPTS = 4096
MAX_HELDOUT_PROMPTS = 512


def main() -> None:
    """Draw the warm-up's prompts, create and warm up the model, and write the receipt."""
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
    architecture, data = args.resolved.config.model.architecture, args.resolved.config.data
    task = {"num_digits": args.num_digits} if data.kind == "sort_digits" else task_of(data)
    settings = {"architecture": dataclasses.asdict(architecture), **task, "seed": args.seed}
    if not claim(args.receipt, Receipt("make_tiny_model", (), {}, settings), args.folder):
        return
    train_rows, heldout_rows, known = _rows(data, args.num_digits, architecture.vocab_size, args.seed)
    make_tiny_model(args.folder, architecture, train_rows, heldout_rows, args.seed, known)
    write_receipt(args.receipt, Receipt("make_tiny_model", record_files(args.folder), {}, settings), started)


def _rows(data: Data, num_digits: int, num_tokens: int, seed: int) -> tuple[list[Any], list[Any], Vocabulary]:
    """Return the warm-up's prompts, the prompts of its evaluation, and the vocabulary of both."""
    if data.kind == "arithmetic":
        sides = generate_products(MAX_PRODUCTS, MAX_HELDOUT_PROMPTS, seed)
        return *([row | {"conversation": _calculation(row)} for row in side] for side in sides), ARITHMETIC
    if data.kind != "reasoning_gym":
        train, heldout = map(min, num_possible_prompts(num_digits), (MAX_WARM_UP_PROMPTS, MAX_HELDOUT_PROMPTS))
        return *generate_prompts(num_digits, train, heldout, seed), DIGITS
    wanted = {"num_train_prompts": TASK_WARM_UP_PROMPTS, "num_heldout_prompts": MAX_HELDOUT_PROMPTS, "seed": seed}
    sides = generate_rows(dataclasses.replace(data, **wanted), reading_of(data))
    prompts, answers = zip(*((row.messages[-1]["content"], row.label) for row in sides[0]), strict=True)
    known = vocabulary_of(prompts, answers, num_tokens)
    return *([{"prompt": row.messages, "label": row.label} for row in side] for side in sides), known


def _calculation(row: dict[str, Any]) -> tuple[str, str, str]:
    return calculation(row["prompt"][-1]["content"], row["label"])


if __name__ == "__main__":
    run(main)
