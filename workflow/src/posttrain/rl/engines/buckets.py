"""Groups an update's weights into buckets of bounded size.

An engine loads a bucket in one call, and some tensors must arrive in the same call: a quantised weight with its scales,
and the two projections of the same input (`q_a_proj`, `kv_a_proj_with_mqa`), which SGLang fuses into one matrix and
loads only together; without a query latent there is only the second. Such a bundle is never split: it waits until its
last tensor arrives, anywhere in the stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import cache

import torch

from posttrain.checkpoint.quantization.fp8 import SCALE_SUFFIX, SCALE_SUFFIXES

log = logging.getLogger(__name__)

WEIGHT_SUFFIX = ".weight"
FUSED_WITH_QUERY = (".kv_a_proj_with_mqa.", ".q_a_proj.")

NamedTensor = tuple[str, torch.Tensor]


def make_buckets(
    named_tensors: Iterable[NamedTensor], limit_bytes: int, has_query_latent: bool = True
) -> Iterator[list[NamedTensor]]:
    """Group a stream of tensors into buckets.

    Args:
        named_tensors: Hub names and tensors in served form, in any order; consumed lazily.
        limit_bytes: Maximum size of a bucket. A larger bundle forms its own bucket.
        has_query_latent: The model has a `q_a_proj` beside each `kv_a_proj_with_mqa`.

    Yields:
        Buckets in the order of the stream, each tensor once.

    Raises:
        ValueError: A bundle is incomplete at the end of the stream.
    """
    assert limit_bytes > 0, limit_bytes
    bucket, filled = list[NamedTensor](), 0
    for bundle in _bundles(named_tensors, has_query_latent):
        size = sum(tensor.nbytes for _, tensor in bundle)
        if bucket and filled + size > limit_bytes:
            yield bucket
            bucket, filled = [], 0
        if size > limit_bytes:
            log.info(
                "%s and what belongs to it take %d bytes, more than a bucket of %d: sent alone",
                bundle[0][0],
                size,
                limit_bytes,
            )
        bucket += bundle
        filled += size
    if bucket:
        yield bucket


def _bundles(named_tensors: Iterable[NamedTensor], has_query_latent: bool) -> Iterator[list[NamedTensor]]:
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in named_tensors:
        bundle = waiting.setdefault(_bundle_of(name), {})
        bundle[name] = tensor
        if not _missing(bundle, has_query_latent):
            yield list(waiting.pop(_bundle_of(name)).items())
    if waiting:
        missing = sorted(name for bundle in waiting.values() for name in _missing(bundle, has_query_latent))
        raise ValueError(f"the update ends without {', '.join(missing[:10])} ({len(missing)} missing)")


def _bundle_of(name: str) -> str:
    """Return the key of a tensor's bundle."""
    return weight_of(name).replace(*FUSED_WITH_QUERY)


def _missing(bundle: dict[str, torch.Tensor], has_query_latent: bool) -> set[str]:
    """Return the names that a bundle still lacks."""
    wanted = set()
    for name, tensor in bundle.items():
        for one, other in (FUSED_WITH_QUERY, FUSED_WITH_QUERY[::-1]):
            if has_query_latent and one in name and name.endswith(WEIGHT_SUFFIX):
                wanted.add(name.replace(one, other))
        if tensor.dtype == torch.float8_e4m3fn and not any(name + suffix in bundle for suffix in SCALE_SUFFIXES):
            wanted.add(name + SCALE_SUFFIX)
        wanted.add(weight_of(name))
    return wanted - bundle.keys()


@cache
def weight_of(name: str) -> str:
    """Return the name of the codes that scales belong to, or the name itself."""
    return next((name.removesuffix(suffix) for suffix in SCALE_SUFFIXES if name.endswith(suffix)), name)
