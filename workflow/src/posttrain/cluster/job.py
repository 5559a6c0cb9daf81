"""A training job in the form that the gang's head sends to its nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.checkpoint.staging.node_local import StagedSource
from posttrain.checkpoint.staging.node_weights import NodeWeights
from posttrain.config.schema import Config
from posttrain.store import read_receipt


@dataclass(frozen=True)
class TrainingJob:
    """A training job and its paths; all nodes see every path except `node_local`.

    Args:
        config_path: The resolved configuration.
        run_folder: `train/`: checkpoints, rollouts, metrics, attempts.
        torch_dist: Initial weights of the ranks.
        torch_dist_receipt: The receipt of `torch_dist`.
        rollout_weights: Weights that the engines load first.
        rollout_receipt: The receipt of `rollout_weights`.
        node_local: Folder of copies on a node's own disk, with `{node}` for the node's name.
        arguments: Arguments of a trainer rank except configuration, weights, engine addresses and lease.
    """

    config_path: Path
    run_folder: Path
    torch_dist: Path
    torch_dist_receipt: Path
    rollout_weights: Path
    rollout_receipt: Path
    node_local: Path
    arguments: tuple[str, ...]

    def weights_of(self, config: Config, rank: int, name: str) -> NodeWeights:
        """Return the weights that one node loads.

        Args:
            config: The resolved configuration.
            rank: The node's number in the job, from 0.
            name: The node's name.
        """
        return NodeWeights(
            config,
            rank=rank,
            name=name,
            torch_dist=StagedSource(self.torch_dist, read_receipt(self.torch_dist_receipt)),
            rollout=StagedSource(self.rollout_weights, read_receipt(self.rollout_receipt)),
            destination=Path(str(self.node_local).format(node=name)),
            peers=self.run_folder.parent / "node_local" / "broadcast",
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the job as plain types."""
        return {name: list(value) if isinstance(value, tuple) else str(value) for name, value in vars(self).items()}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> TrainingJob:
        """Return the job of a dict from `as_dict`."""
        names = [field.name for field in dataclasses.fields(TrainingJob)]
        values: dict[str, Any] = {
            name: tuple(content[name]) if name == "arguments" else Path(content[name]) for name in names
        }
        return TrainingJob(**values)
