"""The table of parameter names: Hub names and the matching Megatron names.

Each Hub tensor is one or more rectangular chunks of a Megatron tensor (`Placement`). Most are the whole tensor;
Megatron joins the projections of a grouped attention, the gate and up projections of an MLP, and the experts of a
layer. Every decoder layer has its own names (`decoder.layers.7.`), as in Megatron's models with heterogeneous layers; a
checkpoint declares this in its `common.pt` (`torch_dist.py`).

The table follows from `config.schema.Architecture` without reading weights. Conversion, export, weight sync and the
check of a downloaded checkpoint use it.
"""

from posttrain.checkpoint.param_names.other_trainers import find_placement, newest_checkpoint
from posttrain.checkpoint.param_names.placement import Placement
from posttrain.checkpoint.param_names.table import (
    HEAD,
    KEY_MTP,
    by_hf_name,
    by_key,
    compare_tensors,
    embedding_name,
    expected_tensors,
    mtp_layer_of,
    optional_copies,
    require_tensors,
    to_megatron,
)
from posttrain.checkpoint.param_names.vision import HF_VISION, KEY_VISION

__all__ = [
    "HEAD",
    "HF_VISION",
    "KEY_MTP",
    "KEY_VISION",
    "Placement",
    "by_hf_name",
    "by_key",
    "compare_tensors",
    "embedding_name",
    "expected_tensors",
    "find_placement",
    "mtp_layer_of",
    "newest_checkpoint",
    "optional_copies",
    "require_tensors",
    "to_megatron",
]
