"""The task of the tiny model: sort the digits of a number.

A prompt is "sort the digits." and a number of `num_digits` digits; the label is the same digits in ascending order.
The instruction does not say which order is meant: only the reward does.

Which prompts are held out is a property of the digits themselves, not of a draw: the digits' weighted sum (weights 1,
2, 3, 4, 1, ...) divides by 5. Each weight is prime to 5 and ten digits are two full rounds of the remainders, so
exactly one fifth of the 10^n numbers are held out, whatever the seed and the counts. So training, and the supervised
warm-up of the tiny model, can stay off the held-out prompts without knowing how many of them an evaluation draws.
"""

from __future__ import annotations

import random
from typing import Any

from posttrain.errors import Problem, raise_if_any

INSTRUCTION = "sort the digits."
# By a checksum of the digits, whatever the seed: a number that is held out was never trained on. The first digit's
# weight is prime to the divisor, so that exactly a fifth of all numbers is held out.
HELDOUT_DIVISOR = 5
DIGIT_WEIGHTS = (1, 2, 3, 4)


def generate_prompts(
    num_digits: int, num_train: int, num_heldout: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw distinct prompts for training and for evaluation.

    Args:
        num_digits: Digits of each number, leading zeros included.
        num_train: Rows for training.
        num_heldout: Rows for evaluation; none of them can be a training row of any call.
        seed: Seed of the draw; the global random state is neither read nor changed.

    Returns:
        Training rows and held-out rows, each {"prompt": chat messages, "label": sorted digits}.

    Raises:
        ConfigError: When there are not that many different numbers.

    Example:
        "3141" has the weighted sum 3 + 2 + 12 + 4 = 21, so it is a training prompt; its label is "1134".
    """
    _check_counts(num_digits, num_train, num_heldout)
    draw = random.Random(seed)
    rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    wanted, seen = (num_train, num_heldout), set()
    while len(rows[0]) < num_train or len(rows[1]) < num_heldout:
        digits = f"{draw.randrange(10**num_digits):0{num_digits}}"
        side = int(is_heldout(digits))
        if digits not in seen and len(rows[side]) < wanted[side]:
            seen.add(digits)
            rows[side].append(_row(digits))
    return rows


def is_heldout(digits: str) -> bool:
    """Return whether a number belongs to evaluation."""
    weighted = (int(digit) * DIGIT_WEIGHTS[i % len(DIGIT_WEIGHTS)] for i, digit in enumerate(digits))
    return sum(weighted) % HELDOUT_DIVISOR == 0


def num_possible_prompts(num_digits: int) -> tuple[int, int]:
    """Return how many different numbers there are for training and for evaluation.

    Example:
        Four digits: 8000 and 2000.
    """
    heldout = 10**num_digits // HELDOUT_DIVISOR
    return 10**num_digits - heldout, heldout


def _row(digits: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": digits}]
    return {"prompt": messages, "label": "".join(sorted(digits))}


def _check_counts(num_digits: int, num_train: int, num_heldout: int) -> None:
    possible = num_possible_prompts(num_digits)
    names = ("data.num_train_prompts", "data.num_heldout_prompts")
    raise_if_any(
        [
            Problem(
                "too-few-numbers",
                name,
                str(wanted),
                f"at most {limit}: there are {10**num_digits} numbers of {num_digits} digits, one in "
                f"{HELDOUT_DIVISOR} of them held out",
                "ask for fewer prompts or raise data.num_digits",
            )
            for name, wanted, limit in zip(names, (num_train, num_heldout), possible, strict=True)
            if wanted > limit
        ]
    )
