import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from posttrain.rl.algorithm.logprobs import VocabularyShard, chunked_logprobs

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


def _of_logits(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> list[torch.Tensor]:
    """Ask with the identity as output matrix: its products are the logits themselves."""
    identity = torch.eye(logits.shape[1], dtype=logits.dtype)
    return list(chunked_logprobs(logits, identity, targets, temperature, 8))


def test_by_hand():
    logits = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]])
    targets = torch.tensor([1, 1])
    logprobs, entropies = _of_logits(logits, targets)
    assert logprobs.tolist() == pytest.approx([math.log(3 / 4), math.log(1 / 4)])
    assert entropies.tolist() == pytest.approx([2 * math.log(2) - 0.75 * math.log(3)] * 2)
    logprobs, entropies = _of_logits(logits, targets, 0.5)
    assert logprobs.tolist() == pytest.approx([math.log(9 / 10), math.log(1 / 10)])
    assert entropies.tolist() == pytest.approx([math.log(10) - 0.9 * math.log(9)] * 2)


def test_bf16_logits():
    """Computed in FP32: BF16 would round the divided logits and their sum to two or three digits."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2)).bfloat16()
    targets = torch.randint(50, (6,), generator=torch.Generator().manual_seed(3))
    logprobs, entropies = _of_logits(logits, targets, 0.7)
    wide = logits.double().numpy() / 0.7
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    assert (logprobs.dtype, logprobs.shape, entropies.dtype) == (torch.float32, (6,), torch.float32)
    assert np.abs(logprobs.numpy() - expected[np.arange(6), targets.numpy()]).max() < 1e-5
    assert np.abs(entropies.numpy() + (np.exp(expected) * expected).sum(-1)).max() < 1e-5


def test_certain_and_even_distributions():
    """A logit of a thousand does not overflow, and what has no probability adds nothing to the entropy."""
    logits = torch.tensor([[1000.0, 0.0, -1000.0, 999.0], [5.0, 5.0, 5.0, 5.0]])
    logprobs, entropies = _of_logits(logits, torch.tensor([2, 3]))
    share = 1 / (1 + math.exp(-1))
    assert logprobs.tolist() == pytest.approx([-2000 + math.log(share), -math.log(4)])
    assert entropies.tolist() == pytest.approx([1 - share - math.log(share), math.log(4)])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("chunk_size", [1, 7, 1024, TOKENS])
def test_every_chunk_size_gives_the_log_softmax_and_its_gradient(case, chunk_size, temperature):
    grown = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    results = []
    for compute in (_reference, lambda *inputs: chunked_logprobs(*inputs, chunk_size)[0]):
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


@pytest.mark.parametrize("chunk_size", [1, 100, TOKENS])
def test_the_entropy_is_that_of_the_softmax_and_has_no_gradient(case, chunk_size):
    hidden, weight = (tensor.clone().requires_grad_() for tensor in case[:2])
    _, entropies = chunked_logprobs(hidden, weight, case[2], 0.7, chunk_size)
    logits = case[0].double().numpy() @ case[1].double().numpy().T / 0.7
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    terms = np.where(shares > 0, -shares * np.log(np.where(shares > 0, shares, 1)), 0)
    assert np.abs(entropies.numpy() - terms.sum(-1)).max() <= 1e-5
    assert not entropies.requires_grad


def test_chunks_of_bf16_hidden_states_are_accumulated_in_fp32(case):
    hidden, weight = (tensor.bfloat16().requires_grad_() for tensor in case[:2])
    logprobs, _ = chunked_logprobs(hidden, weight, case[2], 0.7, 4)
    assert logprobs.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, weight).double() / 0.7
    expected = logits.log_softmax(-1)[torch.arange(TOKENS), case[2]]
    assert torch.allclose(logprobs.double(), expected, atol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    wide = case[1].bfloat16().double().requires_grad_()
    _reference(hidden.detach(), wide, case[2], 0.7).sum().backward()
    # Hundreds of chunks added up in BF16 would be wrong in the second digit.
    assert (weight.grad - wide.grad).norm() <= 6e-3 * wide.grad.norm()


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
            logprobs = torch.log_softmax(hidden @ weight.T, -1).gather(1, case[2][:, None])
        else:
            logprobs, _ = chunked_logprobs(hidden, weight, case[2], 1.0, chunk_size)
    logprobs.sum().backward()
    return sum(held.values())


def test_chunks_do_not_keep_logits(case):
    logits_bytes = TOKENS * VOCABULARY * 4
    assert _saved_bytes(case, None) >= logits_bytes
    assert _saved_bytes(case, 64) <= logits_bytes / 20


class _LogitRows(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the tokens whose logits are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten.mm.out and args[1].shape == (HIDDEN, VOCABULARY):
            self.rows += len(args[0])
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(("chunk_size", "num_recomputed"), [(TOKENS, 0), (2 * TOKENS, 0), (1000, 1000), (300, 900)])
def test_the_last_chunk_is_computed_once(case, chunk_size, num_recomputed):
    hidden, weight = (tensor.clone().requires_grad_() for tensor in case[:2])
    with _LogitRows() as counted:
        chunked_logprobs(hidden, weight, case[2], 0.9, chunk_size)[0].sum().backward()
    assert counted.rows == TOKENS + num_recomputed


def test_a_kept_chunk_has_the_gradient_of_a_recomputed_one(case):
    half = TOKENS // 2
    grads = []
    for tokens in (slice(0, TOKENS), slice(0, half), slice(half, TOKENS)):
        hidden = case[0][tokens].clone().requires_grad_()
        chunked_logprobs(hidden, case[1], case[2][tokens], 0.9, half)[0].sum().backward()
        grads.append(hidden.grad)
    assert torch.equal(grads[0], torch.cat(grads[1:]))


@pytest.mark.parametrize("chunk_size", [64, TOKENS])
def test_the_gradient_of_the_matrix_is_added_where_it_is_asked_for(case, chunk_size):
    hidden, weight = (tensor.clone().requires_grad_() for tensor in case[:2])
    chunked_logprobs(hidden, weight, case[2], 0.9, chunk_size)[0].sum().backward()
    sums = torch.ones_like(weight)
    again = case[1].clone().requires_grad_()
    chunked_logprobs(case[0], again, case[2], 0.9, chunk_size, weight_grad=sums)[0].sum().backward()
    assert again.grad is None
    assert (sums - 1 - weight.grad).abs().max() <= 1e-6 * weight.grad.abs().max()


def test_the_backward_pass_runs_once(case):
    hidden = case[0].clone().requires_grad_()
    logprobs, _ = chunked_logprobs(hidden, case[1], case[2], 0.9, 64)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="runs once"):
        logprobs.sum().backward()


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
        chunked_logprobs(hidden, weight, case[2], 1.0, chunk_size)[0].sum().backward()
    assert largest.elements <= max(chunk_size * VOCABULARY, TOKENS * HIDDEN)


@pytest.mark.parametrize("num_words", [VOCABULARY, VOCABULARY - 37])
def test_rows_without_a_word_never_enter(case, num_words):
    """Rows that fill up the matrix are noise: no sum has them, and they get no gradient."""
    hidden, targets = case[0], case[2] % num_words
    full, cut = (case[1][:rows].clone().requires_grad_() for rows in (VOCABULARY, num_words))
    full.data[num_words:] = 1e4
    answers = chunked_logprobs(hidden, full, targets, 0.9, 100, VocabularyShard(0, num_words))
    answers[0].sum().backward()
    expected = chunked_logprobs(hidden, cut, targets, 0.9, 100)
    expected[0].sum().backward()
    assert all(map(torch.equal, answers, expected))
    assert torch.equal(full.grad[:num_words], cut.grad)
    assert not full.grad[num_words:].any()


# Bounds of two ranks' words and rows of their matrices: evenly spread, filled up, and so that one rank has no word.
SPREAD = [((0, 150, 300), 150), ((0, 200, 300), 200), ((0, 300, 300), 300)]


def _shard_worker(rank: int, store: str, case: tuple[torch.Tensor, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = []
    for bounds, rows in SPREAD:
        hidden = case[0].clone().requires_grad_()
        mine = case[1][bounds[rank] : bounds[rank + 1]]
        weight = torch.full((rows, HIDDEN), 1e4)
        weight[: len(mine)] = mine
        weight.requires_grad_()
        shard = VocabularyShard(rank * rows, len(mine), dist.group.WORLD)
        logprobs, entropies = chunked_logprobs(hidden, weight, case[2], 0.9, 100, shard)
        (logprobs * torch.arange(TOKENS)).sum().backward()
        found.append((logprobs.detach(), entropies, hidden.grad, weight.grad[: len(mine)]))
    torch.save(found, f"{store}.{rank}")
    dist.destroy_process_group()


def test_two_ranks_give_together_what_one_matrix_gives(case, tmp_path):
    torch.multiprocessing.spawn(_shard_worker, (str(tmp_path / "store"), case), nprocs=2)
    hidden, weight = (tensor.clone().requires_grad_() for tensor in case[:2])
    logprobs = _reference(hidden, weight, case[2], 0.9)
    (logprobs * torch.arange(TOKENS)).sum().backward()
    _, entropies = chunked_logprobs(*case, 0.9, 100)
    for first, second in zip(*(torch.load(tmp_path / f"store.{rank}") for rank in range(2)), strict=True):
        assert torch.equal(first[0], second[0])
        assert (first[0] - logprobs).abs().max() <= 1e-6 * logprobs.abs().max()
        assert (first[1] - entropies).abs().max() <= 1e-5
        assert (first[2] + second[2] - hidden.grad).abs().max() <= 1e-5 * hidden.grad.abs().max()
        joined = torch.cat([first[3], second[3]])
        assert (joined - weight.grad).abs().max() <= 1e-5 * weight.grad.abs().max()


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_side_may_need_no_gradient(case, frozen):
    ours, theirs = ([tensor.clone() for tensor in case[:2]] for _ in range(2))
    ours[1 - frozen].requires_grad_()
    theirs[1 - frozen].requires_grad_()
    chunked_logprobs(*ours, case[2], 1.0, 64)[0].sum().backward()
    _reference(*theirs, case[2], 1.0).sum().backward()
    expected = theirs[1 - frozen].grad
    assert (ours[1 - frozen].grad - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert ours[frozen].grad is None


def test_no_token_is_no_logit(case):
    hidden, weight = case[0][:0].clone().requires_grad_(), case[1].clone().requires_grad_()
    logprobs, entropies = chunked_logprobs(hidden, weight, case[2][:0], 1.0, 64)
    logprobs.sum().backward()
    assert (len(logprobs), len(entropies)) == (0, 0)
    assert not weight.grad.any()


def test_targets_of_other_tokens_are_refused(case):
    with pytest.raises(AssertionError, match="512 targets"):
        chunked_logprobs(case[0], case[1], case[2][:512], 1.0, 256)


@pytest.mark.parametrize(("temperature", "chunk_size"), [(0.0, 8), (-1.0, 8), (1.0, 0)])
def test_impossible_settings_are_refused(case, temperature, chunk_size):
    with pytest.raises(AssertionError, match="is"):
        chunked_logprobs(*case, temperature, chunk_size)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_peak_of_forward_and_backward_is_a_chunk_of_logits(temperature):
    """Above hidden states, matrix and their gradients; benchmarks/loss_memory.py measures a process at full size."""
    from tests.support.measured_rank import _PeakOfNew

    tokens, hidden_size, vocabulary, chunk_size = 2048, 4, 4096, 64
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    with _PeakOfNew() as new:
        logprobs, _ = chunked_logprobs(hidden, weight, torch.arange(tokens), temperature, chunk_size)
        logprobs.sum().backward()
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    assert chunk_size * vocabulary * 4 <= new.peak - gradients <= 1.3 * chunk_size * vocabulary * 4
