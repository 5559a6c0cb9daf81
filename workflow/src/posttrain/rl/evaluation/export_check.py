"""Checks that an export is the trained model: transformers must load it and reproduce the trainer's log-probabilities.

Three faults leave no tensor missing: a stale copy of a tied tensor, a tensor under another one's name, and a config
that describes another model with the same tensors. Comparing bytes finds the first, log-probabilities the others.
transformers computes in FP32, so only the trainer rounds, and the limit is that of BF16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.checkpoint.formats.config_sections import CONFIG
from posttrain.checkpoint.formats.hf_layout import check_layout, read_object
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.formats.tied_copies import KEEP, differing_copies
from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs, read_reference_logprobs
from posttrain.config.schema import Model
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.rl.engines.reference_logprobs import BOUNDS, Held, compare
from posttrain.rl.evaluation.layerwise import Loading, logprobs_by_layer, logprobs_whole

log = logging.getLogger(__name__)

STEP = "check_export"
# Either the weights are rounded to BF16 for the export, or the trainer computed in BF16: one rounding, not both.
BOUND = BOUNDS["bf16"]
# Lines that fit in a terminal.
MOST_LINES = 20
_REMEDY = "do not use it; export it again with this version (export.check=off skips this check)"


def check_export(folder: Path, model: Model, way: str) -> dict[str, Any]:
    """Load an export with transformers and compare it with the trained model.

    Args:
        folder: The exported checkpoint.
        model: The trained model.
        way: "whole" or "layers".

    Returns:
        The findings as plain JSON types; `canary` is null if the trainer recorded no reference log-probabilities.

    Raises:
        CheckpointError: The checkpoint is incomplete.
        ConfigError: A copy differs from its original, transformers misses or does not know a tensor, or its
            log-probabilities differ from the trainer's.
    """
    import transformers

    reader, canary = check_layout(folder), read_reference_logprobs(folder)
    raise_if_any(list(_stale_copies(reader, model)))
    pairs = [(prompt.prompt_tokens, prompt.response_tokens) for prompt in canary.prompts] if canary else []
    layers = model.architecture.num_hidden_layers
    mtp_layers = range(layers, layers + model.architecture.num_nextn_predict_layers)
    load = {"whole": logprobs_whole, "layers": logprobs_by_layer}[way]
    answers, loading = load(folder, pairs, mtp_layers)
    raise_if_any(list(_wrongly_loaded(folder, loading)))
    held = compare(canary, answers, "bf16") if canary else None
    if canary and held and not held.difference <= BOUND:
        raise ConfigError([_far(folder, canary, held)])
    return {
        "check": way,
        "transformers": transformers.__version__,
        "num_tensors": len(reader),
        "canary": held and {"num_tokens": held.num_tokens, "difference": held.difference, "largest": held.largest},
        "bound": BOUND,
    }


def in_words(found: dict[str, Any]) -> str:
    """Return the findings as a sentence."""
    if found["check"] == "off":
        return "not checked (export.check=off)"
    ways = {"whole": "whole", "layers": "layer by layer"}
    loaded = f"transformers {found['transformers']} loads all {found['num_tensors']:,} tensors {ways[found['check']]}"
    if not (canary := found["canary"]):
        return f"{loaded}; there are no recorded log-probabilities of the trainer to compare with"
    near = f"{canary['difference']:.2g} nats from the trainer's in the mean of {canary['num_tokens']} tokens"
    return f"{loaded}; its log-probabilities are {near} (at most {found['bound']:g})"


def _stale_copies(reader: CheckpointReader, model: Model) -> Iterator[Problem]:
    differing = differing_copies(read_object(reader.folder / CONFIG), model.architecture, reader)
    for copy, copied in differing.items():
        if copy == "lm_head.weight" or model.patch.copies != KEEP:
            value = f"differs from {copied} (in {reader.file_of(copy)} and {reader.file_of(copied)})"
            yield Problem("copy-differs", f"{reader.folder}: {copy}", value, f"the values of {copied}", _REMEDY)


def _wrongly_loaded(folder: Path, loading: Loading) -> Iterator[Problem]:
    if lines := loading.lines():
        shown = "\n        ".join(lines[:MOST_LINES])
        more = f"\n        and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
        value = f"transformers does not load {len(lines)} tensors as they are:\n        {shown}{more}"
        yield Problem("tensors-not-loaded", str(folder), value, "each tensor of the model, and no other", _REMEDY)


def _far(folder: Path, canary: ReferenceLogprobs, held: Held) -> Problem:
    value = (
        f"transformers' log-probabilities are {held.difference:.3g} nats from the trainer's ({canary.trainer}) in the "
        f"mean of {held.num_tokens} tokens (largest {held.largest:.3g}; transformers {held.server_mean:.3g}, trainer "
        f"{held.trainer_mean:.3g})"
    )
    return Problem("logprobs-differ", str(folder), value, f"at most {BOUND:g} nats", _REMEDY)
