"""Activation and weight maxima of calibration passes, merged by element-wise maximum.

A pass is a file with the names in state dicts of NVIDIA Model Optimizer:

    {module}.input_quantizer._amax     of a module's input
    {module}.weight_quantizer._amax    of its weight

either safetensors or JSON (name -> number or list of numbers). Any calibration tool can produce it by keeping those
entries. The result does not depend on the order or the number of passes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from posttrain.errors import CheckpointError
from posttrain.store import read_json

INPUT_AMAX, WEIGHT_AMAX = ".input_quantizer._amax", ".weight_quantizer._amax"


class Calibration:
    """The merged maxima of all passes.

    Args:
        files: One per pass; without any, scales come from weights alone.

    Raises:
        CheckpointError: A file cannot be read, holds other entries or invalid magnitudes, or passes disagree about a
            shape.
    """

    def __init__(self, files: Sequence[Path] = ()):
        self._files = tuple(files)
        self._amax: dict[str, torch.Tensor] = {}
        for file in files:
            self._merge(file, _read(file))

    def __bool__(self) -> bool:
        return bool(self._amax)

    def _merge(self, file: Path, seen: dict[str, torch.Tensor]) -> None:
        for name, amax in seen.items():
            before = self._amax.get(name)
            if before is not None and before.shape != amax.shape:
                shapes = f"{list(amax.shape)}, another pass has {list(before.shape)}"
                raise CheckpointError("magnitudes-invalid", f"{file}: {name} has shape {shapes}")
            self._amax[name] = amax if before is None else torch.maximum(before, amax)

    def check(self, names: Container[str]) -> None:
        """Reject maxima of another model.

        Args:
            names: All tensors of the checkpoint to quantise.

        Raises:
            CheckpointError: The checkpoint lacks a module; the text names it.
        """
        modules = (name.removesuffix(INPUT_AMAX).removesuffix(WEIGHT_AMAX) for name in self._amax)
        if strange := [module for module in modules if f"{module}.weight" not in names]:
            files = ", ".join(map(str, self._files))
            raise CheckpointError(
                "calibration-of-another-model",
                f"{files}: a calibration of another model: {len(strange)} of its modules are not in the checkpoint, "
                f"such as {strange[0]}",
            )

    def weight_amax(self, hf_names: Iterable[str]) -> torch.Tensor | None:
        """Return the maximum over the given weights, [] float32; None if any of them has none."""
        found = [self._scalar(name.removesuffix(".weight") + WEIGHT_AMAX) for name in hf_names]
        known = [amax for amax in found if amax is not None]
        return torch.stack(known).amax() if known and len(known) == len(found) else None

    def input_amax(self, hf_names: Iterable[str]) -> torch.Tensor | None:
        """Return the maximum input of the given modules, [] float32; None if none is known."""
        found = [self._scalar(name.removesuffix(".weight") + INPUT_AMAX) for name in hf_names]
        known = [amax for amax in found if amax is not None and amax > 0]
        return torch.stack(known).amax() if known else None

    def _scalar(self, name: str) -> torch.Tensor | None:
        amax = self._amax.get(name)
        if amax is not None and amax.numel() != 1:
            raise CheckpointError(
                "magnitudes-invalid", f"{name}: {list(amax.shape)} magnitudes, expected one for the whole tensor"
            )
        return amax


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".json":
            content = read_json(file)
            seen = {name: torch.tensor(value, dtype=torch.float32) for name, value in content.items()}
        else:
            seen = {name: tensor.float() for name, tensor in load_file(file).items()}
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError("magnitudes-invalid", f"{file}: not a file of magnitudes ({error})") from error
    if unknown := [name for name in seen if not name.endswith((INPUT_AMAX, WEIGHT_AMAX))]:
        raise CheckpointError(
            "magnitudes-invalid", f"{file}: {unknown[0]} is neither ...{INPUT_AMAX} nor ...{WEIGHT_AMAX}"
        )
    if wrong := [name for name, amax in seen.items() if not (torch.isfinite(amax) & (amax >= 0)).all()]:
        raise CheckpointError("magnitudes-invalid", f"{file}: {wrong[0]} is not a magnitude: {seen[wrong[0]]}")
    return {name: amax.reshape(()) if amax.numel() == 1 else amax for name, amax in seen.items()}
