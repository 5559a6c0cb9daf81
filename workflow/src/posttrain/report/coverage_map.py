"""A heat map of the tokens that a calibration routed to each expert: one row per layer, experts sorted by tokens.

Experts of a layer are sorted from the fewest tokens to the most, so a row of 256 becomes a few stretches of one shade.
The map shows how many experts received few tokens; the log names those that received none.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, pairwise
from typing import Any

from markupsafe import Markup

from posttrain.report.report_charts import WIDE_WIDTH, svg_text

# The lowest token count of each shade; zero tokens have their own colour.
SHADES = (1, 10, 100, 1_000, 10_000)
LABEL_WIDTH, LEGEND_HEIGHT, ROW_HEIGHT, FEWEST_ROWS_HEIGHT = 54.0, 26.0, 5.0, 14.0
# Number of rows with a label.
MOST_LABELS = 16
NEVER = "none: the largest magnitude of its layer is taken"


def shade_of(tokens: int) -> int:
    """Return the number of a shade, 0 for no token.

    Example:
        0 -> 0, 9 -> 1, 10 -> 2, 123,456 -> 5.
    """
    return sum(tokens >= least for least in SHADES)


def coverage_map(found: Mapping[str, Any]) -> Markup:
    """Return the picture as inline SVG.

    Args:
        found: See `checkpoint.quantization.coverage.coverage`.
    """
    layers = {layer: sorted(map(int, row["tokens"])) for layer, row in found["layers"].items()}
    height = ROW_HEIGHT if len(layers) > MOST_LABELS else FEWEST_ROWS_HEIGHT
    every = -(-len(layers) // MOST_LABELS)
    parts = [_legend()]
    for row, (layer, tokens) in enumerate(layers.items()):
        top = LEGEND_HEIGHT + row * height
        if row % every == 0:
            parts.append(svg_text("tick", LABEL_WIDTH - 7, top + height / 2 + 3.5, f"layer {layer}", "end"))
        parts += _row(tokens, top, height - 1)
    bottom = LEGEND_HEIGHT + len(layers) * height
    parts.append(svg_text("axis", LABEL_WIDTH, bottom + 14, "experts, from the fewest tokens to the most"))
    svg = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="tokens of each expert">{}</svg>')
    return svg.format(WIDE_WIDTH, bottom + 20, Markup().join(parts))


def _row(tokens: list[int], top: float, height: float) -> list[Markup]:
    """Return a rectangle for each stretch of experts of one shade."""
    parts, place, width = [], 0, (WIDE_WIDTH - LABEL_WIDTH) / len(tokens)
    for shade, group in groupby(tokens, shade_of):
        same = list(group)
        told = f"{len(same)} of {len(tokens)} experts: {_span(same[0], same[-1])}"
        parts.append(_rectangle(LABEL_WIDTH + place * width, top, len(same) * width, height, shade, told))
        place += len(same)
    return parts


def _span(least: int, most: int) -> str:
    return f"{least:,} tokens" if least == most else f"{least:,} to {most:,} tokens"


def _legend() -> Markup:
    words = [NEVER, *(f"{low:,} to {high - 1:,}" for low, high in pairwise(SHADES))]
    words.append(f"{SHADES[-1]:,} and more")
    parts, x = [], LABEL_WIDTH
    for shade, word in enumerate(words):
        parts += [_rectangle(x, 4, 10, 10, shade, word), svg_text("axis", x + 14, 13, word)]
        x += 30 + 6.2 * len(word)
    return Markup().join(parts)


def _rectangle(x: float, y: float, width: float, height: float, shade: int, title: str) -> Markup:
    drawn = Markup(
        '<rect class="{}" fill="currentColor" fill-opacity="{:.2f}" x="{:.1f}" y="{:.1f}" width="{:.1f}" '
        'height="{:.1f}"><title>{}</title></rect>'
    )
    opacity = 1.0 if shade == 0 else 0.15 + 0.85 * (shade - 1) / (len(SHADES) - 1)
    return drawn.format("c5" if shade == 0 else "c1", opacity, x, y, width, height, title)
