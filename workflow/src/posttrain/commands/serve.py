"""Show how a checkpoint is served on a machine, or serve it here in the foreground."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.config.command_line import CONFIG_DIR, read_request
from posttrain.config.load import Resolved, merge
from posttrain.config.request import parse_request
from posttrain.config.schema import Hardware
from posttrain.engines.secret import SECRET_VARIABLE
from posttrain.errors import ConfigError, Problem
from posttrain.planner.flags.environment import started_with
from posttrain.planner.flags.flag import as_environment
from posttrain.planner.resolve import resolve
from posttrain.preflight.machine import check_port
from posttrain.preflight.report import raise_problems
from posttrain.serving.checkpoint import Checkpoint, find_checkpoint, of_run
from posttrain.serving.launch import Launch, plan_launch
from posttrain.serving.script import render
from posttrain.serving.wish import Wish

# What `site=` and `configs=` say of where files are; any other word describes the run whose export is served.
PLACES = ("site", "configs")


def main(
    words: Sequence[str], files: Sequence[Path], checkpoint: str, hardware: str, shows: bool, **options: Any
) -> None:
    """Find the checkpoint, put the command together, and show it or become it."""
    wish = Wish.of(options)
    request = read_request(CONFIG_DIR, files, words)
    place = {key: request[key] for key in PLACES if request.get(key)}
    described = {word.partition("=")[0] for word in words} - {*PLACES}
    found = _find(checkpoint, wish, request, place, has_run=bool(described or files))
    resolved = _machine(hardware or found.hardware, place)
    launch = plan_launch(wish, found, resolved.config, _others(place))
    if shows:
        sys.stdout.write(render(launch, found, resolved.origins))
        sys.stdout.flush()
        return
    _become(launch, wish, found)


def _find(name: str, wish: Wish, request: dict[str, Any], place: dict[str, Any], has_run: bool) -> Checkpoint:
    if bool(name) == has_run:
        value = f"{name!r} and a run" if name else "nothing"
        allowed = "one of both: a name, or the words that describe a run"
        raise ConfigError([Problem("checkpoint", value, allowed, "posttrain serve zai-org/GLM-5-FP8, say")])
    if has_run:
        return of_run(resolve(request, CONFIG_DIR), wish.precision)
    own = parse_request(place).own_folder
    results = Path(merge({"model": "tiny", "site": "local", **place}, CONFIG_DIR).config.site.results)
    return find_checkpoint(name, wish.precision, [CONFIG_DIR, *([own] if own else [])], results)


def _machine(hardware: str, place: dict[str, Any]) -> Resolved:
    """Return a configuration with the hardware; its model is a small one and not looked at."""
    if not hardware:
        known = ", ".join(_hardware_names(place))
        raise ConfigError([Problem("--hardware", "not given", known, "say what it is to be served on")])
    return merge({"model": "tiny", "site": "local", **place, "hardware": hardware}, CONFIG_DIR)


def _others(place: dict[str, Any]) -> list[Hardware]:
    return [_machine(name, place).config.hardware for name in _hardware_names(place)]


def _hardware_names(place: dict[str, Any]) -> list[str]:
    own = parse_request(place).own_folder
    folders = [CONFIG_DIR, *([own] if own else [])]
    return sorted(path.stem for folder in folders for path in (folder / "hardware").glob("*.yaml"))


def _become(launch: Launch, wish: Wish, checkpoint: Checkpoint) -> None:
    """Become the engine, so that whoever ends this ends it."""
    key, remedy = "serve", "--print shows it"
    if len(launch.processes) > 1 or launch.files:
        what = f"{len(launch.processes)} processes" if len(launch.processes) > 1 else f"files for {wish.engine}"
        raise ConfigError([Problem(key, what, "one engine on this machine", f"{remedy}; start it where it belongs")])
    if checkpoint.missing:
        raise ConfigError([Problem("checkpoint", checkpoint.place, "a folder that is there", checkpoint.missing)])
    (process,) = launch.processes
    if not shutil.which(process.argv[0]):
        found = f"no {process.argv[0]} on PATH"
        raise ConfigError([Problem("--engine", found, "an engine that is installed here", f"install it, or {remedy}")])
    if process.is_ours and not os.environ.get(SECRET_VARIABLE):
        needed = "a text that only those who may ask know"
        raise ConfigError([Problem(SECRET_VARIABLE, "not set", needed, f"export {SECRET_VARIABLE}=...")])
    raise_problems([check_port(wish.port, wish.host)])
    os.execvpe(process.argv[0], process.argv, started_with(os.environ, as_environment(process.environment)))
