"""Recognises public dataset formats by their columns, and locates prompt and label in each.

A format is an entry of `FORMS`. It matches a row that has its columns with values of the right type. A file's format is
the first in the table that matches at least half of the first rows, or else the one that matches most. More specific
formats precede those with a subset of their columns. The project's own format is first, so that a file with `prompt`
and `label` is read by these whatever else it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.rl.data.keys import AbsentError, parse_key

# Type tests for values.
Kind = Callable[[Any], bool]


class NoLabelError(ValueError):
    """A row has no label that a program could compare with; the text says why."""


@dataclass(frozen=True)
class Form:
    """A dataset format: where a row's prompt and label are.

    Args:
        name: Name in messages.
        fits: Required keys, and the type tests of their values.
        prompt: Key of the prompt.
        label: Key of the label; empty if there is none.
        finish: Extracts the label from the value at `label`; raises `NoLabelError` if it contains none.
        is_dialogue: The prompt's messages end with the answer, which is the label.
        left_out: Large columns that no reward reads.
    """

    name: str
    fits: Mapping[str, Kind]
    prompt: str
    label: str = ""
    finish: Callable[[Any], Any] | None = None
    is_dialogue: bool = False
    left_out: frozenset[str] = field(default=frozenset())

    def is_of(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the format's columns."""
        try:
            return all(kind(parse_key(key).find(row)) for key, kind in self.fits.items())
        except AbsentError:
            return False


def recognise(rows: Sequence[Mapping[str, Any]]) -> Form | None:
    """Return the format of a file, None if unknown.

    Args:
        rows: The file's first rows.
    """
    counts = [sum(map(form.is_of, rows)) for form in FORMS]
    most = max(counts)
    enough = min(most, (len(rows) + 1) // 2)
    return next((form for form, count in zip(FORMS, counts, strict=True) if count >= enough), None) if most else None


# ---- labels that stand in a text ----


def after_hashes(answer: str) -> str:
    """Return the text after the last `####` of a solution, without thousands separators.

    Example:
        "48 / 2 = 24 ... #### 1,072" gives "1072".
    """
    _, marked, label = answer.rpartition("####")
    if not marked or not label.strip():
        raise NoLabelError("has no answer after '####'")
    return re.sub(r"(?<=\d),(?=\d{3})", "", label.strip())


def last_boxed(solution: str) -> str:
    r"""Return the content of the last \boxed{...} with balanced braces in a solution."""
    begin = solution.rfind("\\boxed{")
    depth = 0
    for place in range(begin + len("\\boxed"), len(solution)) if begin >= 0 else ():
        depth += {"{": 1, "}": -1}.get(solution[place], 0)
        if depth == 0 and solution[begin + len("\\boxed{") : place].strip():
            return solution[begin + len("\\boxed{") : place].strip()
    raise NoLabelError("has no \\boxed{...} with an answer")


def checkable(answer: Any) -> Any:
    """Return an answer unless it is one of NuminaMath's placeholders for none."""
    if isinstance(answer, str) and answer.strip().lower() in ("", "proof", "notfound"):
        raise NoLabelError(f"is {answer.strip()!r}, which no response can be compared with")
    return answer


def of_completion(completion: Any) -> Any:
    """Return a completion's text: its only message's, or itself; several messages are returned unchanged."""
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], dict):
        message = completion[0]
        return message["content"] if message.get("content") and not message.get("tool_calls") else completion
    return completion


# ---- the table ----


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _messages(value: Any) -> bool:
    return isinstance(value, list)


def _prompt(value: Any) -> bool:
    return isinstance(value, str | list)


def _any(value: Any) -> bool:
    return True


def _marked(value: Any) -> bool:
    return isinstance(value, str) and "####" in value


def _is(*words: str) -> Kind:
    return lambda value: value in words


_VERL: Mapping[str, Kind] = {"prompt": _prompt, "data_source": _text, "reward_model.ground_truth": _any}
_SOLVED: Mapping[str, Kind] = {"problem": _text, "solution": _text}
# Reasoning traces of another model, by far the largest columns of OpenR1-Math-220k.
_TRACES = ("generations", "messages", "finish_reasons", "is_reasoning_complete", "correctness_math_verify")

FORMS = (
    Form("prompt and label", {"prompt": _prompt, "label": _any}, "prompt", "label"),
    Form("DAPO-Math-17k", {**_VERL, "data_source": _is("math_dapo")}, "prompt", "reward_model.ground_truth"),
    Form("verl", _VERL, "prompt", "reward_model.ground_truth"),
    Form("GSM8K", {"question": _text, "answer": _marked}, "question", "answer", after_hashes),
    Form(
        "OpenR1-Math-220k",
        {**_SOLVED, "answer": _any, "generations": _messages},
        "problem",
        "answer",
        checkable,
        left_out=frozenset({*_TRACES, "correctness_llama"}),
    ),
    Form("NuminaMath-1.5", {**_SOLVED, "answer": _any, "problem_type": _text}, "problem", "answer", checkable),
    Form("DeepScaleR-Preview", {**_SOLVED, "answer": _any}, "problem", "answer", checkable),
    Form(
        "NuminaMath-CoT",
        {**_SOLVED, "messages": _messages},
        "problem",
        "solution",
        last_boxed,
        left_out=frozenset({"messages"}),
    ),
    Form("TRL prompt-completion", {"prompt": _prompt, "completion": _prompt}, "prompt", "completion", of_completion),
    Form("TRL messages", {"messages": _messages}, "messages", is_dialogue=True),
    Form("TRL prompt-only", {"prompt": _prompt}, "prompt"),
)
OWN = FORMS[0]
