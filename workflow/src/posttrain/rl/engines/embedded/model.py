"""Loads a checkpoint folder in Hub layout as a `transformers` model that is ready to generate."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.formats.config_sections import text_section
from posttrain.checkpoint.formats.modelling import import_modelling
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.param_names import HF_VISION
from posttrain.checkpoint.quantization.dequantize import QuantizedCheckpoint
from posttrain.checkpoint.quantization.fp8 import SCALE_SUFFIXES
from posttrain.config.families import FAMILIES
from posttrain.errors import CheckpointError
from posttrain.rl.data.chat import stop_token_ids
from posttrain.rl.engines.embedded.stable_topk import make_indexers_stable
from posttrain.rl.engines.embedded.weights import ServedWeights, WeightError, WeightUpdate

log = logging.getLogger(__name__)

# On the tiny model with 2 threads it takes half the time of the loop over experts, and no more than batched_mm.
EXPERTS_IMPLEMENTATION = "grouped_mm"
ATTENTION_IMPLEMENTATION = "eager"


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with the metadata that a server needs.

    Args:
        folder: The folder it was loaded from.
        model: The `transformers` model, in evaluation mode.
        weights: Its weights under Hub names.
        model_type: `model_type` of config.json.
        eos_token_ids: Any of them ends a response.
        vocab_size: Token ids are below it.
        max_positions: Longest prompt and response together.
    """

    folder: Path
    model: Any
    weights: ServedWeights
    model_type: str
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_positions: int


def load_model(folder: Path, dtype: torch.dtype, has_weights: bool = True) -> LoadedModel:
    """Build the model of `folder` and load its weights.

    Args:
        folder: config.json, shards in BF16, FP32 or a format of `QuantizedCheckpoint`, and optionally
            generation_config.json.
        dtype: Dtype of weights and activations.
        has_weights: False: read only config.json and generation_config.json; the first update, which must hold every
            tensor, makes the model ready.

    Raises:
        CheckpointError: The architecture is not supported, or the weights do not fit it.
    """
    model, config = build_model(folder, dtype), _config_of(folder)
    text, family = text_section(config), FAMILIES[config["model_type"]]
    weights = ServedWeights(model, ignored_names(config), family.text_prefix)
    if has_weights:
        fill_from_folder(weights.initial_load(), folder)
    else:
        for tensor in model.state_dict().values():
            tensor.zero_()  # uninitialised memory would differ from start to start
        log.info("no weights are read from %s: the first update brings them", folder)
    log.info("%s with %d indexers", type(model).__name__, make_indexers_stable(model))
    return LoadedModel(
        folder=folder,
        model=model,
        weights=weights,
        model_type=config["model_type"],
        eos_token_ids=stop_token_ids(folder),
        vocab_size=text["vocab_size"],
        max_positions=text["max_position_embeddings"],
    )


def ignored_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return how the names of tensors begin that computing texts does not need: MTP layers and vision tower.

    Args:
        config: Content of `config.json`.
    """
    family, text = FAMILIES[config["model_type"]], text_section(config)
    first, count = text["num_hidden_layers"], int(text.get("num_nextn_predict_layers") or 0)
    numbered = [f"{family.text_prefix}layers.{number}." for number in range(first, first + count)]
    return (*numbered, *([family.mtp_prefix] if family.mtp_prefix else []), HF_VISION)


def fill_from_folder(update: WeightUpdate, folder: Path) -> None:
    """Read every tensor of a checkpoint into an update, and check that none is missing.

    Raises:
        CheckpointError: A tensor does not fit or a file cannot be read; names folder and tensor or file.
    """
    try:
        bundles = _weights_with_scales(folder) if _is_sent_alike(folder) else _numbers(folder)
        for bundle in bundles:
            update.add(bundle)
        update.require_complete()
    except WeightError as error:
        raise CheckpointError("model-not-loadable", f"{folder}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(
            error.code, f"{error.text}\n  remedy: make the folder again, or fetch it again"
        ) from error
    log.info("loaded %s, %d tensors left out (MTP layers, vision tower, copies)", folder, update.num_skipped)


def _config_of(folder: Path) -> dict[str, Any]:
    config_file = folder / "config.json"
    try:
        return dict(json.loads(config_file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError("model-not-loadable", f"{config_file}: cannot be read ({error})") from error


def build_model(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model of a folder's config.json, in evaluation mode, with uninitialised weights.

    A model with a vision tower is built without it.

    Raises:
        CheckpointError: The architecture is not supported.
    """
    config_file, model_type = folder / "config.json", _config_of(folder).get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(
            "family-not-served", f"{config_file}: model_type {model_type!r}; the embedded engine serves {known}"
        )
    from transformers.initialization import no_init_weights

    # Import only this class: `AutoModel` imports far more.
    module = import_modelling(model_type)
    model_class = getattr(module, FAMILIES[model_type].text_class)
    model_config = model_class.config_class.from_pretrained(config_file.parent)
    model_config._attn_implementation = ATTENTION_IMPLEMENTATION
    if "n_routed_experts" in FAMILIES[model_type].needs:
        model_config._experts_implementation = EXPERTS_IMPLEMENTATION
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights():
            model = model_class(model_config)
    finally:
        torch.set_default_dtype(default)
    model.tie_weights()
    _keep_in_float32(model, FAMILIES[model_type].fp32_names)
    return model.eval().requires_grad_(False)


def _keep_in_float32(model: Any, published: Sequence[str]) -> None:
    """Keep the few tensors in float32 that the model always computes in float32, or that are published so."""
    names = {*published, *(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(part in name for part in names):
            tensor.data = tensor.data.float()


def _is_sent_alike(folder: Path) -> bool:
    """Return whether updates use the checkpoint's weight format: plain, or FP8 codes with scales."""
    declared = _config_of(folder).get("quantization_config") or {}
    return declared.get("quant_method", "fp8") == "fp8" or declared.get("format") == "float-quantized"


def _numbers(folder: Path) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Read and dequantize codes of other formats: NVFP4, MXFP8, INT4."""
    checkpoint = QuantizedCheckpoint(folder)
    for name in checkpoint.names:
        yield [(name, checkpoint.tensor(name))]


def _weights_with_scales(folder: Path) -> Iterator[list[tuple[str, torch.Tensor]]]:
    reader = CheckpointReader(folder)
    names = set(reader.names)
    for name in reader.names:
        if any(name.endswith(suffix) and name.removesuffix(suffix) in names for suffix in SCALE_SUFFIXES):
            continue
        bundle = [name, *(name + suffix for suffix in SCALE_SUFFIXES if name + suffix in names)]
        yield [(part, reader.tensor(part)) for part in bundle]
