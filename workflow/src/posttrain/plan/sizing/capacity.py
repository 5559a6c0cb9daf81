"""Compares capacities of a node and of shared storage with the plan's needs; free space is checked elsewhere.

A site's declared capacities are limits, so a plan that exceeds one is a problem. Host memory and disks in
`config/hardware` are typical of such machines: a plan that exceeds one gets a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.plan.sizing.storage import Storage

REMEDIES = {
    "shared_disk_gb": "lower trainer.keep_checkpoints, or put site.store and site.results on larger storage",
    "local_disk_gb": "use nodes with larger disks, or rollout.fp8=true, whose weights are half as large",
    "host_memory_gib": "use more nodes, or trainer.optimizer_cpu_offload=false",
}


def check_declared(config: Config, needed: Storage, host_memory_gib: float) -> Iterator[Problem]:
    """Yield a problem for each declared capacity that is too small.

    Args:
        config: The configuration, with the site's declarations; 0 declares nothing.
        needed: Bytes on disk, from `storage.storage`.
        host_memory_gib: Host memory that a node needs.
    """
    for name, found in _needs(needed, host_memory_gib).items():
        declared = getattr(config.site, name)
        if 0 < declared < found:
            yield Problem(
                "site-too-small", f"site.{name}", _amount(name, declared), _least(name, found), REMEDIES[name]
            )


def check_typical(config: Config, needed: Storage, host_memory_gib: float) -> Iterator[Problem]:
    """Yield a problem for each undeclared capacity that typical nodes lack.

    Args:
        config: The configuration.
        needed: Bytes on disk, from `storage.storage`.
        host_memory_gib: Host memory that a node needs.
    """
    needs = _needs(needed, host_memory_gib)
    for name in ("local_disk_gb", "host_memory_gib"):
        typical = getattr(config.hardware, name)
        if not getattr(config.site, name) and typical < needs[name]:
            found = f"{_amount(name, typical)}, typical of {config.hardware.name}"
            remedy = f"declare what your nodes have with site.{name}; if it is too little, {REMEDIES[name]}"
            yield Problem("site-perhaps-too-small", f"hardware.{name}", found, _least(name, needs[name]), remedy)


def _needs(needed: Storage, host_memory_gib: float) -> dict[str, float]:
    return {
        "shared_disk_gb": needed.shared_bytes / 1e9,
        "local_disk_gb": needed.node_local_bytes / 1e9,
        "host_memory_gib": host_memory_gib,
    }


def _amount(name: str, value: float) -> str:
    return f"{value:,g} {_unit(name)}"


def _least(name: str, value: float) -> str:
    return f"at least {value:,.1f} {_unit(name)}, which the plan needs"


def _unit(name: str) -> str:
    return "GiB" if name.endswith("_gib") else "GB"
