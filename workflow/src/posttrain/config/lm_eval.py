"""The section `evaluation.lm_eval` of the typed configuration (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class LmEval:
    """lm-eval's suites, when the rule `lm_eval` is asked for (docs/evaluation.md)."""

    tasks: list[str] = _doc("Names of tasks or groups, of lm-eval's own or of `task_folder`", [])
    task_folder: str = _doc("Folder with task files (YAML) of your own; empty: none", "")
    num_fewshot: int = _doc("Solved examples in each prompt; -1: what the task says", -1, minimum=-1)
    limit: int = _doc("Rows of each task; 0: all", 0, minimum=0)
    chat: bool = _doc(
        "Questions are messages that the engine puts through the chat template, as training does; off: they are plain "
        "text, and tasks that compare log-probabilities run, too",
        False,
    )
    when: str = _doc("Which model: before or after training", "after", choices=("before", "after"))
    python: str = _doc("Interpreter of lm-eval's environment; empty: what `make env-lm-eval` makes in the clone", "")
