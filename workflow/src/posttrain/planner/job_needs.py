"""What each rule takes: nodes, GPUs and time, for `plan.json` and for the messages of the dry run alike.

Both read the same chain of rules and the same durations, so that they cannot differ.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.config.schema import Config
from posttrain.observability.report_format import DAY, HOUR, LONGEST_IN_HOURS, counted
from posttrain.observability.rule_chain import RuleNode, rule_chain
from posttrain.planner.sizing.evaluation import evaluation_nodes
from posttrain.planner.sizing.storage import Storage, storage
from posttrain.planner.timing.duration import Bandwidths, durations_seconds

MINUTE = 60
# From here on, hours say more than minutes; below ten of them, or of days, a decimal matters.
LONGEST_IN_MINUTES, LONGEST_WITH_DECIMAL = 100 * MINUTE, 10


class RuleNeeds:
    """The rules of a configuration with what they take; computed when first asked for, and once.

    Args:
        config: The resolved configuration.
        rates: Assumed bandwidths.
        jobs_at_once: Jobs that run side by side; None where it is not known.
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
        return rule_chain(self._config, self._is_fork, evaluation_nodes(self._config))

    @cached_property
    def storage(self) -> Storage:
        """Bytes on disk."""
        return storage(self._config)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """`durations_seconds`: only of what the planner can tell."""
        return durations_seconds(self._config, self.storage, self.rates, self._jobs_at_once)

    def plan_part(self, workflow: Mapping[str, Any], evaluations: Mapping[str, Path]) -> list[dict[str, Any]]:
        """Return the rules as they stand in `plan.json`.

        Args:
            workflow: What the configuration was resolved from; stands in the commands.
            evaluations: Rule name -> file, where two rules of the chain are one of the workflow.
        """
        return [self._rule_part(node, workflow, evaluations.get(node.name)) for node in self.chain]

    def message(self, rule: str, *, with_nodes: bool = True) -> str:
        """Return what a rule's message ends with: " (16 nodes, 128 GPUs, about 30 days)".

        Args:
            rule: The rule's name.
            with_nodes: Whether nodes are named; a message that names them itself leaves them out.

        Returns:
            Nodes and GPUs of one job; no GPUs where it uses none, no time where the planner has none. Empty for a rule
            that this configuration does not use, and where nothing is left to say.
        """
        node = next((node for node in self.chain if node.rule == rule), None)
        if node is None:
            return ""
        words = [counted(node.nodes, "node")] if with_nodes else []
        words += [counted(node.gpus, "GPU")] if node.gpus else []
        words += [about(self.seconds[node.name])] if node.name in self.seconds else []
        return f" ({', '.join(words)})" if words else ""

    def _rule_part(self, node: RuleNode, workflow: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
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
            "nodes": node.nodes,
            "gpus": node.gpus,
            "seconds": self.seconds.get(node.name),
            "command": shlex.join(command),
        }


def about(seconds: float) -> str:
    """Return a planned duration, no finer than the plan is.

    Example:
        3 -> "under 1 min", 1507.7 -> "about 25 min", 9000 -> "about 2.5 h", 2619841 -> "about 30 days".
    """
    if seconds < MINUTE:
        return "under 1 min"
    if seconds < LONGEST_IN_MINUTES:
        return f"about {seconds / MINUTE:.0f} min"
    size, unit = (HOUR, "h") if seconds < LONGEST_IN_HOURS else (DAY, "days")
    return f"about {seconds / size:.{1 if seconds < LONGEST_WITH_DECIMAL * size else 0}f} {unit}"
