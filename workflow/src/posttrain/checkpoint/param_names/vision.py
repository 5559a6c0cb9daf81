"""Names of a vision tower, which conversion and export carry along: the trainer holds none of it.

Letters: W width of the tower, H hidden_size of the language model.

Source: transformers 5.23, `Qwen3_5VisionModel` in `models/qwen3_5/modeling_qwen3_5.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.checkpoint.param_names.placement import Placement, whole
from posttrain.config.schema import Architecture

HF_VISION, KEY_VISION = "model.visual.", "vision_model."


def vision_tower(arch: Architecture) -> Iterator[Placement]:
    """Yield the placements of the tower: none if the model has none."""
    vision = arch.vision
    if not vision.depth:
        return
    width, patch = vision.hidden_size, vision.patch_size
    merged = vision.spatial_merge_size**2 * width
    yield from _with_bias("patch_embed.proj", (width, vision.in_channels, vision.temporal_patch_size, patch, patch))
    yield _kept("pos_embed.weight", (vision.num_position_embeddings, width))
    for block in range(vision.depth):
        yield from _block(arch, f"blocks.{block}.")
    yield from _with_bias("merger.norm", (width,))
    yield from _with_bias("merger.linear_fc1", (merged, merged))
    yield from _with_bias("merger.linear_fc2", (arch.hidden_size, merged))


def _block(arch: Architecture, name: str) -> Iterator[Placement]:
    width, inner = arch.vision.hidden_size, arch.vision.intermediate_size
    yield from _with_bias(f"{name}norm1", (width,))
    yield from _with_bias(f"{name}norm2", (width,))
    yield from _with_bias(f"{name}attn.qkv", (3 * width, width))
    yield from _with_bias(f"{name}attn.proj", (width, width))
    yield from _with_bias(f"{name}mlp.linear_fc1", (inner, width))
    yield from _with_bias(f"{name}mlp.linear_fc2", (width, inner))


def _with_bias(name: str, shape: tuple[int, ...]) -> Iterator[Placement]:
    yield _kept(f"{name}.weight", shape)
    yield _kept(f"{name}.bias", shape[:1])


def _kept(name: str, shape: tuple[int, ...]) -> Placement:
    return whole(f"{HF_VISION}{name}", f"{KEY_VISION}{name}", shape)
