"""The weights of a model, from its dimensions alone: number, splits over ranks, FP8 coverage.

Letters: H hidden size, N heads, G key-value heads, D head width, V vocabulary, E experts, F width of one expert.

One decoder layer holds, depending on the family (`posttrain.config.families`),

    attention (MLA)   q_a [q_rank, H], its norm, q_b [N (nope + rope), q_rank], or one q [N (nope + rope), H],
                      kv_a [kv_rank + rope, H], its norm, kv_b [N (nope + v), kv_rank], o [H, N v]
    or (GQA)          q [N D, H], k and v [G D, H], with or without biases, o [H, N D], norms of query and key [D]
    or delta net      qkv [2 G_l D_k + N_l D_v, H], gate [N_l D_v, H], beta and decay [N_l, H], convolution,
                      decay and bias per head, o [H, N_l D_v], norm of D_v; attention then has a gate [N D, H], too
    indexer (DSA)     wq_b [heads dim, q_rank], wk [dim, H], LayerNorm of the key (weight, bias),
                      weights_proj [heads, H]; if layers share a selection, only in the selecting layers
    two RMSNorms      2 H
    dense MLP         gate, up [F_dense, H], down [H, F_dense], in the first layers; without experts in all
    or MoE            router [E, H], E experts and the shared ones, each 3 F H, in the others

Router biases (one FP32 number per expert) have no gradient and are not counted as parameters, but in bytes. An MTP
layer is a MoE layer with a projection of [embedding; hidden] and three norms; it is in the checkpoints but neither
trained nor served here, so it is counted separately, and so is a vision tower, which is served. An embedding that is
also the output matrix is one tensor and counted once.

Source: the modelling files in huggingface/transformers, src/transformers/models/{glm_moe_dsa, deepseek_v3, glm4_moe,
qwen3, qwen3_moe, qwen3_5, qwen3_5_moe}; tests count the parameters of their models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from posttrain.config.families import chooses_keys, family_of, is_delta_net, shared_experts_width
from posttrain.config.formats import FP8_BLOCK, NVFP4_GROUP
from posttrain.config.schema import Architecture


@dataclass(frozen=True)
class Weight:
    """A number of equal tensors.

    Args:
        component: Part of the model; the key of `parameters_by_component`.
        shape: Shape of one tensor in the Hub's checkpoint.
        count: Number of tensors.
        split: Split over ranks: "tensor", "expert", or "none" if it is replicated.
        fp8: FP8 checkpoints store it as codes and 128x128 block scales.
        is_fp32: Stored in FP32 in BF16 checkpoints.
        is_buffer: Not trained, FP32, not counted as a parameter: the router's bias.
        max_shards: Maximum number of pieces in engines, which replicate pieces beyond it; 0 means no limit. For key and
        value projections it is the number of heads.
    """

    component: str
    shape: tuple[int, ...]
    count: int = 1
    split: str = "none"
    fp8: bool = False
    is_fp32: bool = False
    is_buffer: bool = False
    max_shards: int = 0

    @cached_property
    def num_elements(self) -> int:
        """Number of elements of all tensors."""
        return math.prod(self.shape) * self.count

    @cached_property
    def bf16_bytes(self) -> int:
        """Size in a BF16 checkpoint."""
        return self.num_elements * (4 if self.is_buffer or self.is_fp32 else 2)

    @cached_property
    def fp8_bytes(self) -> int:
        """Size in an FP8 checkpoint: a byte per code, an FP32 scale per block; the rest stays BF16."""
        if not self.fp8:
            return self.bf16_bytes
        rows, columns = self.shape
        blocks = math.ceil(rows / FP8_BLOCK) * math.ceil(columns / FP8_BLOCK)
        return (rows * columns + 4 * blocks) * self.count

    @cached_property
    def nvfp4_bytes(self) -> int:
        """Size in an NVFP4 checkpoint as exported by Model Optimizer; only routed experts are quantised.

        Half a byte per code, an FP8 scale per 16 codes, and two FP32 scales per matrix.
        """
        if self.component != "routed_experts":
            return self.bf16_bytes
        rows, columns = self.shape
        return (rows * columns // 2 + rows * math.ceil(columns / NVFP4_GROUP) + 8) * self.count

    def bytes_in(self, precision: str) -> int:
        """Size in a checkpoint with the given precision: "fp32", "bf16", "fp8" or "nvfp4"."""
        if precision == "fp32":
            return self.num_elements * 4
        if precision == "fp8":
            return self.fp8_bytes
        return self.nvfp4_bytes if precision == "nvfp4" else self.bf16_bytes


def layer_weights(arch: Architecture, layer: int, is_moe: bool) -> tuple[Weight, ...]:
    """Return the weights of one decoder layer, or of an MTP layer, whose numbers follow the decoder's."""
    norms = Weight("norms", (arch.hidden_size,), count=2)
    feed_forward = _moe_weights(arch) if is_moe else _mlp_weights(arch, "dense_mlp", arch.intermediate_size)
    if is_delta_net(arch, layer):
        attention = _delta_net(arch)
    else:
        attention = _latent_attention(arch) if arch.kv_lora_rank else _grouped_attention(arch)
    indexer = _indexer_weights(arch) if chooses_keys(arch, layer) else ()
    return (*attention, *indexer, norms, *feed_forward)


@lru_cache
def decoder_weights(arch: Architecture) -> tuple[tuple[Weight, ...], ...]:
    """Return the weights of each decoder layer, from first to last, without MTP layers."""
    num_dense = arch.first_k_dense_replace if arch.n_routed_experts else arch.num_hidden_layers
    return tuple(layer_weights(arch, layer, is_moe=layer >= num_dense) for layer in range(arch.num_hidden_layers))


def edge_weights(arch: Architecture, num_stages: int = 1) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Return the weights before the first layer and those after the last one.

    Args:
        arch: The model.
        num_stages: Pipeline stages. With several, the last one has its own copy of a tied embedding.
    """
    vocabulary = (arch.vocab_size, arch.hidden_size)
    first = (Weight("embedding", vocabulary, split="tensor"),)
    norm = Weight("norms", (arch.hidden_size,))
    if arch.tie_word_embeddings and num_stages == 1:
        return first, (norm,)
    return first, (norm, Weight("lm_head", vocabulary, split="tensor"))


@lru_cache
def model_weights(arch: Architecture) -> tuple[Weight, ...]:
    """Return all weights except those of the MTP layers."""
    first, last = edge_weights(arch)
    return (*first, *(weight for layer in decoder_weights(arch) for weight in layer), *last)


def mtp_weights(arch: Architecture) -> list[Weight]:
    """Return the weights of all MTP layers.

    Hub checkpoints may duplicate the embedding and the output matrix in them; those copies are not counted.
    """
    hidden = arch.hidden_size
    extra = (Weight("mtp", (hidden,), count=3), Weight("mtp", (hidden, 2 * hidden)))
    has_experts = arch.n_routed_experts > 0
    return [*layer_weights(arch, arch.num_hidden_layers, has_experts), *extra] * arch.num_nextn_predict_layers


def vision_weights(arch: Architecture) -> list[Weight]:
    """Return the weights of the vision tower, which engines hold and the trainer does not.

    Of a depth: blocks of attention and an MLP with two LayerNorms, all with biases; before them patches and positions,
    after them a LayerNorm and an MLP that merges patches to one token.
    """
    vision = arch.vision
    width, inner, merged = (
        vision.hidden_size,
        vision.intermediate_size,
        vision.spatial_merge_size**2 * vision.hidden_size,
    )
    if not vision.depth:
        return []
    patch = (width, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    block = ((3 * width, width), (width, width), (inner, width), (width, inner))
    merger = ((merged, merged), (arch.hidden_size, merged))
    part = functools.partial(Weight, "vision")
    return [
        *(part(shape) for shape in (patch, (width,), (vision.num_position_embeddings, width), (width,), (width,))),
        *(part(shape) for matrix in merger for shape in (matrix, matrix[:1])),
        part((width,), count=4 * vision.depth),
        *(part(shape, count=vision.depth) for matrix in block for shape in (matrix, matrix[:1])),
    ]


def saved_weights(arch: Architecture) -> list[Weight]:
    """Return all weights of a checkpoint."""
    return [*model_weights(arch), *mtp_weights(arch), *vision_weights(arch)]


def count_parameters(weights: Iterable[Weight]) -> int:
    """Return the number of parameters, without buffers.

    Example:
        `count_parameters(model_weights(...))` of GLM-5 is 743,911,199,232.
    """
    return sum(weight.num_elements for weight in weights if not weight.is_buffer)


def count_active_parameters(arch: Architecture) -> int:
    """Return the number of parameters that are applied to one token.

    Of the routed experts only the selected ones count. The embedding is a look-up and does not count, unless it is also
    the output matrix.

    Example:
        GLM-5: 40,833,126,912.
    """
    parts = parameters_by_component(model_weights(arch))
    experts = arch.n_routed_experts
    idle = parts["routed_experts"] * (experts - arch.num_experts_per_tok) // experts if experts else 0
    looked_up = 0 if arch.tie_word_embeddings else parts["embedding"]
    return sum(parts.values()) - idle - looked_up


def parameters_by_component(weights: Sequence[Weight]) -> dict[str, int]:
    """Return component -> parameters, in the order in which the components first appear."""
    parts: dict[str, int] = {}
    for weight in weights:
        if not weight.is_buffer:
            parts[weight.component] = parts.get(weight.component, 0) + weight.num_elements
    return parts


def _latent_attention(arch: Architecture) -> tuple[Weight, ...]:
    hidden, heads = arch.hidden_size, arch.num_attention_heads
    query = heads * (arch.qk_nope_head_dim + arch.qk_rope_head_dim)
    key_value = heads * (arch.qk_nope_head_dim + arch.v_head_dim)
    # Every tensor-parallel rank computes the whole latents; only weights with heads are split.
    query_latent = (Weight("attention", (arch.q_lora_rank, hidden), fp8=True), Weight("norms", (arch.q_lora_rank,)))
    return (
        *(query_latent if arch.q_lora_rank else ()),
        Weight("attention", (arch.kv_lora_rank + arch.qk_rope_head_dim, hidden), fp8=True),
        Weight("norms", (arch.kv_lora_rank,)),
        Weight("attention", (query, arch.q_lora_rank or hidden), split="tensor", fp8=True),
        Weight("attention", (key_value, arch.kv_lora_rank), split="tensor", fp8=True),
        Weight("attention", (hidden, heads * arch.v_head_dim), split="tensor", fp8=True),
    )


def _grouped_attention(arch: Architecture) -> tuple[Weight, ...]:
    hidden, groups = arch.hidden_size, arch.num_key_value_heads
    query, key_value = arch.num_attention_heads * arch.head_dim, groups * arch.head_dim
    biases = (
        Weight("attention", (query,), split="tensor"),
        Weight("attention", (key_value,), count=2, split="tensor", max_shards=groups),
    )
    has_norms = arch.use_qk_norm or family_of(arch).always_qk_norm
    return (
        Weight("attention", (query * (2 if family_of(arch).gated_attention else 1), hidden), split="tensor", fp8=True),
        Weight("attention", (key_value, hidden), count=2, split="tensor", fp8=True, max_shards=groups),
        Weight("attention", (hidden, query), split="tensor", fp8=True),
        *(biases if arch.attention_bias else ()),
        *((Weight("norms", (arch.head_dim,), count=2),) if has_norms else ()),
    )


def _delta_net(arch: Architecture) -> tuple[Weight, ...]:
    hidden, heads, keys = arch.hidden_size, arch.linear_num_value_heads, arch.linear_num_key_heads
    values = heads * arch.linear_value_head_dim
    channels = 2 * keys * arch.linear_key_head_dim + values
    part = functools.partial(Weight, "delta_net", split="tensor", max_shards=keys)
    return (
        part((channels, hidden), fp8=True),
        part((values, hidden), fp8=True),
        part((heads, hidden), count=2),
        part((channels, 1, arch.linear_conv_kernel_dim)),
        part((heads,), is_fp32=True),
        part((heads,)),
        part((hidden, values), fp8=True),
        Weight("norms", (arch.linear_value_head_dim,), is_fp32=True),
    )


def _indexer_weights(arch: Architecture) -> tuple[Weight, ...]:
    return (
        Weight("indexer", (arch.index_n_heads * arch.index_head_dim, arch.q_lora_rank), fp8=True),
        Weight("indexer", (arch.index_head_dim, arch.hidden_size), fp8=True),
        Weight("indexer", (arch.index_head_dim,), count=2),
        Weight("indexer", (arch.index_n_heads, arch.hidden_size)),
    )


def _moe_weights(arch: Architecture) -> tuple[Weight, ...]:
    router = Weight("router", (arch.n_routed_experts, arch.hidden_size))
    has_bias = family_of(arch).router_bias
    bias = (Weight("router", (arch.n_routed_experts,), is_buffer=True),) if has_bias else ()
    # The Hub's checkpoint stores the shared experts as one MLP of their total width.
    shared_width = shared_experts_width(arch)
    shared = _mlp_weights(arch, "shared_experts", shared_width) if shared_width else ()
    if arch.shared_expert_intermediate_size:
        shared = (*shared, Weight("router", (1, arch.hidden_size)))
    routed = _mlp_weights(arch, "routed_experts", arch.moe_intermediate_size, arch.n_routed_experts, "expert")
    return (router, *bias, *shared, *routed)


def _mlp_weights(
    arch: Architecture, component: str, width: int, count: int = 1, split: str = "tensor"
) -> tuple[Weight, ...]:
    gate_and_up = Weight(component, (width, arch.hidden_size), 2 * count, split, fp8=True)
    down = Weight(component, (arch.hidden_size, width), count, split, fp8=True)
    return gate_and_up, down
