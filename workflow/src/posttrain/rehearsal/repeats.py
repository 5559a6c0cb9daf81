"""What is computed once for all arguments of the same shapes, and counted each time.

Which keys queries attend to is found block by block of queries, and log-probabilities chunk by chunk of tokens, in
thousands of small operations for each layer, pass and row: there a rehearsal would spend most of its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from posttrain.rehearsal.recorder import Phase, Recorder


def provide(recorder: Recorder) -> None:
    """Let the choice of keys, and log-probabilities of a chunk, be such computations."""
    from posttrain.algorithm import logprobs
    from posttrain.megatron_backend.glm5 import latent_space

    latent_space.places_of_block = once(latent_space.places_of_block, recorder)
    logprobs.logit_chunks = few_of_alike(logprobs.logit_chunks, recorder)  # type: ignore[assignment]


def once(function: Callable[..., torch.Tensor], recorder: Recorder) -> Callable[..., torch.Tensor]:
    """Return a function that returns a tensor without values where it knows what the given one would have done.

    Args:
        function: Takes a selector of keys, their places, and numbers; keeps nothing but what it returns.
        recorder: Counts.
    """
    known: dict[Any, tuple[Phase, torch.Tensor]] = {}

    def counted(select: Any, places: torch.Tensor, *numbers: int) -> torch.Tensor:
        if select is not None and not isinstance(select, partial):
            return function(select, places, *numbers)  # it keeps what it has chosen
        key = (select and tuple(part.shape for part in select.args), places.shape, *numbers)
        if key in known:
            counts, like = known[key]
            recorder.repeat(counts)
            return torch.empty(like.shape, dtype=like.dtype, device=places.device)
        with recorder.counts() as counts:
            made = function(select, places, *numbers)
        known[key] = counts, made.to("meta")
        return made

    return counted


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
