"""Nodes, GPUs and time of each job, for Snakemake's resources, messages, `plan.json`, refusals and costs."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.config.derived import nodes_with_spares, trainer_nodes
from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.plan.rule_chain import RuleNode, rule_chain
from posttrain.plan.sizing.evaluation import MOST_NODES, evaluation_nodes
from posttrain.plan.sizing.export_check import export_check_bytes
from posttrain.plan.sizing.precisions import compared_precisions, precision_config
from posttrain.plan.sizing.storage import Storage, storage
from posttrain.plan.timing.duration import Bandwidths, durations_seconds
from posttrain.readable import DAY, HOUR, LONGEST_IN_HOURS, counted, format_bytes

MINUTE = 60
# Longer times are in hours; below ten hours or days, with one decimal.
LONGEST_IN_MINUTES, LONGEST_WITH_DECIMAL = 100 * MINUTE, 10
# Rules whose jobs use GPUs; all others only process files.
TRAINING, SERVING = ("train", "preflight"), ("evaluate", "lm_eval", "benchmark_serving", "ask_precision")
# Uses one node, which computes in FP32, one layer at a time.
COMPARING = "compare_precisions"
# Uses one node's host memory.
CHECKING = "check_export"
# Uses the training nodes with ranks, without engines and spare nodes.
CALIBRATING = "calibrate"


@dataclass(frozen=True)
class JobNeeds:
    """Resources of one job of a rule.

    Args:
        nodes: Number of nodes, including spare ones.
        gpus: All GPUs of those nodes; 0 if the job uses none.
        time_limit: Time limit for the scheduler; empty means the site's default.
        memory_bytes: Host memory; 0 if it is small or another part of the plan states it.
        seconds: Planned duration; None if it is unknown or was not computed (`RuleNeeds.of`).
    """

    nodes: int = 1
    gpus: int = 0
    time_limit: str = ""
    memory_bytes: int = 0
    seconds: float | None = None

    @property
    def resources(self) -> dict[str, Any]:
        """Resources for Snakemake."""
        asked = {"nodes": self.nodes, "gpus": self.gpus, "runtime": self.time_limit}
        return {name: value for name, value in asked.items() if value}


def job_needs(config: Config, rule: str) -> JobNeeds:
    """Return the resources of a rule's job, without its duration, which is slower to compute: `RuleNeeds.of` adds it.

    Example:
        GLM-5 on 16 nodes of 8 H200: 16 nodes and 128 GPUs to train; 1 node and 8 GPUs to evaluate, in FP8.
    """
    per_node = config.hardware.gpus_per_node if config.hardware.device == "cuda" else 0
    if rule in SERVING:
        if config.evaluation.addresses:  # external engines use none of our GPUs
            return JobNeeds()
        nodes = evaluation_nodes(config) or 1  # a model that fits nowhere is refused elsewhere
        return JobNeeds(nodes, nodes * per_node)
    if rule == COMPARING:
        return JobNeeds(1, per_node)
    if rule == CHECKING:
        return JobNeeds(memory_bytes=export_check_bytes(config))
    if rule == CALIBRATING:
        return JobNeeds(trainer_nodes(config), trainer_nodes(config) * per_node)
    if rule not in TRAINING:
        return JobNeeds()
    if config.site.launcher != "slurm":
        return JobNeeds(config.nodes, config.nodes * per_node)
    nodes = nodes_with_spares(config)
    return JobNeeds(nodes, nodes * per_node, config.site.slurm.time_limit)


def check_compared(config: Config) -> Iterator[Problem]:
    """Yield the reasons why a precision cannot be served for the comparison."""
    if config.serving.weights == "trained" and config.engine.kind != "embedded" and config.hardware.device == "cuda":
        known = "embedded, which reads their codes as numbers; SGLang is compared in the source's precision and in FP8"
        remedy = "set serving.weights=model, or engine.kind=embedded where one GPU holds the model"
        yield Problem(
            "original-exceeds-engine",
            "engine.kind",
            f"{config.engine.kind} with {config.serving.format} weights",
            known,
            remedy,
        )
    for precision in compared_precisions(config):
        for problem in check_served(precision_config(config, precision)):
            yield dataclasses.replace(problem, key=f"compare_precisions: {precision}")


def check_served(config: Config) -> Iterator[Problem]:
    """Yield the reasons why evaluations cannot serve a model: it fits nowhere, or needs more than one machine."""
    nodes, machine = evaluation_nodes(config), f"{config.hardware.gpus_per_node} {config.hardware.name}"
    remedy = "ask for finalize_export_hf instead of all, and measure the export where there is room for it"
    in_fp8 = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, precision="fp8"))
    if not nodes:
        found = f"more than {MOST_NODES} nodes of {machine}, or as many as SGLang cannot cut the model for"
        allowed = f"a model that up to {MOST_NODES} nodes hold as one engine (engine.mem_fraction_static of each GPU)"
        yield Problem("evaluation-exceeds-nodes", "evaluate", found, allowed, remedy)
    elif nodes > 1 and config.site.launcher == "local":
        if evaluation_nodes(in_fp8) == 1:
            remedy = f"set evaluation.precision=fp8, which one node holds, or {remedy}"
        allowed = "1 with site.launcher=local, which is one machine"
        yield Problem(
            "one-machine",
            "evaluate",
            f"{nodes} nodes of {machine} hold the model",
            allowed,
            f"name a cluster, or {remedy}",
        )


class RuleNeeds:
    """The rules of a configuration with their resources; computed once, on first use.

    Args:
        config: The resolved configuration.
        rates: Assumed bandwidths.
        jobs_at_once: Number of jobs that run concurrently; None if unknown.
        is_fork: The run begins with another run's state.
    """

    def __init__(
        self,
        config: Config,
        rates: Bandwidths | None = None,
        jobs_at_once: int | None = None,
        is_fork: bool = False,
    ) -> None:
        self._config, self._is_fork = config, is_fork
        self.rates = rates or Bandwidths()
        self._jobs_at_once = jobs_at_once

    @cached_property
    def chain(self) -> list[RuleNode]:
        """The rules that lead to the report."""
        return rule_chain(self._config, self._is_fork)

    @cached_property
    def storage(self) -> Storage:
        """Bytes on disk."""
        return storage(self._config)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Durations of the rules that the planner can predict."""
        return durations_seconds(self._config, self.storage, self.rates, self._jobs_at_once)

    def of(self, job: str) -> JobNeeds:
        """Return the resources of a job by its name in the chain; "evaluate" is either of the two evaluations."""
        seconds = self.seconds.get("evaluate before" if job == "evaluate" else job)
        return dataclasses.replace(job_needs(self._config, job.partition(" ")[0]), seconds=seconds)

    def plan_part(self, workflow: Mapping[str, Any], evaluations: Mapping[str, Path]) -> list[dict[str, Any]]:
        """Return the rules for `plan.json`.

        Args:
            workflow: The request that the configuration was resolved from; used in the commands.
            evaluations: Rule name -> file, for two rules of the chain that are one of the workflow.
        """
        return [self._rule_part(node, workflow, evaluations.get(node.name)) for node in self.chain]

    def message(self, rule: str, *more: str) -> str:
        """Return the end of a rule's message: " (16 nodes, 128 GPUs, about 30 days)".

        Args:
            rule: Name of the rule.
            more: Further items.

        Returns:
            Nodes, GPUs and memory of one job; GPUs are omitted if it uses none, the time if the planner has none.
        """
        needs = self.of(rule)
        words = [counted(needs.nodes, "node"), *([counted(needs.gpus, "GPU")] if needs.gpus else [])]
        words += [f"{format_bytes(needs.memory_bytes)} of memory"] if needs.memory_bytes else []
        words += [] if needs.seconds is None else [about(needs.seconds)]
        words += more
        return f" ({', '.join(words)})"

    def _rule_part(self, node: RuleNode, workflow: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
        needs = self.of(node.name)
        given = {key: value for key, value in workflow.items() if value not in (None, "")}
        settings = [f"{key}={value}" for key, value in given.items() if not isinstance(value, Mapping)]
        own = ["--configfile", "MY.yaml"] if len(settings) < len(given) else []
        target = [str(file)] if file else ["--until", node.rule]
        command = ["snakemake", "--cores", "all", *target, *own, "--config", *settings]
        return {
            "name": node.name,
            "does": node.does,
            "after": list(node.after),
            "jobs": node.num_jobs,
            "nodes": needs.nodes,
            "gpus": needs.gpus,
            "memory_bytes": needs.memory_bytes,
            "seconds": needs.seconds,
            "command": shlex.join(command),
        }


def about(seconds: float) -> str:
    """Return a planned duration, rounded to the plan's precision.

    Example:
        3 -> "under 1 min", 1507.7 -> "about 25 min", 9000 -> "about 2.5 h", 2619841 -> "about 30 days".
    """
    if seconds < MINUTE:
        return "under 1 min"
    if seconds < LONGEST_IN_MINUTES:
        return f"about {seconds / MINUTE:.0f} min"
    size, unit = (HOUR, "h") if seconds < LONGEST_IN_HOURS else (DAY, "days")
    return f"about {seconds / size:.{1 if seconds < LONGEST_WITH_DECIMAL * size else 0}f} {unit}"
