"""Computations that run once for all arguments of the same shapes, and are counted each time.

The choice of keys runs per block of queries, positions per layer, log-probabilities per chunk of tokens, and served
weights per matrix, in thousands of small operations for each layer, pass and row: without the cache, a rehearsal would
spend most of its time there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from posttrain.checkpoint.quantization.fp8 import BLOCK, Fp8Format
from posttrain_rehearsal.recorder import Phase, Recorder


def provide(recorder: Recorder) -> None:
    """Memoize the choice of keys, positions, log-probabilities of a chunk, and served matrices."""
    from posttrain.rl.algorithm import logprobs
    from posttrain.rl.megatron_backend import packed_rotary, served_values
    from posttrain.rl.megatron_backend.glm5 import attention, indexer

    indexer.choose_in_chunks = once(indexer.choose_in_chunks, recorder, _like_tensors)
    attention.places_in_row = once(attention.places_in_row, recorder, _like_tensors)
    packed_rotary.own_positions = once(packed_rotary.own_positions, recorder, _like_positions)
    served_values.served_part = once(served_values.served_part, recorder, _like_part)
    logprobs.logit_chunks = few_of_alike(logprobs.logit_chunks, recorder)  # type: ignore[assignment]


def once(
    function: Callable[..., torch.Tensor], recorder: Recorder, like: Callable[..., Any]
) -> Callable[..., torch.Tensor]:
    """Wrap a function; for known arguments the wrapper returns a tensor without values, and repeats the counts.

    Args:
        function: Its only effect is its result.
        recorder: Repeats the counts.
        like: Returns a cache key of the arguments.
    """
    known: dict[Any, tuple[Phase, torch.device, torch.Tensor]] = {}

    def counted(*arguments: Any) -> torch.Tensor:
        key = like(*arguments)
        if key in known:
            counts, device, made = known[key]
            recorder.repeat(counts)
            return torch.empty(made.shape, dtype=made.dtype, device=device)
        with recorder.counts() as counts:
            made = function(*arguments)
        known[key] = counts, made.device, made.to("meta")
        return made

    return counted


def _like_tensors(*arguments: Any) -> Any:
    return tuple((a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments)


def _like_positions(boundaries: torch.Tensor, *numbers: int) -> Any:
    return (boundaries.shape, *numbers)


def _like_part(served: Fp8Format, values: torch.Tensor, corner: tuple[int, ...], magnitudes: Any) -> Any:
    within_block = tuple(start % BLOCK for start in corner)
    return served.strategy, served.scale, values.shape, values.dtype, within_block, magnitudes is None


Chunks = Callable[[torch.Tensor, torch.Tensor, float, int, torch.Tensor], Iterator[tuple[slice, torch.Tensor]]]


def few_of_alike(chunks: Chunks, recorder: Recorder) -> Chunks:
    """Yield only two chunks of each size; the counts of the second are repeated for the others.

    The second chunk starts with the memory that the first leaves behind, as every later one does.

    Args:
        chunks: `logprobs.logit_chunks`.
        recorder: Repeats the counts.
    """

    def few(
        hidden: torch.Tensor, words: torch.Tensor, temperature: float, chunk_size: int, room: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        seen: dict[int, list[Phase]] = defaultdict(list)
        for rows, logits in chunks(hidden, words, temperature, chunk_size, room):
            alike = seen[len(logits)]
            if len(alike) == 2:
                recorder.repeat(alike[-1])
                continue
            with recorder.counts() as counts:
                yield rows, logits
            alike.append(counts)

    return few
