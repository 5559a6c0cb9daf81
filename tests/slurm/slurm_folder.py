"""Runs the real workflow from tests as SLURM jobs."""

from __future__ import annotations

from dataclasses import dataclass

from tests.workflow_runs import ROOT, WorkflowFolder

PROFILE = ROOT / "workflow" / "profiles" / "slurm-localhost"


@dataclass
class SlurmFolder(WorkflowFolder):
    """A working directory whose steps are SLURM jobs.

    Args:
        nodes: Of training.
    """

    nodes: int = 4

    def command(self, *targets: str, **arguments) -> list[str]:
        config = {"site": "slurm_localhost", "nodes": self.nodes}
        words = super().command(*targets, config=config, **arguments)
        at = words.index("--cores")
        return [*words[:at], "--workflow-profile", str(PROFILE), *words[at + 2 :]]
