"""Runs the real workflow from tests as SLURM jobs."""

from __future__ import annotations

import pwd
from dataclasses import dataclass

from tests.support.workflow_runs import ROOT, WorkflowFolder

PROFILE = ROOT / "workflow" / "profiles" / "slurm-localhost"


@dataclass
class SlurmFolder(WorkflowFolder):
    """A working directory whose steps are SLURM jobs.

    Args:
        nodes: Of training.
        user: Who gives the command; empty: who runs the test.
    """

    nodes: int = 4
    user: str = ""

    def command(self, *targets: str, **arguments) -> list[str]:
        config = {"site": "slurm_localhost", "nodes": self.nodes}
        words = super().command(*targets, config=config, **arguments)
        at = words.index("--cores")
        return [*as_user(self.user), *words[:at], "--workflow-profile", str(PROFILE), *words[at + 2 :]]


def as_user(user: str) -> list[str]:
    """Return what has a command run as another user; nothing without one."""
    if not user:
        return []
    found = pwd.getpwnam(user)
    return ["setpriv", f"--reuid={found.pw_uid}", f"--regid={found.pw_gid}", "--init-groups"]
