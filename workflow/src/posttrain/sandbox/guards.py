"""What guards the programs of sandboxes on this machine, beside namespaces, in words."""

from __future__ import annotations

from posttrain.sandbox.cgroup import limits_by
from posttrain.sandbox.landlock import describe_landlock


def describe_guards() -> str:
    """Return what enforces limits of memory and processes, and whether the kernel has Landlock.

    Example:
        "limits by rlimits and a watcher; Landlock ABI 7".
    """
    return f"limits by {limits_by()}; {describe_landlock()}"
