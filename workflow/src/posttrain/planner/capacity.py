"""What a site declares to have, against what the plan needs: capacities only; free space is a matter for the check.

A site's declaration is the cluster's own word, so a plan that exceeds it is a problem. What `config/hardware` says of
host memory and disks is typical of such machines and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.planner.storage import Storage


def check_capacity(config: Config, needed: Storage, host_memory_gib: float) -> Iterator[Problem]:
    """Yield a problem for each declared capacity that is too small.

    Args:
        config: The configuration, with the site's declarations; 0 declares nothing.
        needed: Bytes on disk, from `storage.storage`.
        host_memory_gib: Host memory that a node needs.
    """
    site = config.site
    for key, declared, unit, found, remedy in (
        (
            "shared_disk_gb",
            site.shared_disk_gb,
            "GB",
            needed.shared_bytes / 1e9,
            "lower trainer.keep_checkpoints, or put site.store and site.results on larger storage",
        ),
        (
            "local_disk_gb",
            site.local_disk_gb,
            "GB",
            needed.node_local_bytes / 1e9,
            "use nodes with larger disks, or rollout.fp8=true, whose weights are half as large",
        ),
        (
            "host_memory_gib",
            site.host_memory_gib,
            "GiB",
            host_memory_gib,
            "use more nodes, or trainer.optimizer_cpu_offload=false",
        ),
    ):
        if 0 < declared < found:
            allowed = f"at least {found:,.1f} {unit}, which the plan needs"
            yield Problem(f"site.{key}", f"{declared:,g} {unit}", allowed, remedy)
