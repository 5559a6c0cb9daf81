"""Requirements of the rule `lm_eval`: named tasks, and lm-eval in its own environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import posttrain
from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.plan.preflight.machine import check_interpreter
from posttrain.plan.preflight.report import Finding, failed, skipped

KEY = "evaluation.lm_eval"
# Path of the environment from `make env-lm-eval`.
MADE = Path(posttrain.__file__).resolve().parents[3] / ".envs" / "lm-eval" / "bin" / "python"


def lm_eval_python(config: Config) -> str:
    """Return the interpreter that runs lm-eval."""
    return config.evaluation.lm_eval.python or str(MADE)


def check_lm_eval(config: Config) -> Finding:
    """Check lm-eval's requirements if tasks are named."""
    if not config.evaluation.lm_eval.tasks:
        return skipped("lm-eval", f"{KEY}.tasks names none")
    if problem := next(find_lm_eval_problems(config), None):
        return Finding("lm-eval", problem.value, problem)
    return _check_environment(config)


def find_lm_eval_problems(config: Config) -> Iterator[Problem]:
    """Yield problems that prevent lm-eval from running: no task, a missing folder, or no lm-eval."""
    wanted = config.evaluation.lm_eval
    if not wanted.tasks:
        remedy = f"set='{KEY}.tasks=[gsm8k]', for example; `lm_eval ls tasks` of its environment lists all"
        yield Problem("not-set", f"{KEY}.tasks", "[]", "names of lm-eval's tasks", remedy)
    if wanted.task_folder and not os.path.isdir(wanted.task_folder):
        remedy = "name the folder that holds the tasks' YAML files, or leave it empty"
        yield Problem("no-such-folder", f"{KEY}.task_folder", wanted.task_folder, "a folder that exists", remedy)
    if problem := _check_environment(config).problem:
        yield problem


def _check_environment(config: Config) -> Finding:
    key, python = f"{KEY}.python", lm_eval_python(config)
    if config.site.launcher == "kubernetes" or config.site.container.runtime != "none":
        return skipped(key, f"{python} is in the image")
    found = check_interpreter(key, python, "lm_eval")
    if found.problem is None:
        return found
    remedy = f"`make env-lm-eval` in the clone, or set='{key}=PATH' to the interpreter of an environment that has it"
    return failed("interpreter-unusable", found.name, key, found.problem.value, found.problem.allowed, remedy)
