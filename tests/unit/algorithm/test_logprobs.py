import math

import numpy as np
import pytest
import torch

from posttrain.algorithm.logprobs import chunked_logprobs, logprobs_from_logits

TOKENS, HIDDEN, VOCABULARY = 1030, 16, 300


@pytest.fixture(scope="module")
def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def _reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = hidden.double() @ weight.double().T / temperature
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(targets)), targets]


def test_by_hand():
    logits = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]])
    targets = torch.tensor([1, 1])
    assert logprobs_from_logits(logits, targets).tolist() == pytest.approx([math.log(3 / 4), math.log(1 / 4)])
    assert logprobs_from_logits(logits, targets, 0.5).tolist() == pytest.approx([math.log(9 / 10), math.log(1 / 10)])


def test_any_leading_axes_and_bf16_logits():
    """Computed in FP32: BF16 would round the divided logits and their sum to two or three digits."""
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(2)).bfloat16()
    targets = torch.randint(50, (2, 3), generator=torch.Generator().manual_seed(3))
    logprobs = logprobs_from_logits(logits, targets, 0.7)
    wide = logits.double().numpy() / 0.7
    chosen = np.take_along_axis(wide, targets.numpy()[..., None], -1)[..., 0]
    expected = chosen - np.log(np.exp(wide).sum(-1))
    assert (logprobs.dtype, logprobs.shape) == (torch.float32, (2, 3))
    assert np.abs(logprobs.numpy() - expected).max() < 1e-5


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("chunk_size", [1, 7, 1024, TOKENS])
def test_every_chunk_size_gives_the_log_softmax_and_its_gradient(case, chunk_size, temperature):
    grown = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    results = []
    for compute in (_reference, lambda *inputs: chunked_logprobs(*inputs, chunk_size)):
        hidden, weight = (tensor.clone().requires_grad_() for tensor in case[:2])
        logprobs = compute(hidden, weight, case[2], temperature)
        (logprobs.float() * grown).sum().backward()
        results.append((logprobs.detach().double(), hidden.grad, weight.grad))
    (expected, expected_hidden, expected_weight), (logprobs, hidden_grad, weight_grad) = results
    assert logprobs.shape == (TOKENS,)
    # Relative to the size of the logits: a log-probability is their difference.
    assert (logprobs - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert (hidden_grad - expected_hidden).abs().max() <= 1e-5 * expected_hidden.abs().max()
    assert (weight_grad - expected_weight).abs().max() <= 1e-5 * expected_weight.abs().max()


def test_chunks_of_bf16_hidden_states_are_accumulated_in_fp32(case):
    hidden, weight = case[0].bfloat16(), case[1].bfloat16()
    seen = set()

    def from_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.add(logits.dtype)
        return logprobs_from_logits(logits, targets)

    logprobs = chunked_logprobs(hidden, weight, case[2], 0.7, 64, from_logits)
    assert seen == {logprobs.dtype} == {torch.float32}
    logits = torch.nn.functional.linear(hidden, weight).double() / 0.7
    assert torch.allclose(logprobs.double(), logits.log_softmax(-1)[torch.arange(TOKENS), case[2]], atol=1e-5)


def _saved_bytes(case: tuple[torch.Tensor, ...], chunk_size: int | None) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, besides its inputs."""
    hidden, weight = (tensor.clone().requires_grad_() for tensor in case[:2])
    inputs = {hidden.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr()}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if chunk_size is None:
            logprobs = logprobs_from_logits(hidden @ weight.T, case[2])
        else:
            logprobs = chunked_logprobs(hidden, weight, case[2], 1.0, chunk_size)
    logprobs.sum().backward()
    return sum(held.values())


def test_chunks_do_not_keep_logits(case):
    logits_bytes = TOKENS * VOCABULARY * 4
    assert _saved_bytes(case, None) >= logits_bytes
    assert _saved_bytes(case, 64) <= logits_bytes / 20


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the largest tensor that any operation returns, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("chunk_size", [7, 64])
def test_no_tensor_is_larger_than_a_chunk_of_logits(case, chunk_size):
    hidden, weight = (tensor.clone().requires_grad_() for tensor in case[:2])
    with _LargestTensor() as largest:
        chunked_logprobs(hidden, weight, case[2], 1.0, chunk_size).sum().backward()
    assert largest.elements <= max(chunk_size * VOCABULARY, TOKENS * HIDDEN)


def test_a_vocabulary_of_two_ranks_brings_its_own_log_probabilities(case):
    """Two halves of the output matrix, joined as tensor-parallel ranks join theirs, give what one matrix gives."""
    hidden, weight, targets = case
    half = VOCABULARY // 2

    def joined(logits: torch.Tensor, some_targets: torch.Tensor) -> torch.Tensor:
        normaliser = torch.logaddexp(logits[:, :half].logsumexp(-1), logits[:, half:].logsumexp(-1))
        return logits.gather(-1, some_targets[:, None])[:, 0] - normaliser

    together = chunked_logprobs(hidden, weight, targets, 0.9, 100)
    assert torch.allclose(chunked_logprobs(hidden, weight, targets, 0.9, 100, joined), together, atol=1e-5)


def test_hidden_states_that_need_no_gradient_still_give_the_matrix_its_own(case):
    weight = case[1].clone().requires_grad_()
    chunked_logprobs(case[0], weight, case[2], 1.0, 64).sum().backward()
    other = case[1].clone().requires_grad_()
    _reference(case[0], other, case[2], 1.0).sum().backward()
    assert (weight.grad - other.grad).abs().max() <= 1e-5 * other.grad.abs().max()


def test_targets_of_other_tokens_are_refused(case):
    with pytest.raises(ValueError, match="shorter"):
        chunked_logprobs(case[0], case[1], case[2][:512], 1.0, 256)


def test_temperature_zero_has_no_distribution():
    for temperature in (0.0, -1.0):
        with pytest.raises(AssertionError, match="temperature is"):
            logprobs_from_logits(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), temperature)


@pytest.mark.parametrize(("temperature", "chunk_size"), [(0.0, 8), (-1.0, 8), (1.0, 0)])
def test_impossible_settings_are_refused(case, temperature, chunk_size):
    with pytest.raises(AssertionError, match="is"):
        chunked_logprobs(*case, temperature, chunk_size)
