"""Reads weights that other tools saved in another form, in the form that the model's family publishes.

- All experts of a layer in one tensor, as in transformers 5's memory: `mlp.experts.gate_up_proj` [E, 2F, H] and
  `mlp.experts.down_proj` [E, H, F]. Each expert is a consecutive range of rows, so splitting moves no value.
- The router's bias, and the decay and norm of a gated delta net, in BF16 or FP16. Widening them to FP32 is exact.

The patched copy rewrites shards with such tensors, so that all its readers see one form.

Letters: E experts, F moe_intermediate_size, H hidden_size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open

from posttrain.checkpoint.formats.safetensors_io import TensorInfo, TensorSpec, read_header, read_metadata
from posttrain.checkpoint.formats.shard_writer import TORCH_DTYPES, write_shard
from posttrain.checkpoint.staging.file_placement import HashingFile
from posttrain.config.schema import Architecture
from posttrain.store import FileRecord, RelativeName, write_atomic

_STACK = re.compile(
    r"^((?:model\.(?:language_model\.)?|mtp\.)layers\.\d+\.mlp\.experts)\.(gate_up|gate|up|down)_proj(?:\.weight)?$"
)
_WIDE = (".mlp.gate.e_score_correction_bias", ".linear_attn.A_log", ".linear_attn.norm.weight")
_NARROW = ("BF16", "F16")
# Name and form of a stored tensor -> names and forms of the tensors in it.
Forms = Callable[[str, TensorSpec], dict[str, TensorSpec]]


def published_forms(name: str, spec: TensorSpec, arch: Architecture) -> dict[str, TensorSpec]:
    """Return the tensors stacked in a stored tensor; itself if it is stored in the published form."""
    if name.endswith(_WIDE) and spec.dtype in _NARROW:
        return {name: TensorSpec(spec.shape, "F32")}
    if not (match := _STACK.match(name)):
        return {name: spec}
    experts, inner, width = arch.n_routed_experts, arch.moe_intermediate_size, arch.hidden_size
    prefix, kind = match.groups()
    rows, columns = (width, inner) if kind == "down" else (inner, width)
    parts = kind.split("_")
    if spec.shape != (experts, rows * len(parts), columns):
        return {name: spec}
    names = (f"{prefix}.{expert}.{part}_proj.weight" for expert in range(experts) for part in parts)
    return dict.fromkeys(names, TensorSpec((rows, columns), spec.dtype))


def published_specs(infos: Mapping[str, TensorInfo], arch: Architecture) -> dict[str, TensorSpec]:
    """Return a checkpoint's tensors as the family publishes them: name -> shape and dtype."""
    specs: dict[str, TensorSpec] = {}
    for name, info in infos.items():
        specs |= published_forms(name, info.spec, arch)
    return specs


def write_shard_again(source: Path, target: Path, forms_of: Forms) -> FileRecord:
    """Rewrite a shard with its tensors in other forms, a few rows at a time.

    Args:
        source: The shard.
        target: The new one.
        forms_of: Name and form of a stored tensor -> the tensors stacked in it; empty: omit it.
    """
    forms = {name: forms_of(name, info.spec) for name, info in read_header(source).items()}
    specs = {name: spec for form in forms.values() for name, spec in form.items()}
    stored_in = {name: (stored, place) for stored, form in forms.items() for place, name in enumerate(form)}
    records = []

    def write(opened: BinaryIO) -> None:
        with safe_open(source, framework="pt") as stored, HashingFile(opened) as file:

            def read(name: str) -> Iterator[torch.Tensor]:
                origin, place = stored_in[name]
                if len(forms[origin]) == 1:
                    yield stored.get_tensor(origin).to(TORCH_DTYPES[specs[name].dtype]).reshape(specs[name].shape)
                    return
                rows = specs[name].shape[0]
                per_expert = stored.get_slice(origin).get_shape()[1] // rows
                expert, part = divmod(place, per_expert)
                yield stored.get_slice(origin)[expert : expert + 1, part * rows : (part + 1) * rows][0]

            write_shard(file, specs, read, read_metadata(source))
            records.append(FileRecord(RelativeName(target.name), file.size_bytes, file.xxh3_128))

    write_atomic(target, write)
    return records[0]
