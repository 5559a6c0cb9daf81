"""The vision tower of a model."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class VisionTower:
    """Dimensions of a vision tower, whose weights are kept as they are and carried along: runs train on text."""

    depth: int = _doc("Blocks of the tower; 0: the model has none", 0, minimum=0)
    hidden_size: int = _doc("Width of the tower", 0, minimum=0)
    intermediate_size: int = _doc("Width of a block's MLP", 0, minimum=0)
    num_heads: int = _doc("Attention heads of a block", 0, minimum=0)
    in_channels: int = _doc("Colour channels of an image", 3, minimum=1)
    patch_size: int = _doc("Side of a patch in pixels", 16, minimum=1)
    temporal_patch_size: int = _doc("Frames in a patch", 2, minimum=1)
    spatial_merge_size: int = _doc("Side of the square of patches that become one token", 2, minimum=1)
    num_position_embeddings: int = _doc("Learned positions", 0, minimum=0)
