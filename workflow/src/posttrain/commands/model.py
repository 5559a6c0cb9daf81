"""Write a model file from a checkpoint's `config.json`, and report what is not supported."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.checkpoint.formats.hf_architecture import architecture_of
from posttrain.checkpoint.formats.hf_config import check_config, lost_mtp_layers
from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.checkpoint.formats.resaved_weights import published_specs
from posttrain.checkpoint.formats.safetensors_io import INDEX_NAME, SINGLE_NAME, CheckpointReader, TensorSpec
from posttrain.checkpoint.param_names import expected_tensors, mtp_layer_of
from posttrain.config.families import dimensions, family_of
from posttrain.config.load import dump_yaml
from posttrain.config.schema import Architecture
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.store import write_text

# Models below this size run on a machine without GPUs.
_MAX_CPU_BYTES = 1 << 30


def main(folder: Path, name: str | None, output: Path | None) -> None:
    """Write a model file from a checkpoint, and raise the problems that would reject a run."""
    if output and output.exists():
        remedy = "give another name, or delete it"
        raise ConfigError([Problem("file-exists", "--output", str(output), "a new file", remedy)])
    content = read_object(folder / "config.json")
    arch = architecture_of(content, str(folder / "config.json"))
    has_weights = any((folder / file).exists() for file in (INDEX_NAME, SINGLE_NAME))
    tensors = published_specs(CheckpointReader(folder).infos, arch) if has_weights else expected_tensors(arch)
    arch = _as_stored(content, arch, tensors)
    text = model_file(folder, name or folder.resolve().name, arch)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, text)
        print(f"model: {output}", file=sys.stderr)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()
    if not has_weights:
        print(f"{folder}: no weights, so tensors were not compared", file=sys.stderr)
    problems = check_config(content, arch, tensors)
    raise_if_any(problems, "The file is written; a run of this checkpoint would be rejected for what it does not take.")


def model_file(folder: Path, name: str, arch: Architecture) -> str:
    """Return the YAML of `models/{name}.yaml`, without unneeded dimensions at their default."""
    num_bytes = sum(spec.size_bytes for spec in expected_tensors(arch).values())
    model = {
        "name": name,
        "source": {"kind": "folder", "folder": str(folder)},
        "architecture": _said(arch),
    }
    hardware = "cpu" if num_bytes < _MAX_CPU_BYTES else "h200"
    told = f"From {folder / 'config.json'}, by `posttrain model`: {num_bytes / 1e9:.3g} GB of weights."
    head = "\n".join(f"# {line}" for line in textwrap.wrap(told, 117))
    return f"{head}\n{dump_yaml({'model': model, 'defaults': {'nodes': 1, 'hardware': hardware}})}"


def _said(arch: Architecture) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(arch)}
    found: dict[str, Any] = {}
    for key, value in dimensions(arch).items():
        field = fields[key]
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            rest = {k: v for k, v in dict(value).items() if v != getattr(default, k)}
            found |= {key: rest} if rest else {}
        elif value != default or key in family_of(arch).needs:
            found[key] = value
    return found


def _as_stored(content: Mapping[str, Any], arch: Architecture, tensors: Mapping[str, TensorSpec]) -> Architecture:
    """Return the architecture, without MTP layers if config.json counts some but the weights contain none."""
    without = dataclasses.replace(arch, num_nextn_predict_layers=0)
    if not arch.num_nextn_predict_layers or any(mtp_layer_of(arch, tensor) for tensor in tensors):
        return arch
    for key, count in lost_mtp_layers(content, without, tensors).items():
        print(f"{key} = {count}: the weights have no such layer, so the file says 0", file=sys.stderr)
    return without
