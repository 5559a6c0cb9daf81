"""Names of a gated delta net, and of attention with an output gate (Qwen3.5).

Our layer joins the projections of each key head, so that tensor parallelism splits one matrix by heads. With r value
heads per key head, and widths K of a key and V of a value head,

    in_proj.weight  [G (2 K + 2 r V + 2 r), H]    key head g: K query rows, K key rows, r V value rows, r V rows of the
                                                  output gate, r rows of beta, r rows of the decay
    conv1d.weight   [G (2 K + r V), 1, taps]      key head g: K query, K key, r V value channels

The Hub joins queries, keys and values of all heads (`in_proj_qkv`, `conv1d`), in this order.

Letters: H hidden_size, G key heads, N query heads, D head width.

Source: transformers 5.23, `models/qwen3_5/modeling_qwen3_5.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posttrain.checkpoint.param_names.placement import Placement, blocks, rows, whole
from posttrain.config.schema import Architecture


def delta_net(arch: Architecture, hf: str, key: str) -> Iterator[Placement]:
    """Yield the placements of a gated delta net.

    The decay's logarithm and the norm are FP32: Qwen3.5 publishes them so (Qwen3.6 in BF16, which widens exactly).
    """
    width, groups, heads = arch.hidden_size, arch.linear_num_key_heads, arch.linear_num_value_heads
    per_group = heads // groups
    key_rows, value_rows = arch.linear_key_head_dim, per_group * arch.linear_value_head_dim
    values = groups * value_rows
    in_proj = _Grouped(
        f"{key}in_proj.weight", groups, (key_rows, key_rows, value_rows, value_rows, per_group, per_group)
    )
    yield in_proj.part(f"{hf}in_proj_qkv.weight", (0, 1, 2), (width,))
    yield in_proj.part(f"{hf}in_proj_z.weight", (3,), (width,))
    yield in_proj.part(f"{hf}in_proj_b.weight", (4,), (width,))
    yield in_proj.part(f"{hf}in_proj_a.weight", (5,), (width,))
    conv = _Grouped(f"{key}conv1d.weight", groups, (key_rows, key_rows, value_rows))
    yield conv.part(f"{hf}conv1d.weight", (0, 1, 2), (1, arch.linear_conv_kernel_dim))
    yield whole(f"{hf}A_log", f"{key}A_log", (heads,), "F32")
    yield whole(f"{hf}dt_bias", f"{key}dt_bias", (heads,))
    yield whole(f"{hf}norm.weight", f"{key}out_norm.weight", (arch.linear_value_head_dim,), "F32")
    yield whole(f"{hf}out_proj.weight", f"{key}out_proj.weight", (width, values))


def gated_query(arch: Architecture, hf: str, key: str, group_rows: int) -> Placement:
    """Return the placement of a query projection that yields a gate, too.

    The Hub has a head's D query rows before its D gate rows; Megatron has all query rows of a group before its gate
    rows.

    Args:
        arch: Dimensions of the model.
        hf: Hub name of the attention's module.
        key: Megatron's name of the joined projections.
        group_rows: Rows of a group in them.
    """
    head_dim, groups = arch.head_dim, arch.num_key_value_heads
    per_group = arch.num_attention_heads // groups
    starts = [
        group * group_rows + (is_gate * per_group + head) * head_dim
        for group in range(groups)
        for head in range(per_group)
        for is_gate in (0, 1)
    ]
    shape = groups * group_rows, arch.hidden_size
    return rows(f"{hf}q_proj.weight", key, shape, tuple(starts), head_dim)


class _Grouped:
    """A Megatron tensor whose rows are parts of equal groups.

    Args:
        key: Its name.
        groups: Number of groups.
        parts: Rows of each part of a group.
    """

    def __init__(self, key: str, groups: int, parts: Sequence[int]):
        self._key, self._groups, self._parts = key, groups, parts

    def part(self, hf_name: str, numbers: Sequence[int], columns: tuple[int, ...]) -> Placement:
        """Return the placement of a Hub tensor that has some parts, each of all groups."""
        of_group = sum(self._parts)
        spans = [
            (group * of_group + sum(self._parts[:number]), self._parts[number])
            for number in numbers
            for group in range(self._groups)
        ]
        return blocks(hf_name, self._key, (self._groups * of_group, *columns), spans)
