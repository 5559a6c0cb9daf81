"""Number of calibration tokens per expert; does not need torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# In the folder of an unfinished calibration: the maxima of finished shards.
STATE_FOLDER = "state"
# Number of layers with unused experts that one line names.
MOST_NAMED = 5


def coverage(counts: Sequence[Sequence[int]], first_layer: int) -> dict[str, Any]:
    """Summarise the number of tokens per expert.

    Args:
        counts: Tokens per expert, for each layer.
        first_layer: First layer with experts.

    Returns:
        "never": number of experts without tokens; their scales come from the maximum of their layer.
        "layers": layer number -> "min", "median" and "max" tokens, "never" (expert numbers), "tokens" (per expert).
    """
    layers = {str(layer): _of_layer(counts[layer]) for layer in range(first_layer, len(counts))}
    return {"never": sum(len(row["never"]) for row in layers.values()), "layers": layers}


def _of_layer(tokens: Sequence[int]) -> dict[str, Any]:
    never = [expert for expert, number in enumerate(tokens) if not number]
    median = statistics.median(tokens)
    return {"min": min(tokens), "median": median, "max": max(tokens), "never": never, "tokens": list(tokens)}


def describe_coverage(found: Mapping[str, Any]) -> str:
    """Return the result of `coverage` as one line."""
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
