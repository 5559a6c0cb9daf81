"""Parses a user's request: names that choose files, and sections with values.

Snakemake passes one mapping: `config/workflow.yaml`, updated by the files of `--configfile` and then by `--config`. Its
keys are names (`model: glm5`) and sections of the configuration (`optimizer: {lr: 1e-4}`). `model`, `hardware` and
`site` are both: as a section, they name the file that they change with the key `name`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.config import schema
from posttrain.config.fields import did_you_mean, is_misread_text
from posttrain.errors import Problem

# Keys of `--config` and workflow.yaml that are no sections.
WORKFLOW_KEYS = (
    "model",
    "recipe",
    "nodes",
    "hardware",
    "site",
    "suites",
    "configs",
    "run",
    "fork",
    "set",
    "gc",
    "quick",
    "lengths",
    "expert_imbalance",
)
# Text keys among these. Snakemake reads text that looks like a number as one: `run=12e4567` becomes infinity.
TEXTS = ("model", "recipe", "hardware", "site", "suites", "configs", "run", "fork", "set", "lengths")
SECTIONS = tuple(field.name for field in dataclasses.fields(schema.Config) if field.name != "nodes")
# Sections whose file is chosen by name.
CHOSEN = ("model", "hardware", "site")
# A run's name becomes a folder's.
RUN_NAME = r"[A-Za-z][A-Za-z0-9._-]{0,99}"
# A folder next to the runs.
RESERVED_NAMES = ("plans", "serving")
# A run and the number of finished steps to keep, which must have a checkpoint.
FORK = rf"{RUN_NAME}@[1-9][0-9]*"


@dataclasses.dataclass(frozen=True)
class Request:
    """The parsed request of a user.

    Args:
        names: Key -> value of keys outside sections and of keys that choose files; text keys have text values.
        sections: Section -> its values, nested as in a file.
        problems: Problems of rejected values.
    """

    names: Mapping[str, Any]
    sections: Mapping[str, Mapping[Any, Any]]
    problems: tuple[Problem, ...]

    @property
    def own_folder(self) -> Path | None:
        """The user's own folder, with the layout of `config/`."""
        return Path(str(self.names["configs"])).expanduser() if self.names.get("configs") else None

    @property
    def suites(self) -> list[str]:
        """Names of evaluation suites: `suites=gsm8k,math500`, or a list in a file."""
        given = self.names.get("suites") or []
        return [str(name) for name in given] if isinstance(given, list) else str(given).split(",")


def parse_request(workflow: Mapping[str, Any]) -> Request:
    """Sort the keys that Snakemake passes, and check those that are no sections."""
    names: dict[str, Any] = {}
    problems: list[Problem] = []
    sections: dict[str, Mapping[Any, Any]] = {}
    for key, value in ((str(key), value) for key, value in workflow.items()):
        if key in SECTIONS and isinstance(value, Mapping):
            sections[key] = value
            if key in CHOSEN:
                names[key] = value.get("name")
        else:
            names[key] = value
    for key in TEXTS:
        if is_misread_text(names.get(key), list[str] if key == "suites" else str):
            remedy = (
                f'choose another name, which begins with a letter, or write {key}: "..." in a file for --configfile'
            )
            problems.append(
                Problem("wrong-type", key, f"{names[key]!r}, which is no text", "a letter, then more of a name", remedy)
            )
            names[key] = None
    return Request(names, sections, (*problems, *_problems(names)))


def is_count(value: Any) -> bool:
    """Return whether a value is a valid number of nodes."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _problems(names: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in names.items():
        if key not in WORKFLOW_KEYS:
            yield _unknown(key, value)
    nodes, run = names.get("nodes"), names.get("run")
    if nodes is not None and not is_count(nodes):
        yield Problem("not-a-count", "nodes", repr(nodes), "a whole number of at least 1", "give the number of nodes")
    if names.get("gc", "show") not in ("show", "delete"):
        yield Problem("unknown-choice", "gc", repr(names["gc"]), "show, delete", "show deletes nothing")
    if names.get("quick") not in (None, 0, 1, True, False):
        yield Problem(
            "unknown-choice", "quick", repr(names["quick"]), "1 or 0", "quick=1 rehearses few layers and stages"
        )
    imbalance = names.get("expert_imbalance")
    is_number = isinstance(imbalance, int | float) and not isinstance(imbalance, bool)
    if imbalance is not None and not (is_number and 1 <= imbalance < math.inf):
        allowed = "a number of at least 1: rows at the busiest rank's experts over the mean"
        yield Problem(
            "out-of-range", "expert_imbalance", repr(imbalance), allowed, "expert_imbalance=2 rehearses twice the mean"
        )
    if run is not None and (not re.fullmatch(RUN_NAME, str(run)) or run in RESERVED_NAMES):
        allowed = f"a letter, then letters, digits, '.', '_' or '-'; at most 100; not {' or '.join(RESERVED_NAMES)}"
        yield Problem("not-a-name", "run", repr(run), allowed, "choose another name")
    yield from _fork_problems(names.get("fork"), run)
    configs = names.get("configs")
    if configs and not Path(str(configs)).expanduser().is_dir():
        remedy = "correct the path"
        yield Problem(
            "no-such-folder", "configs", repr(configs), "a folder with models/, sites/ or recipes/ in it", remedy
        )


def _unknown(key: str, value: Any) -> Problem:
    if key in SECTIONS:
        remedy = f"give its values: {key}: {{...}} in a file for --configfile, or set='{key}.KEY=VALUE'"
        return Problem("not-a-section", key, repr(value), "a section with values of its own", remedy)
    near = did_you_mean(key, SECTIONS if isinstance(value, Mapping) else WORKFLOW_KEYS)
    remedy = near or f"put it into set='...': set='{key}={value}'"
    return Problem(
        "unknown-key", key, repr(value), f"{', '.join(WORKFLOW_KEYS)}, or a section of config/README.md", remedy
    )


def _fork_problems(fork: Any, run: Any) -> Iterator[Problem]:
    if fork is not None and not re.fullmatch(FORK, str(fork)):
        allowed = "RUN@STEP: a run's name and a step of which it has a checkpoint"
        yield Problem(
            "not-a-run-at-step", "fork", repr(fork), allowed, "`snakemake status --cores 1` shows runs and steps"
        )
    elif fork is not None and str(fork).partition("@")[0] == str(run):
        yield Problem("fork-of-itself", "fork", repr(fork), "another run than run=", "give the fork a name of its own")
