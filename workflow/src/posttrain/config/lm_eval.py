"""The section `evaluation.lm_eval` of the typed configuration (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class LmEval:
    """lm-eval's suites, for the rule `lm_eval` (docs/evaluation.md)."""

    tasks: list[str] = _doc("Names of lm-eval's tasks or groups, or of tasks in `task_folder`", [])
    task_folder: str = _doc("Folder with your own task files (YAML); empty: none", "")
    num_fewshot: int = _doc("Solved examples in each prompt; -1: the task's default", -1, minimum=-1)
    limit: int = _doc("Rows of each task; 0: all", 0, minimum=0)
    chat: bool = _doc(
        "Send questions as messages, with the chat template as in training; off: send plain text, which "
        "also allows tasks that compare log-probabilities",
        False,
    )
    when: str = _doc("Evaluate the model before or after training", "after", choices=("before", "after"))
    python: str = _doc(
        "Interpreter of lm-eval's environment; empty: the one that `make env-lm-eval` installs in the clone", ""
    )
