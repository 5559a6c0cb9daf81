"""Checks that a sandbox can run where responses are run: on each node of a job, in its image, or at a service."""

from __future__ import annotations

import asyncio

from posttrain.config.sandbox_needs import needs_sandbox
from posttrain.config.schema import Config
from posttrain.errors import ConfigError, Problem
from posttrain.plan.preflight.report import Finding, failed, ok, skipped
from posttrain.sandbox.guards import describe_guards
from posttrain.sandbox.messages import shared_secret
from posttrain.sandbox.program import REMEDY, Limits, Program, SandboxUnavailable

_PROBE = Program("print(6 * 7)")


def try_sandbox(config: Config) -> str:
    """Return why no program can run in the configured sandbox; "" if one can.

    Raises:
        ConfigError: The secret of the sandbox service is not set.
    """
    # Imported here: every dry run imports this module, and the client an HTTP library.
    from posttrain.sandbox.client import runner_of

    try:
        result = asyncio.run(runner_of(config.sandbox)(_PROBE, Limits.of(config.sandbox)))
    except SandboxUnavailable as error:
        return str(error)
    if result.stdout == b"42\n":
        return ""
    said = result.stderr.decode(errors="replace").strip()
    return f"a trivial program ended with {result.ended}, exit code {result.exit_code}: {said or 'no output'}"


def check_sandbox(config: Config) -> Finding:
    """Try a trivial program, if responses are run and this machine runs them."""
    where = config.sandbox.address or "this machine"
    if not needs_sandbox(config):
        return skipped("sandbox", "no response is run")
    if not config.sandbox.address and (config.site.launcher != "local" or config.site.container.runtime != "none"):
        return skipped("sandbox", "each node tries it, in the job's image")
    if problem := find_missing_secret(config):
        return Finding("sandbox", problem.value, problem)
    if reason := try_sandbox(config):
        value, allowed = f"{where}: {reason}", "a place where sandboxes can run"
        return failed("no-sandbox", "sandbox", "sandbox.address", value, allowed, REMEDY)
    return ok("sandbox", config.sandbox.address or f"runs here; {describe_guards()}")


def describe_sandbox(config: Config) -> str:
    """Return where programs run and what limits them, as far as a plan can know; "" if none are run."""
    if not needs_sandbox(config):
        return ""
    if config.sandbox.address:
        return f"{config.sandbox.address} runs the programs, and says what limits them when it starts"
    if config.site.launcher == "local" and config.site.container.runtime == "none":
        return f"this machine runs the programs; {describe_guards()}"
    told = "each node runs its programs, limited by cgroup v2 where it is delegated, otherwise by rlimits and a watcher"
    return f"{told}; a node's preflight says which, and whether it has Landlock (this machine: {describe_guards()})"


def node_sandbox(config: Config) -> str:
    """Return what limits programs on this node; "" if it runs none."""
    runs_here = needs_sandbox(config) and not config.sandbox.address
    return f"sandbox: {describe_guards()}" if runs_here else ""


def find_missing_secret(config: Config) -> Problem | None:
    """Return the problem if the secret of the sandbox service is needed and not set."""
    try:
        if config.sandbox.address and needs_sandbox(config):
            shared_secret()
    except ConfigError as error:
        return error.problems[0]
    return None


def sandbox_problems(config: Config) -> list[str]:
    """Return why a node cannot run responses; empty if it can, or need not."""
    if not needs_sandbox(config):
        return []
    if problem := find_missing_secret(config):
        return [str(problem)]
    reason = try_sandbox(config)
    return [f"sandbox: {reason}"] if reason else []
