"""The files of a checkpoint that a node's own ranks and engines read; the others need not be copied to it.

A file is needed if it holds a chunk of a tensor that a rank on the node loads. Whole files are copied, so a node gets
some other tensors too; the plan shows how much. An error here costs time, never correctness: files that are not copied
are links to the shared ones.
"""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.checkpoint.param_names import KEY_MTP, KEY_VISION
from posttrain.checkpoint.quantization.tiling import Chunk
from posttrain.config.node_share import NodeShare
from posttrain.store import Receipt

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(mlp\.experts\.)?")


def torch_dist_files(folder: Path, receipt: Receipt, share: NodeShare) -> frozenset[str]:
    """Return the files of a `torch_dist` folder that the node's trainer ranks read, including those without tensors."""
    chunks = TorchDistReader(folder).chunks_by_file()
    return frozenset(
        record.path
        for record in receipt.files
        if record.path not in chunks or any(is_needed(key, box, share) for key, box in chunks[record.path])
    )


def is_needed(key: str, box: Chunk, share: NodeShare) -> bool:
    """Return whether a rank of the node loads from a chunk.

    Args:
        key: Megatron's tensor name.
        box: First indices and extents of the chunk; the first dimension of `experts` is the expert.
        share: The node's share.
    """
    if layer := _LAYER.match(key):
        held = share.experts_of_layer.get(int(layer[1]))
        (first, *_), (count, *_) = box
        return held is not None and (layer[2] is None or not held.isdisjoint(range(first, first + count)))
    # MTP layers and vision towers are not trained.
    if key.startswith((KEY_MTP, KEY_VISION)):
        return False
    if key.startswith("embedding."):
        return share.has_embedding
    if key.startswith(("decoder.final_layernorm.", "output_layer.")):
        return share.has_output
    return True
