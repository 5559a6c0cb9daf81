"""Ways in which a message of a weight transfer can be another than the one that was sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

Place = tuple[int, int]  # round, and the other member
Spoil = Callable[[torch.Tensor, Place, Mapping[Place, torch.Tensor], random.Random], torch.Tensor | None]


def flipped(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    message[drawn.randrange(len(message))] ^= 1 << drawn.randrange(8)
    return message


def truncated(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    message[drawn.randrange(len(message)) :] = 0
    return message


def reordered(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    return message.roll(16 * drawn.randrange(1, max(2, len(message) // 16)))


def forged(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    generator = torch.Generator().manual_seed(drawn.randrange(1 << 30))
    return torch.randint(0, 256, (len(message),), generator=generator, dtype=torch.uint8)


def dropped(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> None:
    return None


def repeated(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    """Another round's message comes again."""
    other = before[drawn.choice([known for known in before if known != place])]
    shared = min(len(other), len(message))
    message[:shared] = other[:shared]
    return message


def stale(message: torch.Tensor, place: Place, before: Any, drawn: random.Random) -> torch.Tensor:
    """The last version's."""
    return before[place]


SPOILED: tuple[Spoil, ...] = (flipped, truncated, reordered, forged, dropped, repeated, stale)
