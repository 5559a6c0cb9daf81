"""The engines' FP8 checkpoint in Hub layout: shards made by independent parts, then index, config and report.

The shards follow from the source's names, shapes and dtypes alone (`shard_writer.assign_shards`), and each
is written whole by one part. So the folder has the same bytes for any number of parts and threads.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.artifacts import FileRecord, record_files, write_json
from posttrain.checkpoint.fp8 import (
    SCALE_SUFFIX,
    block_scale,
    encode_block,
    is_quantized,
    quantization_config,
    served_specs,
)
from posttrain.checkpoint.fp8_report import TensorError, measure, summarize
from posttrain.checkpoint.parts import (
    Description,
    Notes,
    OutputFile,
    copy_other_files,
    make_files,
    remove_strangers,
)
from posttrain.checkpoint.safetensors_io import INDEX_NAME, CheckpointReader, TensorSpec
from posttrain.checkpoint.shard_writer import (
    MAX_SHARD_BYTES,
    HashingFile,
    assign_shards,
    split_evenly,
    write_index,
    write_shard,
)
from posttrain.errors import CheckpointError

FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
REPORT_NAME = "quantization_report.json"


def plan_shards(reader: CheckpointReader) -> dict[str, list[str]]:
    """Return file name -> tensors of the source, in its order; at least as many shards as the source has.

    A weight and its scale lie in one file.
    """
    specs = {name: served_specs(name, info.spec) for name, info in reader.infos.items()}
    sizes = {name: sum(spec.size_bytes for spec in served.values()) for name, served in specs.items()}
    share = -(-sum(sizes.values()) // len(reader.index.files))
    return assign_shards(sizes, min(MAX_SHARD_BYTES, share))


# ---- a part ----


def write_part(
    source: Path,
    source_digest: str,
    folder: Path,
    part: int,
    num_parts: int,
    num_threads: int = 1,
) -> list[Description]:
    """Quantise a part's share of the shards.

    Args:
        source: Checkpoint in Hub layout, not quantised.
        source_digest: Digest of its receipt.
        folder: Final name of the FP8 folder.
        part: Which share, from 0.
        num_parts: How many shares.
        num_threads: Shards written at a time.

    Returns:
        A description of each shard; its notes hold the quantisation error of each tensor.

    Raises:
        CheckpointError: When the source is quantised already, has nothing to quantise, or holds NaN or
            infinity.
    """
    reader = open_source(source)
    if not any(is_quantized(name, info.shape) for name, info in reader.infos.items()):
        raise CheckpointError(f"{source}: none of its {len(reader)} tensors is on the list of what is quantised")
    plan = plan_shards(reader)
    shards = [_output_file(reader, source_digest, name, held) for name, held in plan.items()]
    share = split_evenly([shard.size_bytes for shard in shards], num_parts)[part]
    return make_files(folder, [shards[i] for i in share], f"quantise part {part} of {num_parts}", num_threads)


def open_source(source: Path) -> CheckpointReader:
    """Open a checkpoint that is not quantised.

    Raises:
        CheckpointError: When it is quantised already, by its config or by its tensors' dtypes.
    """
    reader = CheckpointReader(source)
    declared = read_config(source).get("quantization_config")
    coded = [f"{name}: {info.spec}" for name, info in reader.infos.items() if info.dtype not in FLOAT_DTYPES]
    if declared is not None or coded:
        method = f"quant_method {declared.get('quant_method')!r}" if declared else coded[0]
        raise CheckpointError(
            f"{source}: quantised already ({method}); quantising twice adds the errors up: give the BF16 checkpoint"
        )
    return reader


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json."""
    path = folder / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _output_file(reader: CheckpointReader, source_digest: str, name: str, held: Sequence[str]) -> OutputFile:
    specs = _served(reader, held)
    return OutputFile(
        name=name,
        size_bytes=sum(spec.size_bytes for spec in specs.values()),
        made_from={"source": source_digest, "tensors": list(held), "format": "e4m3 block128"},
        write=functools.partial(_write_shard, reader, held),
    )


def _served(reader: CheckpointReader, held: Sequence[str]) -> dict[str, TensorSpec]:
    return {name: spec for hf_name in held for name, spec in served_specs(hf_name, reader.info(hf_name).spec).items()}


def _write_shard(reader: CheckpointReader, held: Sequence[str], file: HashingFile) -> Notes:
    """Write one shard. Scales come first in the file: a first pass over the weights takes them."""
    scales: dict[str, torch.Tensor] = {}
    errors: dict[str, TensorError] = {}

    def read(name: str) -> torch.Tensor:
        if name.endswith(SCALE_SUFFIX):
            hf_name = name.removesuffix(SCALE_SUFFIX)
            scales[hf_name] = block_scale(reader.tensor(hf_name), name=hf_name)
            return scales[hf_name]
        weight = reader.tensor(name)
        if not is_quantized(name, tuple(weight.shape)):
            return weight
        codes = encode_block(weight, scales[name])
        errors[name] = measure(weight, codes, scales[name])
        return codes

    write_shard(file, _served(reader, held), read)
    return {"errors": {name: dataclasses.asdict(error) for name, error in sorted(errors.items())}}


# ---- the last step ----


def finalize_folder(source: Path, partial: Path, parts: Mapping[str, Description]) -> tuple[FileRecord, ...]:
    """Write index, config and report, and copy tokenizer and the like.

    Args:
        source: Checkpoint in Hub layout, not quantised.
        partial: The folder in the making; it holds the shards.
        parts: File name -> description, of all parts.

    Returns:
        Records of all files.

    Raises:
        CheckpointError: When the parts are not exactly the shards that the source gives.
    """
    reader = open_source(source)
    plan = plan_shards(reader)
    if sorted(plan) != sorted(parts):
        raise CheckpointError(f"{partial}: shards {sorted(parts)} were made, the source gives {sorted(plan)}")
    specs = _served(reader, reader.names)
    weight_map = {name: file for file, held in plan.items() for name in _served(reader, held)}
    write_index(partial, weight_map, specs)
    source_specs = {name: info.spec for name, info in reader.infos.items()}
    config = {**read_config(source), "quantization_config": quantization_config(source_specs)}
    write_json(partial / "config.json", config)
    write_json(partial / REPORT_NAME, _report(parts))
    small = [INDEX_NAME, "config.json", REPORT_NAME]
    small += copy_other_files(source, partial, skip=small)
    remove_strangers(partial, keep={*parts, *small})
    return (*(part.record for part in parts.values()), *record_files(partial, small))


def _report(parts: Mapping[str, Description]) -> dict[str, Any]:
    errors = {name: TensorError(**row) for part in parts.values() for name, row in part.notes["errors"].items()}
    return summarize(dict(sorted(errors.items())))
