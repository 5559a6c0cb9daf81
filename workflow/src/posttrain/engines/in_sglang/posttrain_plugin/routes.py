"""The experts that SGLang tells of a request's tokens, in as few bytes as they need instead of four each.

Of GLM-5 a token has 624 of them, and base64 and JSON take each a third more, all through one process of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def packed(get_topk: Callable[..., torch.Tensor], capturer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return what SGLang does, [tokens, layers, experts of a token], as uint8, or int16 if one is over 255."""
    chosen = get_topk(capturer, *args, **kwargs)
    if capturer.host_cache.name != "routed_experts" or not chosen.numel():
        return chosen
    return chosen.to(torch.uint8 if int(chosen.max()) < 256 else torch.int16)


def where_there_are_gpus(pin: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Pin host memory for GPUs; without any SGLang would ask CUDA for it all the same, and end."""
    if torch.cuda.is_available():
        pin(*args, **kwargs)
