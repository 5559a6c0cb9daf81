"""The section `evaluation.deployment` of the typed configuration (`schema.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc

# The baseline of the comparison.
ORIGINAL = "original"


@dataclass(frozen=True)
class Deployment:
    """Limits of the loss by quantisation, for the rule `compare_precisions`."""

    max_loss_points: float = _doc(
        "Maximum loss of the pass rate in points: the upper end of the 95 % interval of the loss, paired by prompt",
        1.0,
        exclusive_minimum=0,
    )
    max_kl: float = _doc(
        "Maximum mean KL of the next token to the original's, in nats, over the original's responses",
        0.02,
        exclusive_minimum=0,
    )
    num_samples: int = _doc("Responses for the KL, to the first held-out prompts", 64, minimum=1)
