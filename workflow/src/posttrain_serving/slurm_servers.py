"""Runs `posttrain serve` as a SLURM job, and stops servers."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from posttrain.cluster.container import make_shared_roots, srun_options, wrap
from posttrain.cluster.slurm_job import options_of_nodes
from posttrain.cluster.slurm_query import JOB_PREFIX, ask, job_is_alive, job_number
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem
from posttrain.store.lease import Holder
from posttrain_serving.servers import FOLDER, Server, holder_of, is_server, named, read_servers, this_machine

# An engine has 10 s to end, and SLURM needs up to 30 s to notice; child processes need some more.
STOP_SECONDS, LOOK_SECONDS = 90.0, 0.5
# Prefix of our jobs' names.
JOB_NAME = "serve-"
# The job's first node; only jobs of `submit` have it, and only those are ours to end. Images have no `scontrol`.
JOB_VARIABLE = "POSTTRAIN_SERVING_JOB"


def job_of_this_process() -> str:
    """Return the name in leases of this process's job, if `submit` made it; else empty."""
    number = os.environ.get("SLURM_JOB_ID", "") if os.environ.get(JOB_VARIABLE) else ""
    return f"{JOB_PREFIX}{number}" if number else ""


def place_in_job() -> tuple[int, str]:
    """Return this process's task number in the job, from 0, and the name of the job's first node."""
    return int(os.environ["SLURM_PROCID"]), os.environ[JOB_VARIABLE]


def submit(
    config: Config, results: Path, checkpoint: str, words: Sequence[str], name: str, nodes: int
) -> tuple[str, Path]:
    """Submit a job that runs `posttrain serve` with these words on each of its nodes, in the site's image.

    Args:
        config: Has the site and the hardware.
        results: Gets the job's log.
        checkpoint: The checkpoint; a folder is mounted in the image.
        words: Arguments of this command line.
        name: Name for the job.
        nodes: Number of nodes.

    Returns:
        The job's name in leases, and the path of its log.

    Raises:
        RuntimeError: SLURM rejects the job.
    """
    log = results.absolute() / FOLDER / "slurm-%j.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # If one task ends, end the others: a part of an engine cannot serve.
    run = ["srun", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    make_shared_roots(config)
    source = replace(config.model.source, kind="folder" if Path(checkpoint).is_dir() else "hub", folder=checkpoint)
    shown = replace(config, model=replace(config.model, source=source))
    served = wrap([sys.executable, "-m", "posttrain", "serve", *words], shown, with_disk=False)
    command = shlex.join([*run, *srun_options(shown, with_disk=False), *served])
    options = [*options_of_nodes(config, nodes), f"--job-name={JOB_NAME}{name}", f"--output={log}"]
    script = f"exec env {JOB_VARIABLE}=$SLURMD_NODENAME {command}"
    number = ask("sbatch", "--parsable", *options, "--wrap", script).partition(";")[0]
    return f"{JOB_PREFIX}{number}", Path(str(log).replace("%j", number))


def stop(results: Path, name: str) -> list[str]:
    """Stop the servers of a name, and return one line per server.

    Stopping a server that already ended is not an error.

    Args:
        results: Folder in which servers are registered.
        name: Name of the request, a folder, or a job number; may be empty if there is only one server.

    Raises:
        ConfigError: Several servers match, or it cannot be ended from here.
        RuntimeError: The server does not end.
    """
    found = named(read_servers(results), name)
    if len({server.name for _, server in found}) > 1:
        listed = "; ".join(str(server) for _, server in found)
        raise ConfigError([Problem("several-servers", "--stop", listed, "one of them", "posttrain serve NAME --stop")])
    if not found:
        return [f"no server of {name or 'anybody'} is known in {results / FOLDER}: there is nothing to end"]
    return [_stop(results, path, server) for path, server in found]


def _stop(results: Path, path: Path, server: Server) -> str:
    if server.job and job_is_alive(server.job) is not False:
        _cancel(server)
    else:
        holder = holder_of(results, server, job_is_alive) if server.host else None
        if holder is None:
            path.unlink(missing_ok=True)
            return f"{server} had ended without a word: its lease was stale, and is gone"
        _end(results, server, holder)
    deadline = time.monotonic() + STOP_SECONDS
    while _lives(results, server):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{server} was told to end, and still runs after {STOP_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
    path.unlink(missing_ok=True)
    return f"{server} has ended"


def _lives(results: Path, server: Server) -> bool:
    if server.job:
        return job_is_alive(server.job) is not False
    return holder_of(results, server, job_is_alive) is not None


def _cancel(server: Server) -> None:
    number = job_number(server.job)
    try:
        # Anyone who can write into the results folder could name any job, or an option of `scancel`.
        told = ask("squeue", "--noheader", "--states", "all", "--jobs", number, "--format", "%u %j")
        user, _, name = told.partition(" ")
        if not number.isdecimal() or user != getpass.getuser() or not name.startswith(JOB_NAME):
            raise RuntimeError(f"it is job {name!r} of {user!r}" if told else "there is no such job")
        ask("scancel", number)
    except RuntimeError as error:
        remedy = "run this on a node with SLURM's programs, as the job's user"
        raise ConfigError(
            [Problem("no-such-job", "--stop", f"{server}: {error}", "a job of yours that serves", remedy)]
        ) from error


def _end(results: Path, server: Server, holder: Holder) -> None:
    if server.host != this_machine():
        remedy = f"run it on {server.host}"
        raise ConfigError(
            [Problem("server-elsewhere", "--stop", str(server), f"a server of {this_machine()}, or a job", remedy)]
        )
    try:
        process = psutil.Process(holder.pid)
        # Anyone who can write into the results folder could name any process of this user.
        if "serve" not in process.cmdline() or not is_server(results, server, holder):
            allowed = "the `posttrain serve` process that took the lease"
            remedy = f"check what it is, then `kill {holder.pid}`"
            raise ConfigError([Problem("not-our-process", "--stop", f"{server}, by {holder}", allowed, remedy)])
        process.terminate()
    except psutil.NoSuchProcess:
        pass
    except (psutil.AccessDenied, PermissionError) as error:
        raise ConfigError(
            [Problem("server-of-another-user", "--stop", f"{server}, by {holder}", "a server of yours", "ask its user")]
        ) from error
