"""Print the command that serves a checkpoint on a machine, serve it in the foreground, or check a running server."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.checkpoint.reference_logprobs import CANARY_NAME, read_reference_logprobs
from posttrain.cluster.slurm_query import job_is_alive
from posttrain.config.command_line import CONFIG_DIR, read_request
from posttrain.config.load import Resolved, merge
from posttrain.config.request import parse_request
from posttrain.config.schema import Config, Hardware
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.plan.preflight.machine import check_port
from posttrain.plan.preflight.report import raise_problems
from posttrain.plan.resolve import resolve
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.reference_logprobs import hold, told
from posttrain.rl.engines.secret import SECRET_VARIABLE
from posttrain_serving.checkpoint import Checkpoint, find_checkpoint, of_run
from posttrain_serving.foreground import serve_in_foreground, told_to_end
from posttrain_serving.launch import Launch, Process, plan_launch, url_of
from posttrain_serving.script import render
from posttrain_serving.serve_request import LOCAL, ServeRequest
from posttrain_serving.servers import (
    Server,
    digest_of,
    server_file,
    serving,
    this_machine,
    visible_gpus,
    write_server,
)
from posttrain_serving.slurm_servers import job_of_this_process, place_in_job, stop, submit

# These keys only locate files; any other argument describes the run whose export is served.
PLACES = ("site", "configs")
# DeepGEMM, whose kernels vLLM compiles: installed separately or with vLLM, relative to its environment.
DEEP_GEMM = tuple(
    f"lib/python3*/{packages}/{name}"
    for name in ("deep_gemm", "vllm/third_party/deep_gemm")
    for packages in ("site-packages", "dist-packages")
)
CUTLASS = "include/cutlass/cutlass.h"
# A checked server should already be healthy.
CHECK_SECONDS = 30.0


def main(
    words: Sequence[str],
    files: Sequence[Path],
    checkpoint: str,
    hardware: str,
    shows: bool,
    checks: str | None,
    stops: bool,
    **options: Any,
) -> None:
    """Find the checkpoint and plan the launch, then print or run it; or check or stop a running server."""
    serve_request = ServeRequest.of(options)
    request = read_request(CONFIG_DIR, files, words)
    place = {key: request[key] for key in PLACES if request.get(key)}
    has_run = bool({word.partition("=")[0] for word in words} - {*PLACES} or files)
    results = Path(merge({"model": "tiny", "site": "local", **place}, CONFIG_DIR).config.site.results)
    name = checkpoint or (resolve(request, CONFIG_DIR).run if has_run else "")
    if stops:
        print("\n".join(stop(results, name)))
        return
    found = _find(checkpoint, serve_request, request, place, has_run, results)
    if checks:
        _check(checks, found)
        return
    resolved = _machine(hardware or found.hardware, place)
    job = job_of_this_process()
    rank, first_node = place_in_job() if job else (0, "")
    serve_request = replace(serve_request, first_node=first_node)
    launch = plan_launch(serve_request, found, resolved.config, _others(place))
    if shows:
        sys.stdout.write(render(launch, found, resolved.origins))
        sys.stdout.flush()
        return
    _check_launch(launch, serve_request, found)
    is_folder, config = found.is_folder, resolved.config
    server = Server(
        name,
        found.place,
        digest_of(Path(found.place)) if is_folder else "",
        serve_request.engine,
        "",
        serve_request.port,
    )
    if config.site.launcher == "slurm" and not job:
        again = [*([checkpoint] if checkpoint else []), *words, *_spelled(files, hardware, options)]
        _submit(launch, serve_request, config, results, server, again)
        return
    sys.exit(_serve(launch, serve_request, found, config, results, replace(server, job=job), rank))


def _find(
    name: str, serve_request: ServeRequest, request: dict[str, Any], place: dict[str, Any], has_run: bool, results: Path
) -> Checkpoint:
    if bool(name) == has_run:
        value = f"{name!r} and a run" if name else "nothing"
        allowed = "one of both: a name, or the words that describe a run"
        raise ConfigError(
            [Problem("not-one-checkpoint", "checkpoint", value, allowed, "posttrain serve zai-org/GLM-5-FP8, say")]
        )
    if has_run:
        return of_run(resolve(request, CONFIG_DIR), serve_request.precision)
    own = parse_request(place).own_folder
    return find_checkpoint(name, serve_request.precision, [CONFIG_DIR, *([own] if own else [])], results)


def _machine(hardware: str, place: dict[str, Any]) -> Resolved:
    """Return a configuration with the hardware; its model is a small placeholder."""
    if not hardware:
        known = ", ".join(_hardware_names(place))
        raise ConfigError([Problem("not-set", "--hardware", "not given", known, "name the hardware to serve on")])
    return merge({"model": "tiny", "site": "local", **place, "hardware": hardware}, CONFIG_DIR)


def _others(place: dict[str, Any]) -> list[Hardware]:
    return [_machine(name, place).config.hardware for name in _hardware_names(place)]


def _hardware_names(place: dict[str, Any]) -> list[str]:
    own = parse_request(place).own_folder
    folders = [CONFIG_DIR, *([own] if own else [])]
    return sorted(path.stem for folder in folders for path in (folder / "hardware").glob("*.yaml"))


def _check(address: str, checkpoint: Checkpoint) -> None:
    """Compare a server with a checkpoint's reference log-probabilities, and print the difference.

    Raises:
        ConfigError: The checkpoint has none, the server's weights differ, or the server does not answer.
    """
    canary = read_reference_logprobs(Path(checkpoint.place)) if checkpoint.is_folder else None
    if canary is None:
        allowed = "a folder that training has exported, with what its trainer says of four prompts"
        remedy = "export the run with this version; other checkpoints have no reference log-probabilities"
        raise ConfigError(
            [Problem("no-reference-logprobs", CANARY_NAME, f"not in {checkpoint.place}", allowed, remedy)]
        )
    url = address if "://" in address else f"http://{address}"
    secret = os.environ.get(SECRET_VARIABLE, "")
    try:
        held = asyncio.run(hold(url, secret, canary, checkpoint.precision, CHECK_SECONDS))
    except EngineError as error:
        allowed = "a server that is healthy and computes log-probabilities of a prompt"
        remedy = f"start it, or correct the address; where it wants a secret, export {SECRET_VARIABLE}"
        raise ConfigError([Problem("server-unusable", "--check", f"{url}: {error}", allowed, remedy)]) from error
    print(f"{url} serves {checkpoint.place}: {told(held)}")


def _check_launch(launch: Launch, serve_request: ServeRequest, checkpoint: Checkpoint) -> None:
    """Reject a launch that needs files or several engines, or whose checkpoint is missing."""
    key, remedy = "serve", "--print shows it; start it where it belongs"
    if launch.files or serve_request.prefill_apart:
        what = f"files for {serve_request.engine}" if launch.files else f"{len(launch.processes)} processes"
        raise ConfigError([Problem("one-machine", key, what, "one engine", remedy)])
    if checkpoint.missing:
        raise ConfigError(
            [
                Problem(
                    "no-such-checkpoint", "checkpoint", checkpoint.place, "a folder that is there", checkpoint.missing
                )
            ]
        )


def _submit(
    launch: Launch, serve_request: ServeRequest, config: Config, results: Path, server: Server, words: Sequence[str]
) -> None:
    """Submit a job with the launch's number of nodes, and print its number."""
    found = list(_without_secret(launch.processes[0]))
    if serve_request.host in LOCAL:
        allowed = "an address that other machines reach, such as 0.0.0.0"
        remedy = "set it; anyone who reaches the node can send requests (docs/serving.md)"
        found.append(Problem("not-reachable", "--host", serve_request.host, allowed, remedy))
    raise_if_any(found)
    name = serve_request.name or Path(server.name).name
    job, log = submit(config, results, server.checkpoint, words, name, launch.size.nodes)
    if not server_file(results, in_job := replace(server, job=job)).exists():  # it may run already
        write_server(results, in_job)
    print(f"job {job} serves {server.checkpoint} on {launch.size.nodes} nodes of {config.hardware.name}; log: {log}")
    print(f"posttrain serve {job.partition(':')[2]} --stop ends it")


def _spelled(files: Sequence[Path], hardware: str, options: Mapping[str, Any]) -> list[str]:
    """Return options as command-line arguments."""
    named = {"hardware": hardware, **options}
    spelled = {f"--{name.replace('_', '-')}": value for name, value in named.items() if value}
    words = [word for flag, value in spelled.items() for word in ([flag] if value is True else [flag, str(value)])]
    return [*words, *(word for file in files for word in ("--configfile", str(file.absolute())))]


def _serve(
    launch: Launch,
    serve_request: ServeRequest,
    checkpoint: Checkpoint,
    config: Config,
    results: Path,
    server: Server,
    rank: int,
) -> int:
    """Run the engine, or this node's part of it, in the foreground; return its exit code."""
    if len(launch.processes) > 1 and not server.job:
        allowed, remedy = "one engine on this machine", "site= of a SLURM serves it as a job; --print shows it"
        raise ConfigError([Problem("one-machine", "serve", f"{len(launch.processes)} processes", allowed, remedy)])
    process, has_gpus = launch.processes[rank], config.hardware.device == "cuda"
    raise_if_any(list(_lacking(process, launch)))
    gpus = visible_gpus(launch.size.num_gpus // launch.size.nodes) if has_gpus else ()
    folder = Path(checkpoint.place) if checkpoint.is_folder else None
    with told_to_end(), serving(results, replace(server, host=this_machine(), gpus=gpus), job_is_alive, rank == 0):
        raise_problems([check_port(serve_request.port, serve_request.host)] if rank == 0 else [])
        url = url_of(serve_request) if rank == 0 else ""
        return serve_in_foreground(process, url, folder, checkpoint.precision, launch.ready_seconds)


def _without_secret(process: Process) -> Iterator[Problem]:
    if process.is_ours and not os.environ.get(SECRET_VARIABLE):
        needed = "a text that only those who may ask know"
        yield Problem("secret-not-set", SECRET_VARIABLE, "not set", needed, f"export {SECRET_VARIABLE}=...")


def _lacking(process: Process, launch: Launch) -> Iterator[Problem]:
    """Yield what this machine lacks to start the engine."""
    remedy = "--print shows the command"
    if not shutil.which(process.argv[0]):
        found = f"no {process.argv[0]} on PATH"
        yield Problem("program-missing", "--engine", found, "an engine that is installed here", f"install it; {remedy}")
    if launch.compiles and not shutil.which("nvcc"):
        needed = f"CUDA's compiler: {launch.compiles}"
        yield Problem("program-missing", "nvcc", "not on PATH", needed, f"put CUDA's bin folder on PATH; {remedy}")
    if launch.compiles and (package := _deep_gemm_of(process.argv[0])) and not (package / CUTLASS).exists():
        needed = f"CUTLASS's headers, with which it is compiled: {launch.compiles}"
        reinstall = "install vLLM's wheel anew, or build DeepGEMM with its submodules"
        yield Problem("package-missing", str(package), f"has no {CUTLASS}", needed, f"{reinstall}; {remedy}")
    yield from _without_secret(process)


def _deep_gemm_of(program: str) -> Path | None:
    """Return DeepGEMM's package in a program's environment; None without one, when nothing is compiled."""
    found = Path(shutil.which(program) or program).resolve()
    return next((path for pattern in DEEP_GEMM for path in sorted(found.parent.parent.glob(pattern))), None)
