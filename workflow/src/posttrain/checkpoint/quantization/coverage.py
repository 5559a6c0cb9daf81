"""How many tokens a calibration gave to each expert; read without torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# In the folder of a calibration while it is made: what finished shards have seen.
STATE_FOLDER = "state"
# Of experts that were given nothing, as many layers are named in one line.
MOST_NAMED = 5


def coverage(counts: Sequence[Sequence[int]], first_layer: int) -> dict[str, Any]:
    """Return how many tokens each expert was given.

    Args:
        counts: Of each layer, the tokens of each expert.
        first_layer: The first with experts.

    Returns:
        "never": how many experts were given nothing; their scales come from the largest magnitude of their layer.
        "layers": number of the layer -> "min", "median" and "max" tokens, "never" (numbers of experts), "tokens" (of
        each expert).
    """
    layers = {str(layer): _of_layer(counts[layer]) for layer in range(first_layer, len(counts))}
    return {"never": sum(len(row["never"]) for row in layers.values()), "layers": layers}


def _of_layer(tokens: Sequence[int]) -> dict[str, Any]:
    never = [expert for expert, number in enumerate(tokens) if not number]
    median = statistics.median(tokens)
    return {"min": min(tokens), "median": median, "max": max(tokens), "never": never, "tokens": list(tokens)}


def describe_coverage(found: Mapping[str, Any]) -> str:
    """Return what `coverage` has found as one line."""
    layers = found["layers"]
    least = min(layers, key=lambda layer: layers[layer]["min"])
    medians = [row["median"] for row in layers.values()]
    told = (
        f"tokens per expert: median {min(medians):,.0f} to {max(medians):,.0f} over layers, least "
        f"{layers[least]['min']:,} (layer {least})"
    )
    never = [f"layer {layer}: {', '.join(map(str, row['never']))}" for layer, row in layers.items() if row["never"]]
    if not never:
        return told
    more = "; ..." if len(never) > MOST_NAMED else ""
    named = "; ".join(never[:MOST_NAMED]) + more
    return f"{told}; {found['never']} never reached, which take the largest magnitude of their layer ({named})"
