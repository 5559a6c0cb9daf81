"""Packs SGLang's routed experts into one or two bytes each instead of four.

GLM-5 has 624 per token, base64 adds a third, and all pass through one process of the engine. SGLang's processes
exchange base64; over HTTP the bytes follow the answer.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import torch


def packed(get_topk: Callable[..., torch.Tensor], capturer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return SGLang's routes, [tokens, layers, experts per token], as uint8, or int16 if an id exceeds 255."""
    chosen = get_topk(capturer, *args, **kwargs)
    if capturer.host_cache.name != "routed_experts" or not chosen.numel():
        return chosen
    return chosen.to(torch.uint8 if int(chosen.max()) < 256 else torch.int16)


def behind_json(content: Any, as_json: Callable[[Any], bytes]) -> bytes:
    """Return a /generate answer followed by the experts' bytes; empty if it has none.

    The result begins with the JSON's length in eight bytes, little-endian. The JSON gives each response's byte count;
    the bytes follow in the order of responses.
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
    """Pin host memory only if there are GPUs; otherwise SGLang would still call CUDA and crash."""
    if torch.cuda.is_available():
        pin(*args, **kwargs)
