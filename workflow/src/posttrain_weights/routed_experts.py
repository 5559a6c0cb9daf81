"""SGLang's routed experts of a request's tokens, packed into as few bytes as they need instead of four each.

Of GLM-5 a token has 624 of them, and base64 takes a third more, all through one process of the engine. SGLang's own
processes speak in base64; over HTTP the bytes follow the answer.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import torch


def packed(get_topk: Callable[..., torch.Tensor], capturer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return what SGLang does, [tokens, layers, experts of a token], as uint8, or int16 if one is over 255."""
    chosen = get_topk(capturer, *args, **kwargs)
    if capturer.host_cache.name != "routed_experts" or not chosen.numel():
        return chosen
    return chosen.to(torch.uint8 if int(chosen.max()) < 256 else torch.int16)


def behind_json(content: Any, as_json: Callable[[Any], bytes]) -> bytes:
    """Return an answer to /generate with the experts' bytes behind it, empty where it tells of none.

    What is returned begins with the length of the JSON in eight bytes, little-endian. In the JSON stands how many bytes
    are a response's; they follow in the order of responses.
    """
    items = content if isinstance(content, list) else [content]
    told = [meta for item in items if isinstance(meta := item.get("meta_info", {}).get("routed_experts"), str)]
    if not told:
        return b""
    octets = []
    for item in items:
        meta = item["meta_info"]
        octets.append(base64.b64decode(meta.get("routed_experts") or ""))
        meta["routed_experts"] = len(octets[-1])
    text = as_json(content)
    return b"".join([len(text).to_bytes(8, "little"), text, *octets])


def where_there_are_gpus(pin: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Pin host memory for GPUs; without any SGLang would ask CUDA for it all the same, and end."""
    if torch.cuda.is_available():
        pin(*args, **kwargs)
