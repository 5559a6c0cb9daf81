"""The section `evaluation.deployment` of the typed configuration (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc

# What other precisions are compared with.
ORIGINAL = "original"


@dataclass(frozen=True)
class Deployment:
    """What a quantised checkpoint may lose to be deployed, when the rule `compare_precisions` is asked for."""

    max_loss_points: float = _doc(
        "Points of the pass rate that may be lost: the upper end of the 95 % interval of the loss, prompt by prompt",
        1.0,
        exclusive_minimum=0,
    )
    max_kl: float = _doc(
        "Mean KL of the next token from the original's, in nats, over the original's responses",
        0.02,
        exclusive_minimum=0,
    )
    num_samples: int = _doc("Responses over which the KL is taken, of the first held-out prompts", 64, minimum=1)
