"""What is computed once for all arguments of the same shapes, and counted each time.

Which keys queries attend to is found block by block of queries, positions of tokens layer by layer, log-probabilities
chunk by chunk of tokens, and the weights that are served matrix by matrix, in thousands of small operations for each
layer, pass and row: there a rehearsal would spend most of its time.
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
    """Let the choice of keys, positions, log-probabilities of a chunk, and a served matrix be such computations."""
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
    """Return a function that returns a tensor without values where it knows what the given one would have done.

    Args:
        function: Keeps nothing but what it returns, and what its first argument keeps.
        recorder: Counts.
        like: Returns of its arguments what decides what it does; None where it has to be asked each time.
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
    # A choice that is kept is made once, and read by layers that take it over.
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
    """Return what yields two chunks of each size; what is done with the second counts for the others.

    The second finds what the first has left behind, as each one after it finds what the one before has left.

    Args:
        chunks: `logprobs.logit_chunks`.
        recorder: Counts.
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
