"""Show how a checkpoint is served on a machine, serve it here in the foreground, or check a server that runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.checkpoint.canary import CANARY_NAME, read_canary
from posttrain.config.command_line import CONFIG_DIR, read_request
from posttrain.config.load import Resolved, merge
from posttrain.config.request import parse_request
from posttrain.config.schema import Hardware
from posttrain.engines.secret import SECRET_VARIABLE
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.planner.resolve import resolve
from posttrain.preflight.machine import check_port
from posttrain.preflight.report import raise_problems
from posttrain.serving.canary import hold, told
from posttrain.serving.checkpoint import Checkpoint, find_checkpoint, of_run
from posttrain.serving.foreground import serve_in_foreground
from posttrain.serving.launch import Launch, Process, plan_launch, url_of
from posttrain.serving.script import render
from posttrain.serving.wish import Wish

# What `site=` and `configs=` say of where files are; any other word describes the run whose export is served.
PLACES = ("site", "configs")
# A server that is asked whether it is right says itself that it is ready.
CHECK_SECONDS = 30.0


def main(
    words: Sequence[str],
    files: Sequence[Path],
    checkpoint: str,
    hardware: str,
    shows: bool,
    checks: str | None,
    **options: Any,
) -> None:
    """Find the checkpoint, put the command together, and show it or run it; or ask a server that runs."""
    wish = Wish.of(options)
    request = read_request(CONFIG_DIR, files, words)
    place = {key: request[key] for key in PLACES if request.get(key)}
    described = {word.partition("=")[0] for word in words} - {*PLACES}
    found = _find(checkpoint, wish, request, place, has_run=bool(described or files))
    if checks:
        _check(checks, found)
        return
    resolved = _machine(hardware or found.hardware, place)
    launch = plan_launch(wish, found, resolved.config, _others(place))
    if shows:
        sys.stdout.write(render(launch, found, resolved.origins))
        sys.stdout.flush()
        return
    sys.exit(_serve(launch, wish, found))


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


def _check(address: str, checkpoint: Checkpoint) -> None:
    """Hold a server against a checkpoint's canary, and say how near it is.

    Raises:
        ConfigError: The checkpoint has none, or the server serves something else.
        RuntimeError: It cannot be asked.
    """
    canary = read_canary(Path(checkpoint.place)) if checkpoint.is_folder else None
    if canary is None:
        allowed = "a folder that training has exported, with what its trainer says of four prompts"
        remedy = "export the run with this version; other checkpoints have nothing to be held against"
        raise ConfigError([Problem(CANARY_NAME, f"not in {checkpoint.place}", allowed, remedy)])
    url = address if "://" in address else f"http://{address}"
    secret = os.environ.get(SECRET_VARIABLE, "")
    held = asyncio.run(hold(url, secret, canary, checkpoint.precision, CHECK_SECONDS))
    print(f"{url} serves {checkpoint.place}: {told(held, checkpoint.precision)}")


def _serve(launch: Launch, wish: Wish, checkpoint: Checkpoint) -> int:
    """Run the engine in the foreground; returns its exit code."""
    key, remedy = "serve", "--print shows it"
    if len(launch.processes) > 1 or launch.files:
        what = f"{len(launch.processes)} processes" if len(launch.processes) > 1 else f"files for {wish.engine}"
        raise ConfigError([Problem(key, what, "one engine on this machine", f"{remedy}; start it where it belongs")])
    if checkpoint.missing:
        raise ConfigError([Problem("checkpoint", checkpoint.place, "a folder that is there", checkpoint.missing)])
    (process,) = launch.processes
    raise_if_any(list(_lacking(process, launch)))
    raise_problems([check_port(wish.port, wish.host)])
    folder = Path(checkpoint.place) if checkpoint.is_folder else None
    return serve_in_foreground(process, url_of(wish), folder, checkpoint.precision, launch.ready_seconds)


def _lacking(process: Process, launch: Launch) -> Iterator[Problem]:
    """Yield what this machine lacks to start an engine."""
    remedy = "--print shows the command"
    if not shutil.which(process.argv[0]):
        found = f"no {process.argv[0]} on PATH"
        yield Problem("--engine", found, "an engine that is installed here", f"install it; {remedy}")
    if launch.compiles and not shutil.which("nvcc"):
        needed = f"CUDA's compiler: {launch.compiles}"
        yield Problem("nvcc", "not on PATH", needed, f"put CUDA's bin folder on PATH; {remedy}")
    if process.is_ours and not os.environ.get(SECRET_VARIABLE):
        needed = "a text that only those who may ask know"
        yield Problem(SECRET_VARIABLE, "not set", needed, f"export {SECRET_VARIABLE}=...")
