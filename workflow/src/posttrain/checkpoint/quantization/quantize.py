"""Quantises a checkpoint: the formats, and the conversion of each tensor."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader, TensorSpec
from posttrain.checkpoint.param_names import HF_VISION
from posttrain.checkpoint.parts.converted_folder import Recoding
from posttrain.checkpoint.quantization.calibration import Calibration
from posttrain.checkpoint.quantization.dequantize import CastToBf16
from posttrain.checkpoint.quantization.fp8 import Fp8Format, largest_magnitude
from posttrain.checkpoint.quantization.nvfp4 import Nvfp4Format
from posttrain.checkpoint.quantization.quantized_names import CLASSES, Selection, is_mtp
from posttrain.errors import CheckpointError
from posttrain.store import hash_file

FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")


class WeightFormat(Protocol):
    """A weight format of engines; `Fp8Format` documents the methods."""

    @property
    def selection(self) -> Selection:
        """Tensors to quantise."""

    def sharing_scale(self, hf_name: str) -> tuple[str, ...]:
        """Return the tensors whose joint maximum determines a scale."""

    def served_specs(self, hf_name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Return names, shapes and dtypes of the output of `quantize`."""

    def quantize(self, hf_name: str, weight: torch.Tensor, shared_amax: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return codes and scales of a matrix."""

    def quantization_config(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json."""

    def other_files(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return further JSON files of the folder."""


class Quantization:
    """The quantisation of each tensor of a checkpoint; a `converted_folder.Recoding`.

    Tensors are processed one at a time, on a GPU if there is one; the bytes are the same on a CPU.

    Args:
        source: Checkpoint in Hub layout, not quantised.
        settings: "format" ("fp8", "nvfp4", "mxfp8" or "int4"), the format's parameters, and the modules that keep their
            precision; see `make_format`.

    Raises:
        CheckpointError: The source is quantised already, has nothing to quantise, or a setting would split tensors that
            engines fuse.
    """

    def __init__(self, source: Path, settings: Mapping[str, Any]):
        self.reader = open_source(source)
        self.names: Sequence[str] = self.reader.names
        self._specs = {name: info.spec for name, info in self.reader.infos.items()}
        self.format = make_format(settings, read_object(source / "config.json"), self._specs)
        try:
            self.format.selection.check(self._specs)
        except CheckpointError as error:
            raise CheckpointError(error.code, f"{source}: {error.text}") from error
        calibration = [hash_file(Path(file)) for file in settings.get("calibration", ())]
        self.settings: Mapping[str, Any] = {**settings, "calibration": calibration}
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._largest = functools.cache(lambda name: largest_magnitude(self.reader.tensor(name).to(self._device)))

    def specs(self, hf_name: str) -> Mapping[str, TensorSpec]:
        """Return names, shapes and dtypes of a tensor's output."""
        spec = self._specs[hf_name]
        return self.format.served_specs(hf_name, spec) if self._is_quantized(hf_name) else {hf_name: spec}

    def recode(self, hf_name: str) -> Mapping[str, torch.Tensor]:
        """Return the output of a tensor.

        Raises:
            CheckpointError: A weight is NaN or infinite.
        """
        weight = self.reader.tensor(hf_name)
        if not self._is_quantized(hf_name):
            return {hf_name: weight}
        shared = [self._largest(name) for name in self.format.sharing_scale(hf_name) if name in self._specs]
        made = self.format.quantize(hf_name, weight.to(self._device), torch.stack(shared).amax() if shared else None)
        return {name: tensor.cpu() for name, tensor in made.items()}

    def small_files(self) -> Mapping[str, Any]:
        """Return config.json with its `quantization_config`, and the format's other files."""
        config = read_object(self.reader.folder / "config.json")
        declared = {**config, "quantization_config": self.format.quantization_config(self._specs)}
        return {"config.json": declared, **self.format.other_files(self._specs)}

    def _is_quantized(self, hf_name: str) -> bool:
        return self.format.selection.includes(hf_name, self._specs[hf_name].shape)


class QuantizedUntrained(Quantization):
    """A `Quantization` of what the trainer does not send: MTP layers for engines that draft, and a vision tower.

    The folder's config is that of the whole checkpoint.

    Args:
        source: See `Quantization`.
        settings: See `Quantization`; "drafts" states whether engines draft.
    """

    def __init__(self, source: Path, settings: Mapping[str, Any]):
        super().__init__(source, settings)
        num_layers, drafts = _num_layers(read_object(source / "config.json")), settings["drafts"]
        self.names = [n for n in self.names if n.startswith(HF_VISION) or (drafts and is_mtp(n, num_layers))]


def open_recoding(source: Path, settings: Mapping[str, Any]) -> Recoding:
    """Return the conversion to a format: "bf16" casts back, every other one quantises.

    Raises:
        CheckpointError: See `Quantization` and `CastToBf16`.
    """
    if settings["format"] == "bf16":
        return CastToBf16(source)
    return QuantizedUntrained(source, settings) if "drafts" in settings else Quantization(source, settings)


def make_format(
    settings: Mapping[str, Any], config: Mapping[str, Any], specs: Mapping[str, TensorSpec]
) -> WeightFormat:
    """Return a format by name.

    Args:
        settings: "format"; for "fp8" also "strategy" and "scale"; for "nvfp4" "calibration" (files); for all
            "keep_first_layers", "keep_last_layers" and "keep_modules".
        config: The source's config.json.
        specs: Shape and dtype of all source tensors.
    """
    kept = {key: value for key, value in settings.items() if key.startswith("keep_")}
    num_layers, name = _num_layers(config), settings["format"]
    # Engines run the MTP layer in BF16 with experts of four bits.
    experts_only = name in ("nvfp4", "int4")
    classes = ("experts",) if experts_only else CLASSES
    selection = Selection(classes, num_layers, mtp=not experts_only, **kept)
    if name == "fp8":
        return make_fp8(settings, num_layers)
    if name == "nvfp4":
        calibration = Calibration([Path(file) for file in settings.get("calibration", ())])
        calibration.check(specs)
        return Nvfp4Format(selection, calibration, tuple(specs))
    from posttrain.checkpoint.formats.library_formats import LibraryFormat

    return LibraryFormat(name, selection)


def _num_layers(config: Mapping[str, Any]) -> int:
    """Return the decoder layers in config.json; a model with a vision tower describes its text part apart."""
    return int(config.get("text_config", config).get("num_hidden_layers", 0))


def make_fp8(settings: Mapping[str, Any], num_layers: int) -> Fp8Format:
    """Return the FP8 format; see `make_format`."""
    kept = {key: value for key, value in settings.items() if key.startswith("keep_")}
    return Fp8Format(settings["strategy"], settings["scale"], Selection(num_layers=num_layers, **kept))


def open_source(source: Path) -> CheckpointReader:
    """Open an unquantised checkpoint.

    Raises:
        CheckpointError: It is quantised already, according to its config or its tensors' names and dtypes; or a tensor
            is empty.
    """
    reader = CheckpointReader(source)
    declared = read_object(source / "config.json").get("quantization_config")
    coded = [f"{name}: {info.spec}" for name, info in reader.infos.items() if info.dtype not in FLOAT_DTYPES]
    if empty := [f"{name}: {info.spec}" for name, info in reader.infos.items() if 0 in info.shape]:
        raise CheckpointError(
            "tensor-empty", f"{source}: {len(empty)} tensors have no elements: {', '.join(empty[:5])}"
        )
    if declared is not None or coded:
        kind = declared.get("quant_method") if isinstance(declared, dict) else declared
        method = f"quant_method {kind!r}" if declared is not None else coded[0]
        raise CheckpointError(
            "quantized-twice",
            f"{source}: quantised already ({method}); quantising twice adds the errors up: give the BF16 checkpoint, "
            "or make one with `snakemake finalize_bf16`",
        )
    return reader
