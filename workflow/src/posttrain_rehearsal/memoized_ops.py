"""Computations that run once for all arguments of the same shapes, and are counted each time.

The choice of keys runs per block of queries, positions per layer, log-probabilities per chunk of tokens, and served
weights per matrix, in thousands of small operations for each layer, pass and row: without the cache, a rehearsal would
spend most of its time there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from posttrain.checkpoint.quantization.fp8 import BLOCK, Fp8Format
from posttrain.rl.megatron_backend.glm5.sparse_attention import KeptKeys
from posttrain_rehearsal.recorder import Phase, Recorder


def provide(recorder: Recorder) -> None:
    """Memoize the choice of keys, positions, log-probabilities of a chunk, and served matrices."""
    from posttrain.rl.algorithm import logprobs
    from posttrain.rl.megatron_backend import packed_rotary, served_values
    from posttrain.rl.megatron_backend.glm5 import latent_space

    latent_space.places_of_block = once(latent_space.places_of_block, recorder, _like_places)
    packed_rotary.own_positions = once(packed_rotary.own_positions, recorder, _like_positions)
    served_values.served_part = once(served_values.served_part, recorder, _like_part)
    logprobs.logit_chunks = few_of_alike(logprobs.logit_chunks, recorder)  # type: ignore[assignment]


def once(
    function: Callable[..., torch.Tensor], recorder: Recorder, like: Callable[..., Any]
) -> Callable[..., torch.Tensor]:
    """Wrap a function; for known arguments the wrapper returns a tensor without values, and repeats the counts.

    Args:
        function: Its only effects are its result and what its first argument stores.
        recorder: Repeats the counts.
        like: Returns a cache key of the arguments, or None if the call cannot be cached.
    """
    known: dict[Any, tuple[Phase, torch.device, torch.Tensor, dict[Any, torch.Tensor]]] = {}

    def counted(first: Any, *others: Any) -> torch.Tensor:
        key = like(first, *others)
        if key in known:
            counts, device, made, left = known[key]
            recorder.repeat(counts)
            if isinstance(first, KeptKeys):
                first.bits |= {span: _without_values(bits, device) for span, bits in left.items()}
            return _without_values(made, device)
        with recorder.counts() as counts:
            made = function(first, *others)
        left = first.bits if isinstance(first, KeptKeys) else {}
        if key is not None:
            known[key] = counts, made.device, made.to("meta"), {span: bits.to("meta") for span, bits in left.items()}
        return made

    return counted


def _without_values(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _like_places(select: Any, places: torch.Tensor, *numbers: int) -> Any:
    # A stored choice is computed once, and read by the layers that share it.
    kept = sorted(select.bits) if isinstance(select, KeptKeys) else None
    chosen = select.select if isinstance(select, KeptKeys) else select
    if chosen is not None and not isinstance(chosen, partial):
        return None
    return (chosen and tuple(part.shape for part in chosen.args), str(kept), places.shape, *numbers)


def _like_positions(boundaries: torch.Tensor, *numbers: int) -> Any:
    return (boundaries.shape, *numbers)


def _like_part(served: Fp8Format, values: torch.Tensor, corner: tuple[int, ...], magnitudes: Any) -> Any:
    within_block = tuple(start % BLOCK for start in corner)
    return served.strategy, served.scale, values.shape, values.dtype, within_block, magnitudes is None


Chunks = Callable[[torch.Tensor, torch.Tensor, float, int], Iterator[tuple[slice, torch.Tensor]]]


def few_of_alike(chunks: Chunks, recorder: Recorder) -> Chunks:
    """Yield only two chunks of each size; the counts of the second are repeated for the others.

    The second chunk starts with the memory that the first leaves behind, as every later one does.

    Args:
        chunks: `logprobs.logit_chunks`.
        recorder: Repeats the counts.
    """

    def few(
        hidden: torch.Tensor, words: torch.Tensor, temperature: float, chunk_size: int
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        seen: dict[int, list[Phase]] = defaultdict(list)
        for rows, logits in chunks(hidden, words, temperature, chunk_size):
            alike = seen[len(logits)]
            if len(alike) == 2:
                recorder.repeat(alike[-1])
                continue
            with recorder.counts() as counts:
                yield rows, logits
            alike.append(counts)

    return few
