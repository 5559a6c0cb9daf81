"""The one table of parameter names: the Hub's on one side, Megatron's on the other.

Each tensor of the Hub is one rectangular chunk of one of Megatron's tensors, or a few of them (`Placement`). Most are
the whole of it; Megatron joins the projections of a grouped attention, the gate and up projections of an MLP, and the
experts of a layer. Every decoder layer has names of its own (`decoder.layers.7.`), as Megatron gives them to models
whose layers differ; a checkpoint says so in its `common.pt` (`torch_dist.py`).

Everything follows from `config.schema.Architecture`; no weights are needed. Conversion, export, weight sync and the
check of a downloaded checkpoint all read this table.
"""

from posttrain.checkpoint.param_names.other_trainers import find_placement, newest_checkpoint
from posttrain.checkpoint.param_names.placement import Placement
from posttrain.checkpoint.param_names.table import (
    by_hf_name,
    by_key,
    compare_tensors,
    expected_tensors,
    mtp_layer_of,
    optional_copies,
    require_tensors,
    to_megatron,
)

__all__ = [
    "Placement",
    "by_hf_name",
    "by_key",
    "compare_tensors",
    "expected_tensors",
    "find_placement",
    "mtp_layer_of",
    "newest_checkpoint",
    "optional_copies",
    "require_tensors",
    "to_megatron",
]
