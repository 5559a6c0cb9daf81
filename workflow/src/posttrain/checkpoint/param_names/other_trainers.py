"""Parameter names in checkpoints that slime, miles or Megatron-LM wrote.

Megatron's `save_checkpoint` writes `iter_0000080/` or `release/` and a file that names the newest. Differences from our
table:

- Identical layers are one tensor, stacked along a first dimension: `decoder.layers.mlp.linear_fc1.weight`.
- Transformer Engine fuses a norm into the next linear layer, and names it after that layer.
- GLM-5's indexer is part of the attention module, and the rotated part of its heads comes last; on the Hub, first.
- The vocabulary is padded to a multiple that is divisible by the tensor-parallel size.
- Newer versions of Megatron name the layer inside an MTP layer `mtp_model_layer`.

Source: megatron-core 0.19.2, `models/gpt/gpt_layer_specs.py`; miles, `miles_plugins/models/glm5/glm5.py` and
`miles_plugins/mbridge/deepseek_v32.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from posttrain.checkpoint.param_names.placement import Placement
from posttrain.checkpoint.quantization.tiling import Chunk, Shape
from posttrain.config.schema import Architecture
from posttrain.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
# Megatron pads rows to a multiple of 128 times the tensor-parallel size.
_PADDING_MULTIPLE, _MAX_PADDING = 128, 128 * 64
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
_INDEXER = "self_attention.core_attention.indexer."
# Key suffixes: ours -> other trainers'.
_RENAMED = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    f"{_INDEXER}linear_weights_proj.weight": "self_attention.weights_proj.weight",
}
_RENAMED_AND_TURNED = {
    f"{_INDEXER}linear_wq_b.weight": "self_attention.wq_b.weight",
    f"{_INDEXER}linear_wk.weight": "self_attention.wk.weight",
    f"{_INDEXER}k_norm.weight": "self_attention.k_norm.weight",
    f"{_INDEXER}k_norm.bias": "self_attention.k_norm.bias",
}


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint in a trainer's folder; returns any other folder itself.

    Raises:
        CheckpointError: The tracker file names no checkpoint.
    """
    tracker = folder / TRACKER
    if not tracker.exists():
        return folder
    text = tracker.read_text(encoding="utf-8").strip()
    if text != "release" and not text.isdigit():
        raise CheckpointError("tracker-invalid", f"{tracker}: holds {text!r}, expected `release` or a number")
    return folder / (text if text == "release" else f"iter_{int(text):07d}")


def find_placement(
    placement: Placement, arch: Architecture, shape_of: Callable[[str], Shape | None]
) -> Placement | None:
    """Return the placement of a tensor in a checkpoint, under our or another trainer's name; None if it has neither.

    Args:
        placement: Placement in our table.
        arch: Dimensions of the model.
        shape_of: Returns the shape of a checkpoint tensor, or None if it does not exist.
    """
    for candidate in _spellings(placement, arch):
        if shape := shape_of(candidate.key):
            return dataclasses.replace(candidate, global_shape=shape) if _is_padded(candidate, shape) else candidate
    return None


def _is_padded(placement: Placement, shape: Shape) -> bool:
    if placement.key not in _PADDED or shape[1:] != placement.global_shape[1:]:
        return False
    added = shape[0] - placement.global_shape[0]
    return 0 < added < _MAX_PADDING and shape[0] % _PADDING_MULTIPLE == 0


def _spellings(placement: Placement, arch: Architecture) -> Iterator[Placement]:
    for named in (placement, *_renamed(placement, arch)):
        yield named
        if match := _LAYER.match(named.key):
            yield _stacked(named, int(match[1]), arch.num_hidden_layers)
        if named.key.startswith("mtp."):
            yield dataclasses.replace(named, key=named.key.replace(".transformer_layer.", ".mtp_model_layer."))


def _renamed(placement: Placement, arch: Architecture) -> Iterator[Placement]:
    for ours, theirs in (_RENAMED | _RENAMED_AND_TURNED).items():
        if placement.key.endswith(f".{ours}"):
            renamed = dataclasses.replace(placement, key=placement.key.removesuffix(ours) + theirs)
            yield _turned(renamed, arch) if ours in _RENAMED_AND_TURNED else renamed


def _turned(placement: Placement, arch: Architecture) -> Placement:
    """Move the last `qk_rope_head_dim` rows of each head to its start."""
    rotated, head = arch.qk_rope_head_dim, arch.index_head_dim
    num_rows, *columns = placement.global_shape
    zeros = tuple(0 for _ in columns)
    boxes: list[Chunk] = []
    for first in range(0, num_rows, head):
        boxes.append(((first + head - rotated, *zeros), (rotated, *columns)))
        boxes.append(((first, *zeros), (head - rotated, *columns)))
    return dataclasses.replace(placement, boxes=tuple(box for box in boxes if box[1][0]))


def _stacked(placement: Placement, layer: int, num_layers: int) -> Placement:
    return dataclasses.replace(
        placement,
        key=_LAYER.sub("decoder.layers.", placement.key),
        global_shape=(num_layers, *placement.global_shape),
        boxes=tuple(((layer, *offsets), (1, *sizes)) for offsets, sizes in placement.boxes),
        num_stack_axes=placement.num_stack_axes + 1,
    )
