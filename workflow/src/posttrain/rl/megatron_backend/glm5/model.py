"""The trained model: Megatron's GPTModel with log-probabilities as output instead of logits.

Logits [T, V] are the largest activation of a step (32,768 tokens x 154,880 words in FP32 are 18.9 GiB). They are
computed for `log_probs_chunk_size` tokens at a time, only for tokens in the loss mask, and all but the last chunk's are
recomputed in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from posttrain.rl.algorithm.logprobs import VocabularyShard, chunked_logprobs
from posttrain.rl.megatron_backend.cpu_functions import announce_gradient
from posttrain.rl.megatron_backend.glm5.linear import await_weight


class LogprobModel(GPTModel):
    """GPTModel whose last stage returns [2, T] fp32: each label's log-probability, and the entropy at its position.

    Only the log-probability has a gradient. Both are 0 where `loss_mask` [1, T], if given, is 0. Without labels the
    last stage returns logits. Context-parallel ranks each read their own tokens of a row, but all return the whole row,
    because an objective may combine tokens of a sequence.

    Args:
        log_probs_chunk_size: Tokens whose logits exist at a time.
        temperature: Divides the logits, as in sampling.
        num_words: Rows of the output matrix that are real words; None: all. Padding rows after them get no gradient.
    """

    def __init__(
        self, *args: Any, log_probs_chunk_size: int, temperature: float, num_words: int | None = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.log_probs_chunk_size = log_probs_chunk_size
        self.temperature = temperature
        self.num_words = self.vocab_size if num_words is None else num_words

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        labels, mask = kwargs["labels"], kwargs.get("loss_mask")
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states, *args, **kwargs)
        await_weight(self.output_layer)
        asked = (torch.ones_like(labels) if mask is None else mask).squeeze(0).nonzero().squeeze(1)
        weight = self._output_weight()
        # On a GPU the plan counts the output matrix's gradient as memory of its own.
        weight_grad = getattr(weight, "main_grad", None) if weight.device.type == "cpu" else None
        answers = chunked_logprobs(
            self._enter_vocab_parallel(hidden_states).squeeze(1).index_select(0, asked),
            weight,
            labels.squeeze(0)[asked],
            self.temperature,
            self.log_probs_chunk_size,
            self._shard(),
            weight_grad,
        )
        if weight_grad is not None and not (self.share_embeddings_and_output_weights and self.pre_process):
            answers = _AddedGradient.apply(answers[0], weight), answers[1]
        result = torch.zeros(2, labels.shape[1], device=labels.device)
        return kwargs["packed_seq_params"].whole(result.index_copy(1, asked, torch.stack(answers)).T).T

    def _output_weight(self) -> torch.Tensor:
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def _shard(self) -> VocabularyShard:
        """Return this tensor-parallel rank's part of the vocabulary."""
        num_rows = len(self._output_weight())
        first = parallel_state.get_tensor_model_parallel_rank() * num_rows
        is_shared = parallel_state.get_tensor_model_parallel_world_size() > 1
        group = parallel_state.get_tensor_model_parallel_group() if is_shared else None
        return VocabularyShard(first, min(max(self.num_words - first, 0), num_rows), group)

    def _enter_vocab_parallel(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gather all tokens on every tensor-parallel rank; the backward pass sums their gradients."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(hidden_states)


class _AddedGradient(torch.autograd.Function):
    """Identity that announces a weight's gradient, which the backward pass adds to Megatron's buffer.

    Megatron counts the weight as done when autograd has a gradient for it. The embedding gives one where it is the same
    weight; otherwise it is this one, which is not read.
    """

    @staticmethod
    def forward(ctx: Any, logprobs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return logprobs.view_as(logprobs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, announce_gradient(ctx.weight)
