"""The task of the tool demo: multiply two numbers of two digits, which a small model cannot do in its head.

A prompt is "37*46", and its label is the product. The numbers are from 32 to 99, so that every product has four digits.
A product is held out if the sum of its first number and twice its second number divides by 5, whatever the seed and the
counts, so that training and the model's warm-up never use a prompt of an evaluation.
"""

from __future__ import annotations

import random
from typing import Any

from posttrain.config.data import FACTORS
from posttrain.errors import Problem, raise_if_any

HELDOUT_DIVISOR = 5


def generate_products(num_train: int, num_heldout: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw distinct prompts for training and for evaluation.

    Args:
        num_train: Rows for training.
        num_heldout: Rows for evaluation.
        seed: Seed of the draw.

    Returns:
        Training rows and held-out rows, each {"prompt": chat messages, "label": the product}.

    Raises:
        ConfigError: There are not that many products.

    Example:
        "37*46": 37 + 2 * 46 = 129, so it is a training prompt; its label is "1702".
    """
    pairs = [(a, b) for a in FACTORS for b in FACTORS]
    sides = [[pair for pair in pairs if is_heldout(*pair) == held_out] for held_out in (False, True)]
    wanted = {"data.num_train_prompts": num_train, "data.num_heldout_prompts": num_heldout}
    raise_if_any(
        [
            Problem("too-few-products", name, str(count), f"at most {len(side)} with data.kind=arithmetic", "lower it")
            for (name, count), side in zip(wanted.items(), sides, strict=True)
            if count > len(side)
        ]
    )
    draw = random.Random(seed)
    train, heldout = (
        [_row(*pair) for pair in draw.sample(side, n)] for side, n in zip(sides, wanted.values(), strict=True)
    )
    return train, heldout


def is_heldout(first: int, second: int) -> bool:
    """Return whether a product belongs to evaluation."""
    return (first + 2 * second) % HELDOUT_DIVISOR == 0


def _row(first: int, second: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{first}*{second}"}], "label": str(first * second)}
