"""Make a configuration from a launch script of slime or miles, and list the flags that have no key here."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.config.command_line import CONFIG_DIR, read_request
from posttrain.errors import ConfigError, Problem, one_line, raise_if_any
from posttrain.store import write_text
from posttrain_import.config_file import render
from posttrain_import.importing import Told, import_flags
from posttrain_import.launcher import read_launcher
from posttrain_import.model_names import model_of
from posttrain_import.script import Script, read_text
from posttrain_import.shell import read_shell
from posttrain_import.table import ROWS

# Patterns that identify scripts of unsupported trainers.
_OTHERS = {
    "verl": re.compile(r"^[^#\n]*(\bverl\.(trainer|recipe)|\bactor_rollout_ref\.|(from|import) verl\b)", re.MULTILINE),
    "TRL": re.compile(r"^[^#\n]*(\btrl (grpo|rloo|sft|dpo)\b|\b(from|import) trl\b|\bGRPOConfig\()", re.MULTILINE),
    "OpenRLHF": re.compile(r"\bopenrlhf\.(cli|trainer)\b"),
}
WIDTH = 140
TITLES = {
    "taken": "taken over",
    "same": "already our default",
    "otherwise": "always so, or otherwise here",
    "missed": "not taken over",
}


def main(words: Sequence[str], script: Path, output: Path | None) -> None:
    """Read the script, write the configuration, print the tables, and raise the configuration's problems."""
    asked = read_request(CONFIG_DIR, (), words)
    # Only names on the command line count, not those of workflow.yaml.
    names = {key: value for key, value in asked.items() if any(word.startswith(f"{key}=") for word in words)}
    if output and output.exists():
        remedy = "give another name, or delete it"
        raise ConfigError([Problem("file-exists", "--output", str(output), "a file that is not there yet", remedy)])
    found = import_flags(*_read(script, names), CONFIG_DIR)
    text = render(found, script.name)
    if output:
        write_text(output, text)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()
    console = Console(width=WIDTH, highlight=False, stderr=output is None)
    for name, title in TITLES.items():
        if rows := getattr(found, name):
            console.print(_table(title, rows), "")
    if output:
        console.print(f"configuration: {output.resolve()}", markup=False, soft_wrap=True)
    raise_if_any(found.problems, "The configuration is written as in the script; correct it there.")


def _read(script: Path, names: Mapping[str, Any]) -> tuple[Script, dict[str, Any]]:
    """Return the script's flags, and the names that select configuration files."""
    # A launcher gets the number of nodes on its own command line.
    known = {"num_nodes": names["nodes"]} if "nodes" in names else {}
    _refuse_others(script)
    found = read_launcher(script, known) if script.suffix == ".py" else read_shell(script)
    _refuse_fine_tuning(found)
    if not any(name in ROWS for name in found.flags):
        allowed = "a launch script with flags of slime's or miles' train.py"
        remedy = "give the script that starts the training (docs/coming-from.md says which layouts are read)"
        raise ConfigError([Problem("no-known-flag", str(script), "no flag that is known here", allowed, remedy)])
    if "model" in names:
        return found, dict(names)
    own = [Path(str(names["configs"])).expanduser()] if names.get("configs") else []
    return found, {"model": model_of(found, [CONFIG_DIR, *own]), **names}


def _refuse_others(script: Path) -> None:
    """Reject a script of an unsupported trainer."""
    text = read_text(script)
    for name, mark in _OTHERS.items():
        if mark.search(text):
            allowed = "a launch script of slime or miles"
            remedy = f"{name}'s settings are not read; docs/coming-from.md has them beside our keys"
            raise ConfigError([Problem("other-framework", str(script), f"a script of {name}", allowed, remedy)])


def _refuse_fine_tuning(found: Script) -> None:
    """Reject supervised fine-tuning, in which other flags have another meaning than in RL."""
    for name, mark in (("--loss-type", "sft_loss"), ("--rollout-function-path", "sft_rollout")):
        given = found.flags.get(name)
        if given and mark in " ".join(given.values):
            allowed = "the flags of a training with rewards"
            remedy = "begin with recipe=sft and set its keys (docs/algorithms.md)"
            raise ConfigError(
                [Problem("fine-tuning-flags", name, f"{' '.join(given.values)} ({given.place})", allowed, remedy)]
            )


def _table(title: str, rows: Sequence[Told]) -> Table:
    table = Table(show_edge=False, header_style="bold", title=f"{title}: {len(rows)}", title_justify="left")
    for name in ("flag", "value", "here", "where"):
        table.add_column(name, overflow="fold")
    for told in rows:
        table.add_row(*(Text(one_line(part)) for part in (told.flag, told.value, told.about, told.place)))
    return table
