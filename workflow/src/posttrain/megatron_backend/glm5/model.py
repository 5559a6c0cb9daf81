"""The trained model: Megatron's GPTModel that answers with log-probabilities instead of logits.

Logits of [T, V] are the largest activation of a step (32,768 tokens x 154,880 words in FP32 are 18.9 GiB). They are
made for `log_probs_chunk_size` tokens at a time and recomputed in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)

from posttrain.algorithm.logprobs import chunked_logprobs


class LogprobModel(GPTModel):
    """GPTModel whose last stage returns the log-probability of each label, [T] fp32; without labels, logits.

    Args:
        log_probs_chunk_size: Tokens whose logits exist at a time.
        temperature: Logits are divided by it, as at sampling.
    """

    def __init__(self, *args: Any, log_probs_chunk_size: int, temperature: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.log_probs_chunk_size = log_probs_chunk_size
        self.temperature = temperature

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        labels = kwargs["labels"]
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states, *args, **kwargs)
        return chunked_logprobs(
            self._enter_vocab_parallel(hidden_states).squeeze(1),
            self._output_weight(),
            labels.squeeze(0),
            self.temperature,
            self.log_probs_chunk_size,
            from_logits=_vocab_parallel_logprobs,
        )

    def _output_weight(self) -> torch.Tensor:
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def _enter_vocab_parallel(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Give every tensor-parallel rank all tokens; in the backward pass their gradients are added up."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(hidden_states)


def _vocab_parallel_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return log p(target) [t] from this tensor-parallel rank's part of the logits [t, V / TP]."""
    return -vocab_parallel_cross_entropy(logits, targets)
