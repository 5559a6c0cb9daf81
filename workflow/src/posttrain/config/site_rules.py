"""Rules of a site's keys that a scheduler would check only after hours in its queue, or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from posttrain.config.schema import Config
from posttrain.errors import Problem

Problems = Iterator[Problem]
TIME_LIMIT = r"(\d+)([mhd])"
# Words in the names of variables whose value must not be in any file.
SECRET_WORDS = {"KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS"}
MINUTES_OF = {"m": 1, "h": 60, "d": 24 * 60}
# Options that our keys or Snakemake's executor set: if given twice, the later one would win silently.
OUR_OPTIONS = (
    "--partition", "--account", "--qos", "--constraint", "--time", "--nodes", "--ntasks", "--cpus-per-task", "--mem",
    "--mem-per-cpu", "--gpus", "--gres", "--ntasks-per-gpu", "--cpus-per-gpu", "--exclusive", "--requeue",
    "--no-requeue", "--no-kill", "--dependency", "--job-name", "--output", "--error", "--comment", "--export",
    "--parsable", "--chdir", "--clusters",
)  # fmt: skip


def check_launcher(config: Config) -> Problems:
    """Yield the reasons why the site's launcher cannot start a configuration that can be planned."""
    if config.nodes > 1 and config.site.launcher == "local":
        remedy = "choose a site whose launcher is slurm or kubernetes, or only plan it"
        yield Problem(
            "one-machine", "nodes", str(config.nodes), "1 with site.launcher=local, which is one machine", remedy
        )


def check_preflight(config: Config) -> Problems:
    """Yield the reasons why the nodes of a configuration cannot be checked without training."""
    yield from check_launcher(config)
    if config.site.launcher == "kubernetes":
        allowed = "local or slurm to look at nodes without training"
        remedy = "training looks at its pods' nodes itself before it begins"
        yield Problem("preflight-in-pods", "site.launcher", "kubernetes", allowed, remedy)


def time_limit_minutes(limit: str) -> int:
    """Return a time limit in minutes.

    Example:
        "90m" -> 90, "7d" -> 10080.
    """
    match = re.fullmatch(TIME_LIMIT, limit)
    assert match, f"{limit!r} is no time limit"
    return int(match[1]) * MINUTES_OF[match[2]]


def _environments(config: Config) -> Problems:
    given = {f"site.{name}": getattr(config.site, name) for name in ("trainer_environment", "engine_environment")}
    for key, items in {**given, "hardware.kernels.environment": config.hardware.kernels.environment}.items():
        for item in items:
            if not re.fullmatch(r"[A-Za-z_]\w*=.*", item):
                yield Problem("not-key-value", key, repr(item), "NAME=value", "write the variable with its value")
            elif SECRET_WORDS & set((variable := item.partition("=")[0]).upper().split("_")):
                # Values are copied to the run's folder and report.
                remedy = "export it where snakemake runs, or name it in site.kubernetes.secrets"
                yield Problem("secret-in-config", key, f"{variable}=...", "variables without secrets", remedy)


def _time_limit(config: Config) -> Problems:
    slurm, key = config.site.slurm, "site.slurm.time_limit"
    if not re.fullmatch(TIME_LIMIT, slurm.time_limit):
        yield Problem(
            "not-a-duration", key, repr(slurm.time_limit), "a number with m, h or d, such as 36h", "write it like that"
        )
    elif slurm.requeue and slurm.signal_seconds >= 60 * time_limit_minutes(slurm.time_limit):
        allowed = f"less than site.slurm.time_limit ({slurm.time_limit})"
        remedy = "save later, or ask for more time"
        yield Problem(
            "signal-exceeds-time-limit", "site.slurm.signal_seconds", str(slurm.signal_seconds), allowed, remedy
        )


def _extra_options(config: Config) -> Problems:
    for word in config.site.slurm.extra_options:
        option = word.partition("=")[0].partition(" ")[0]
        if not option.startswith("--"):
            remedy = "write the long form"
            yield Problem(
                "not-a-long-option", "site.slurm.extra_options", repr(word), "--option or --option=value", remedy
            )
        elif option in OUR_OPTIONS:
            remedy = "leave it out, and set the key of site.slurm that is for it"
            allowed = "options that no other key sets"
            yield Problem("option-of-another-key", "site.slurm.extra_options", repr(word), allowed, remedy)


def _gpu_option(config: Config) -> Problems:
    option = config.site.slurm.gpu_option
    if option and not option.startswith(("--gpus-per-node=", "--gpus-per-task=")):
        allowed = "--gpus-per-node=... or --gpus-per-task=..., with {gpus} for the number; or empty"
        remedy = "Snakemake's executor keeps the others to itself"
        yield Problem("gpu-option-of-snakemake", "site.slurm.gpu_option", repr(option), allowed, remedy)


def _staged_nodes(config: Config) -> Problems:
    if config.site.launcher == "slurm" and config.site.node_names:
        allowed = "none with site.launcher=slurm: a job learns its nodes when it starts, and copies then"
        yield Problem(
            "node-names-with-slurm", "site.node_names", ", ".join(config.site.node_names), allowed, "leave it out"
        )


def _price(config: Config) -> Problems:
    if config.site.price_per_gpu_hour and not config.site.currency:
        yield Problem(
            "not-set", "site.currency", "''", "a currency beside site.price_per_gpu_hour, such as EUR", "name it"
        )


SITE_RULES: tuple[Callable[[Config], Problems], ...] = (
    _environments,
    _time_limit,
    _extra_options,
    _gpu_option,
    _staged_nodes,
    _price,
)
