"""The section `sandbox`: limits of programs that a model has written (docs/sandbox.md)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import ANY, _doc

# The secret shared by a sandbox service and its clients.
SANDBOX_SECRET_VARIABLE = "POSTTRAIN_SANDBOX_SECRET"


@dataclass(frozen=True)
class SandboxSettings:
    """Limits of one program, and where it runs."""

    seconds: float = _doc("Time limit of a program", 10.0, exclusive_minimum=0, maximum=3600, unnamed=10.0)
    memory_mib: int = _doc("Memory of all its processes and files", 512, minimum=64, unnamed=512)
    processes: int = _doc("Its processes and threads", 32, minimum=1, unnamed=32)
    output_kib: int = _doc(
        "Maximum of its standard output, and of its standard error; a program that prints more is ended",
        256,
        minimum=1,
        unnamed=256,
    )
    address: str = _doc(
        "Address of a sandbox service, http://host:port, for nodes that forbid namespaces; empty: programs run on the "
        "node that needs their result",
        "",
        unnamed=ANY,
    )
