"""Formats numbers for people; also the filters of the page templates."""

from __future__ import annotations

import json
import math
from itertools import groupby
from typing import Any

MINUS = "\u2212"
HOUR, DAY = 3600, 86400
# From here on, days are easier to read than hours.
LONGEST_IN_HOURS = 2 * DAY


def format_number(value: float | None) -> str:
    """Return a number with about four significant digits.

    Example:
        0.123456 -> "0.1235", 1234567 -> "1,234,567", 3.1e-7 -> "3.1e-07", None -> "–".
    """
    if value is None:
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        text = f"{int(value):,}"
    elif 1e-3 <= abs(value) < 1e3:
        text = f"{value:.4g}"
    elif abs(value) >= 1e3:
        text = f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    else:
        text = f"{value:.2e}"
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def format_seconds(value: float | None) -> str:
    """Return a duration.

    Example:
        0.0042 -> "4.2 ms", 7.31 -> "7.3 s", 192 -> "3 min 12 s", 7265 -> "2 h 01 min", 2487900 -> "28.8 days".
    """
    if value is None:
        return "–"
    if value < 0.1:
        return f"{value * 1000:.2g} ms" if value else "0 s"
    if value < 59.95:
        return f"{value:.1f} s"
    if value >= LONGEST_IN_HOURS:
        return f"{value / DAY:.1f} days"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_bytes(value: float | None) -> str:
    """Return a size in decimal units, as disks are labelled: 1 GB = 10^9 bytes."""
    if value is None:
        return "–"
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 999.5 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} B"


def format_percent(value: float | None, digits: int = 1) -> str:
    """Return a share as a percentage."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def format_cost(value: float | None, currency: str) -> str:
    """Return an amount of money; "–" if no price is known."""
    return "–" if value is None else f"{value:,.{0 if value >= 100 else 2}f} {currency}"


def counted(count: int, word: str) -> str:
    """Return a count with its noun: "1 node", "1,024 nodes"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def as_text(value: Any) -> str:
    """Return a configuration value as text; a list groups equal neighbours: "3 × 0, 75 × 1"."""
    if not isinstance(value, list | tuple):
        return value if isinstance(value, str) else json.dumps(value)
    runs = [(len(list(run)), item) for item, run in groupby(value)]
    return ", ".join(f"{length} × {as_text(item)}" if length > 1 else as_text(item) for length, item in runs)


def format_tick(value: float) -> str:
    """Return an axis label: short, exact for round numbers."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 1e6:
        text = f"{value / 1e6:g}M"
    elif magnitude >= 1e4:
        text = f"{value / 1e3:g}k"
    elif magnitude >= 1e-3:
        text = f"{value:.6g}"
    else:
        mantissa, exponent = f"{value:.2e}".split("e")
        text = f"{float(mantissa):g}e{int(exponent)}"
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that cover [low, high]: steps of 1, 2, 2.5 or 5 times a power of ten.

    Example:
        (0, 0.93) -> [0, 0.2, 0.4, 0.6, 0.8, 1.0].
    """
    assert high > low, f"an axis from {low} to {high}"
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12 - math.floor(math.log10(step))) for index in range(first, last + 1)]


def decade_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten that cover [low, high], both positive."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 6))
    ticks = [10.0**exponent for exponent in range(first, last + 1, every)]
    return ticks if ticks[-1] >= high * (1 - 1e-9) else [*ticks, 10.0 ** (first + every * len(ticks))]
