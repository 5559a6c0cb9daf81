"""The NVFP4 checkpoint in Hub layout: experts in four bits, everything else as it is in the source."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from posttrain.artifacts import FileRecord, record_files, write_json
from posttrain.checkpoint.fp8_folder import open_source, read_config
from posttrain.checkpoint.nvfp4 import (
    Layers,
    encode,
    global_scale,
    group_scale,
    hf_quant_config,
    is_quantized,
    partners,
    served_specs,
)
from posttrain.checkpoint.parts import Notes, OutputFile, copy_other_files, make_files, remove_strangers
from posttrain.checkpoint.safetensors_io import INDEX_NAME, CheckpointReader, TensorSpec
from posttrain.checkpoint.shard_writer import (
    MAX_SHARD_BYTES,
    HashingFile,
    assign_shards,
    write_index,
    write_shard,
)

QUANT_CONFIG_NAME = "hf_quant_config.json"


def write_shards(source: Path, source_digest: str, folder: Path, num_threads: int = 1) -> tuple[FileRecord, ...]:
    """Quantise the experts and write all shards.

    Args:
        source: Checkpoint in Hub layout, BF16.
        source_digest: Digest of its receipt.
        folder: Final name of the NVFP4 folder.
        num_threads: Shards written at a time.

    Returns:
        Records of the shards.

    Raises:
        CheckpointError: When the source is quantised already, holds NaN or infinity, or has experts that do
            not divide into groups.
    """
    reader, layers = open_source(source), Layers.of_config(read_config(source))
    files = [_output_file(reader, source_digest, layers, name, held) for name, held in _plan(reader, layers).items()]
    return tuple(made.record for made in make_files(folder, files, "quantise to NVFP4", num_threads))


def finalize_folder(source: Path, partial: Path) -> tuple[FileRecord, ...]:
    """Write index, config.json and hf_quant_config.json beside the shards, and copy tokenizer and the like.

    Returns:
        Records of the files that are no shards.
    """
    reader, config = open_source(source), read_config(source)
    layers = Layers.of_config(config)
    plan = _plan(reader, layers)
    specs = _served(reader, layers, reader.names)
    weight_map = {name: file for file, held in plan.items() for name in _served(reader, layers, held)}
    write_index(partial, weight_map, specs)
    quantization = hf_quant_config(layers)
    flat = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": quantization["quantization"]["group_size"],
    }
    flat["ignore"] = quantization["quantization"]["exclude_modules"]
    write_json(partial / "config.json", {**config, "quantization_config": flat})
    write_json(partial / QUANT_CONFIG_NAME, quantization)
    small = [INDEX_NAME, "config.json", QUANT_CONFIG_NAME]
    small += copy_other_files(source, partial, skip=small)
    remove_strangers(partial, keep={*plan, *small})
    return record_files(partial, small)


def _plan(reader: CheckpointReader, layers: Layers) -> dict[str, list[str]]:
    sizes = {
        name: sum(spec.size_bytes for spec in served_specs(name, info.spec, layers).values())
        for name, info in reader.infos.items()
    }
    share = -(-sum(sizes.values()) // len(reader.index.files))
    return assign_shards(sizes, min(MAX_SHARD_BYTES, share))


def _served(reader: CheckpointReader, layers: Layers, held: Sequence[str]) -> dict[str, TensorSpec]:
    return {
        name: spec
        for hf_name in held
        for name, spec in served_specs(hf_name, reader.info(hf_name).spec, layers).items()
    }


def _output_file(
    reader: CheckpointReader, source_digest: str, layers: Layers, name: str, held: Sequence[str]
) -> OutputFile:
    return OutputFile(
        name=name,
        size_bytes=sum(spec.size_bytes for spec in _served(reader, layers, held).values()),
        made_from={"source": source_digest, "tensors": list(held), "format": "nvfp4 experts"},
        write=functools.partial(_write_shard, reader, layers, held),
    )


def _write_shard(reader: CheckpointReader, layers: Layers, held: Sequence[str], file: HashingFile) -> Notes:
    """Write one shard; the data order is global scales, then other tensors, then codes and group scales."""

    @functools.cache
    def scale_2(hf_name: str) -> torch.Tensor:
        return global_scale({partner: reader.tensor(partner) for partner in partners(hf_name)})

    def read(name: str) -> torch.Tensor:
        if name.endswith("_scale_2"):
            return scale_2(name.removesuffix("_scale_2"))
        if name.endswith("_scale"):
            hf_name = name.removesuffix("_scale")
            return group_scale(reader.tensor(hf_name), scale_2(hf_name))
        weight = reader.tensor(name)
        if not is_quantized(name, layers):
            return weight
        return encode(weight, group_scale(weight, scale_2(name)), scale_2(name))

    write_shard(file, _served(reader, layers, held), read)
    return {}
