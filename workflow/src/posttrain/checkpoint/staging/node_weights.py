"""The weights that ranks and engines of one node load: files, sources and verification.

A node's own copy is staged before training starts and repaired if it is wrong; with `stage.copy=nothing` the shared
files are loaded directly. Either way every byte is read and compared with its hash once before ranks and engines start,
several files at a time: a staging record covers only sizes and times, Megatron's loader ignores checksums, and
safetensors has none. Loading then reads from the page cache, as far as the bytes fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from posttrain.checkpoint.staging.eviction import Eviction, in_use
from posttrain.checkpoint.staging.node_local import Fetch, StagedSource, read_again, stage
from posttrain.checkpoint.staging.staging_record import StagedCopy
from posttrain.config.derived import engines_load
from posttrain.config.node_share import NodeShare, node_share
from posttrain.config.schema import Config
from posttrain.errors import CheckpointError
from posttrain.plan.flags.environment import LOOPBACK
from posttrain.store import Receipt


def rollout_files(receipt: Receipt, share: NodeShare) -> frozenset[str]:
    """Return the files of the engines' checkpoint that the node reads: all shards if an engine loads on it.

    SGLang's loader reads all shards in each process and keeps its part of each tensor.
    """
    names = (record.path for record in receipt.files)
    return frozenset(name for name in names if share.loads_engine or not name.endswith(".safetensors"))


@dataclass(frozen=True)
class NodeWeights:
    """The weights of one node.

    Args:
        config: The resolved configuration.
        rank: Index of the node in the job, from 0.
        name: Node name.
        torch_dist: Checkpoint that trainer ranks load first.
        rollout: Checkpoint that engines load first.
        destination: Folder on the node's local disk for this model revision, two levels below that of all models.
        peers: Folder on shared storage where nodes that copy the same files meet.
    """

    config: Config
    rank: int
    name: str
    torch_dist: StagedSource
    rollout: StagedSource
    destination: Path
    peers: Path

    def folder_of(self, origin: StagedSource) -> Path:
        """Return the folder to load an origin from."""
        return origin.folder if self._is_shared else self.destination / origin.folder.name

    def stage(self) -> list[StagedCopy]:
        """Copy the files that this node needs; trusts the staging records of existing copies.

        Raises:
            CheckpointError: See `node_local.stage`.
            RuntimeError: See `node_local.stage`.
        """
        return self._stage(self._chosen, believe=True)

    def prepare(self) -> None:
        """Verify the files to load, repair wrong ones, and copy missing ones.

        Raises:
            CheckpointError: Shared files are wrong (lists them), or see `node_local.stage`.
            RuntimeError: See `node_local.stage`.
        """
        if not self._is_shared:
            self._stage(self._chosen, believe=False)
        elif found := read_again(self._chosen, self.config.stage.workers):
            listed = "\n  ".join(found)
            raise CheckpointError(
                "receipt-mismatch", f"not what the receipts say; `snakemake verify` tells more:\n  {listed}"
            )

    def in_use(self) -> AbstractContextManager[None]:
        """Protect the copies from eviction during the block."""
        if self._is_shared:
            return contextlib.nullcontext()
        return in_use([self.folder_of(origin) for origin in (self.torch_dist, self.rollout)])

    @property
    def _is_shared(self) -> bool:
        return self.config.stage.copy == "nothing"

    @functools.cached_property
    def _chosen(self) -> tuple[StagedSource, StagedSource]:
        """The origins, each with the files that this node's ranks and engines read."""
        share, is_apart = node_share(self.config, self.rank), bool(self.config.engine.own_nodes)
        if self.config.stage.copy != "slices" and not is_apart and engines_load(self.config):
            return self.torch_dist, self.rollout
        return (
            dataclasses.replace(self.torch_dist, local=self._torch_dist_files(share)),
            dataclasses.replace(self.rollout, local=rollout_files(self.rollout.receipt, share)),
        )

    def _torch_dist_files(self, share: NodeShare) -> frozenset[str] | None:
        if not share.has_ranks:
            return frozenset()
        if self.config.stage.copy != "slices":
            return None
        # Only copying slices needs torch, which takes seconds to import.
        from posttrain.checkpoint.staging.node_slices import torch_dist_files

        return torch_dist_files(self.torch_dist.folder, self.torch_dist.receipt, share)

    def _stage(self, origins: Sequence[StagedSource], believe: bool) -> list[StagedCopy]:
        rules = self.config.stage
        eviction = Eviction(rules.evict, rules.evict_unused_days, self.destination.parents[1])
        return stage(
            origins,
            self.destination,
            workers=rules.workers,
            eviction=eviction,
            fetch=self._broadcast() if rules.broadcast == "bittorrent" else None,
            believe=believe,
        )

    def _broadcast(self) -> Fetch:
        # Only broadcasting needs libtorrent.
        from posttrain.checkpoint.staging.broadcast import Broadcast

        site = self.config.site
        interface = LOOPBACK if site.launcher == "local" else site.network_interface
        return Broadcast(self.peers, self.name, self.destination, interface).fetch
