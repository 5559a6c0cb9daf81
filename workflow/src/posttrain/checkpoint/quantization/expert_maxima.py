"""Input maxima and token counts of experts in calibration passes, stored shard by shard.

A maximum of maxima does not depend on how samples are split into shards, nor on repeated samples. The state after each
shard covers all shards so far, in one file that is replaced atomically; a killed pass resumes after it with
bit-identical results. Shapes: L decoder layers, E routed experts; dense layers have rows of zeros.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from posttrain.checkpoint.quantization.calibration import INPUT_AMAX
from posttrain.errors import CheckpointError
from posttrain.store import write_atomic

log = logging.getLogger(__name__)

# Indices in `ExpertMaxima.amax`: the shared input of gate and up, and the input of down.
GATE_UP, DOWN = 0, 1
_PROJECTIONS = {"gate_proj": GATE_UP, "up_proj": GATE_UP, "down_proj": DOWN}


@dataclass(frozen=True)
class ExpertMaxima:
    """Maxima and counts of some samples.

    Args:
        amax: [L, E, 2] float32, largest input magnitude of gate and up, and of down.
        counts: [L, E] int64, tokens per expert.
    """

    amax: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def nothing(num_layers: int, num_experts: int) -> ExpertMaxima:
        """Return the value for no samples."""
        counts = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        return ExpertMaxima(torch.zeros(num_layers, num_experts, 2), counts)

    def merged(self, other: ExpertMaxima) -> ExpertMaxima:
        """Combine with the value of other samples."""
        return ExpertMaxima(torch.maximum(self.amax, other.amax), self.counts + other.counts)

    def check_finite(self) -> None:
        """Reject NaN or infinite activations.

        Raises:
            CheckpointError: An input is not finite; names the first such expert.
        """
        if len(wrong := (~torch.isfinite(self.amax)).nonzero()):
            layer, expert, _ = wrong[0].tolist()
            raise CheckpointError(
                "values-not-finite",
                f"layer {layer}, expert {expert}: its input is NaN or infinite; the model is damaged",
            )

    def by_module(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return name -> [] float32 under Model Optimizer's names; experts without tokens are omitted.

        Args:
            prefix: Start of the decoder's names: the family's `text_prefix`.
        """
        return {
            f"{prefix}layers.{layer}.mlp.experts.{expert}.{projection}{INPUT_AMAX}": self.amax[
                layer, expert, place
            ].clone()
            for layer, expert in (self.counts > 0).nonzero().tolist()
            for projection, place in _PROJECTIONS.items()
        }


class PassState:
    """The persistent state of one pass.

    Args:
        path: State file.
        key: Digest of everything that determines the maxima; a state with another key is ignored.
    """

    def __init__(self, path: Path, key: str):
        self._path, self._key = path, key

    def read(self) -> tuple[int, ExpertMaxima | None]:
        """Return the number of finished shards and their maxima; (0, None) without a valid state."""
        try:
            with safe_open(self._path, framework="pt") as file:
                said, found = file.metadata() or {}, ExpertMaxima(file.get_tensor("amax"), file.get_tensor("counts"))
        except FileNotFoundError:
            return 0, None
        except (SafetensorError, OSError) as error:
            log.warning("%s cannot be read (%s): the pass begins anew", self._path, error)
            return 0, None
        if said.get("key") != self._key or said.get("hash") != _hash_of(found):
            log.warning("%s is of other weights, conversations or another layout: the pass begins anew", self._path)
            return 0, None
        return int(said["finished"]), found

    def write(self, finished: int, seen: ExpertMaxima) -> None:
        """Replace the stored state with the maxima of the first `finished` shards."""
        said = {"key": self._key, "finished": str(finished), "hash": _hash_of(seen)}
        content = save({"amax": seen.amax, "counts": seen.counts}, said)
        write_atomic(self._path, lambda file: file.write(content))


def _hash_of(seen: ExpertMaxima) -> str:
    return xxhash.xxh3_128_hexdigest(seen.amax.numpy().tobytes() + seen.counts.numpy().tobytes())
