"""Responses that are made to hurt a grader: twenty kinds, by name. None of them is 42, or x^2+\\sqrt{3}."""

import random
from collections.abc import Callable, Mapping

BOXED = "\\boxed{%s}"


def _size(random: random.Random, most: int) -> int:
    """Return a size up to some most, the large ones as likely as the small ones."""
    return int(most ** random.uniform(0.2, 1))


GENERATORS: Mapping[str, Callable[[random.Random], str]] = {
    "deep braces": lambda r: BOXED % ("{" * (n := _size(r, 100_000)) + "7" + "}" * n),
    "deep parentheses": lambda r: BOXED % ("(" * (n := _size(r, 400)) + "7" + ")" * n),
    "unbalanced braces": lambda r: "\\boxed{" * _size(r, 100_000) + r.choice("}{)(") * _size(r, 10_000),
    "repeated boxes": lambda r: "\\boxed{7}" * _size(r, 50_000),
    "nested boxes": lambda r: "\\boxed{" * (n := _size(r, 50_000)) + "7" + "}" * n,
    "nested fractions": lambda r: BOXED % ("\\frac{1}{1+" * (n := _size(r, 90)) + "x" + "}" * n),
    "nested roots": lambda r: BOXED % ("\\sqrt{2+" * (n := _size(r, 140)) + "x" + "}" * n),
    "towers of powers": lambda r: BOXED % ("9^{" * (n := 1 + _size(r, 300)) + "9" + "}" * n),
    "huge exponents": lambda r: BOXED % f"{r.choice('9xe')}^{{{r.choice(['', '-'])}{9 ** _size(r, 3000)}}}",
    "products of powers": lambda r: BOXED % f"({r.randint(2, 99)}^{{{r.randint(99, 9999)}}}x)^{{{r.randint(9, 9999)}}}",
    "scientific numbers": lambda r: BOXED % f"{r.randint(1, 9)}e{r.choice(['', '-'])}{9 ** _size(r, 200)}",
    "factorials": lambda r: (
        BOXED
        % r.choice(["%d!", "(%d!)!", "%d!!", "%d!^{%d!}", "\\binom{%d}{%d}"]).replace("%d", str(r.randint(10, 10**9)))
    ),
    "a megabyte of digits": lambda r: r.choice(["%s", BOXED, "#### %s", "The answer is %s"]) % ("7" * 1_000_000),
    "signs and separators": lambda r: r.choice(["-", "1,", "1 / ", "$", " ", "####", "= ", "1e"]) * _size(r, 200_000),
    "half an answer": lambda r: r.choice(["Answer: ", "answer is ", "answer**", "####", "</think>"]) * _size(r, 50_000),
    "floods of cells": lambda r: (
        BOXED % ("\\begin{matrix}" * (n := _size(r, 60)) + "1&" * _size(r, 400) + "\\end{matrix}" * n)
    ),
    "long sums": lambda r: BOXED % "+".join(f"{r.choice('xyz')}^{r.randint(2, 99)}" for _ in range(_size(r, 160))),
    "long lists": lambda r: BOXED % ",".join(f"\\sqrt{{{r.randint(2, 99)}}}" for _ in range(_size(r, 99))),
    "endless operators": lambda r: (
        BOXED % f"\\{r.choice(['sum', 'prod', 'int'])}_{{k=1}}^{{{10 ** r.randint(1, 12)}}} {r.randint(1, 9)}^k"
    ),
    "characters": lambda r: (
        BOXED
        % "".join(
            r.choice("\0\x07\ud800\udfff\u202e\u0661\u0fff\U0001f600\u0301\ufeff½²√π−\\{}$^_&%#~")
            for _ in range(_size(r, 2000))
        )
    ),
}


def responses(count: int, seed: int) -> list[tuple[str, str]]:
    """Return (kind, response), all kinds equally often."""
    chance, kinds = random.Random(seed), list(GENERATORS)
    return [(kinds[place % len(kinds)], GENERATORS[kinds[place % len(kinds)]](chance)) for place in range(count)]
