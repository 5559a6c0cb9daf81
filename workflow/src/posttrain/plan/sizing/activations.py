"""Memory of a micro-batch: tensors saved for the backward pass, and transient ones.

Letters: t tokens of a row on this rank, s = t / TP (Megatron's sequence parallelism), p bytes of a weight, H hidden
size, n heads of this rank, d_qk and d_v head widths, r_q and r_kv ranks of MLA's latents, E experts, K experts per
token, F width of an MLP, S longest sequence, P = B S the row spread over blocks of B sequences in all.

A layer without recomputation keeps, by the autograd of `rl/megatron_backend/glm5` and of Megatron's local modules:

    a norm of width W           p W (its input), 4 (statistics)                                                per token
    attention                   norm of H, p H; norms of r_q and r_kv and their outputs                              s
                                q, k, v                                                                              t
                                q, k, v and the output in blocks, v as wide as k; log-sum-exp 4 n                     P
                                mask p S where keys are selected, of a chunk of queries its keys so far              P
                                p n d_v, the input of the output projection                                          t
    gated MLP                   norm of H, p H (s); gate and up 2 F, silu F, the other half F, product F             t
    router                      scores 4 E, chosen 8 K, probabilities 4 K and their sum 4; map E, 4 E, order 8 K     s
    experts, per routed row     p H, 4, gate and up 2 F, silu F, up F, before the probability F, product F          s K

Of recomputed modules MLPs, experts and MoE layers keep nothing but their input, and exist one layer's at a time; what
norms and up-projections free is left out here. With full recomputation a chunk of layers keeps its input alone, p H s,
and is computed again in the backward pass: one chunk's tensors then exist at a time. In a pipeline, stage i of PP holds
PP - i micro-batches (1F1B). Where stages of v chunks interleave, it holds 2 (PP - i - 1) + (v - 1) PP + 1 of a chunk:
on the first stage 1 + (PP - 1) / (PP v) times what it holds without.
NVIDIA's GPUs have a table of their own, `activations_cuda`.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198), sections
4 and 5, for the method; Narayanan et al. (arXiv 2104.04473), section 2.2, for 1F1B; the terms themselves are counted
from this repository's `rl/megatron_backend/glm5` and `rl/algorithm/logprobs.py`, and from megatron-core 0.19.2
(`core/transformer/mlp.py`, `moe/`, `multi_latent_attention.py`);
`tests/unit/plan/sizing/test_memory_reality.py` holds them against what a trainer keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from posttrain.config.derived import token_budget
from posttrain.config.families import chooses_keys, family_of
from posttrain.config.schema import Architecture, Config, Trainer
from posttrain.plan.sizing.assumptions import Assumptions
from posttrain.plan.sizing.delta_net import DeltaNet, is_delta_net
from posttrain.plan.sizing.memory import BYTES, largest_weights, layer_kinds
from posttrain.plan.sizing.model_size import Weight

INT64 = 8
FP32 = 4
# Sequences that are attended to together (`rl/megatron_backend/packed.py`).
SCORES_PER_BLOCK = 2**20


@dataclass(frozen=True)
class MicroBatch:
    """A packed row before context parallelism cuts it.

    Args:
        tokens: Tokens of the row, padding included.
        num_sequences: Sequences in it.
        longest: Tokens of the longest.
    """

    tokens: int
    num_sequences: int
    longest: int


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank.

    Args:
        saved: Kept from forward to backward, by all micro-batches in flight.
        working: One recomputed chunk with the attention scores of one chunk of queries.
        dispatch: Copies of tokens on their way to the experts and back.
        logprobs: Logits of one chunk and their copies; last stage only.
    """

    saved: float
    working: float
    dispatch: float
    logprobs: float


def longest_sample(config: Config, assumptions: Assumptions) -> int:
    """Return the tokens of the longest prompt with the longest response."""
    rollout = config.rollout
    prompt = rollout.max_prompt_tokens or int(rollout.max_response_tokens * assumptions.prompt_share)
    return rollout.max_response_tokens + prompt


def fullest_micro_batch(config: Config, assumptions: Assumptions) -> MicroBatch:
    """Return the row that the token budget allows, filled with the longest samples, or with one that is longer."""
    rollout, tokens, longest = config.rollout, token_budget(config), longest_sample(config, assumptions)
    if rollout.overlong_samples == "own_row":
        tokens = max(tokens, longest)
    longest = min(tokens, longest)
    return MicroBatch(tokens, -(-tokens // longest), longest)


def stage_activations(
    config: Config, stage: int, chunks: Sequence[range], batch: MicroBatch, assumptions: Assumptions
) -> Activations:
    """Return the activation memory of a stage's rank for micro-batches like `batch`.

    Args:
        config: The resolved configuration.
        stage: Its number.
        chunks: Its decoder layers.
        batch: The largest micro-batch.
        assumptions: Imbalance of the experts.
    """
    stages = config.parallel.pipeline_model_parallel_size
    row = _row(config, batch, assumptions.expert_imbalance)
    saved = [saved_bytes(config, layers, batch, assumptions.expert_imbalance) for layers in chunks]
    recomputed = config.trainer.recompute_num_layers if config.trainer.recompute_method == "uniform" else 1
    largest = max(sum(sorted(map(row.layer, layers))[-recomputed:]) for layers in chunks)
    if config.trainer.recompute_granularity != "full":
        largest = max(map(row.dropped, chain(*chunks)))
    gradient = row.p * max(largest_weights(config, stage))
    routes = any(row.is_moe(index) for index in chain(*chunks))
    return Activations(
        saved=most_in_flight(saved, stages, stage),
        working=largest + row.selection_chunk() + gradient,
        dispatch=row.dispatch() if routes else 0,
        logprobs=row.logprob_chunk() if stage == stages - 1 else 0,
    )


def most_in_flight(saved: Sequence[float], stages: int, stage: int) -> float:
    """Return the most that a stage keeps at a time: after some forward passes, each has a backward pass behind it.

    Interleaved, a stage takes as many micro-batches through a chunk as there are stages, then through the next one.

    Args:
        saved: What a micro-batch leaves behind in each chunk.
        stages: Pipeline stages.
        stage: Number of this one.

    Example:
        Chunks that keep 1 each: 4 on the first of 4 stages with one, 11 with two, each of half the layers.
    """
    chunks = len(saved)
    if chunks == 1:
        return (stages - stage) * saved[0]
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages
    entered = [saved[i // stages % chunks] for i in range(ahead + chunks * stages)]
    left = [saved[-1 - i // stages] for i in range(chunks * stages)]
    return max(sum(entered[: ahead + i + 1]) - sum(left[:i]) for i in range(chunks * stages))


def forward_bytes(config: Config, layers: Iterable[int], batch: MicroBatch, assumptions: Assumptions) -> float:
    """Return the activations of a pass without backward: at most one layer's tensors exist at a time."""
    row = _row(config, batch, assumptions.expert_imbalance)
    return max((row.layer(index) for index in layers), default=0) + row.selection_chunk()


def saved_bytes(config: Config, layers: range, batch: MicroBatch, expert_imbalance: float = 1.0) -> int:
    """Return the bytes that the backward pass of one micro-batch finds on a rank, of a chunk of layers.

    Args:
        config: The resolved configuration.
        layers: The chunk, with what stands before the first layer of all, and behind the last.
        batch: The micro-batch.
        expert_imbalance: Rows that reach this rank's experts over the mean.
    """
    row, trainer = _row(config, batch, expert_imbalance), config.trainer
    inputs, whole = 0, list(layers)
    if trainer.recompute_granularity == "full" and trainer.recompute_method == "uniform":
        inputs, whole = -(-len(layers) // trainer.recompute_num_layers), []
    elif trainer.recompute_granularity == "full":
        inputs, whole = min(trainer.recompute_num_layers, len(layers)), list(layers)[trainer.recompute_num_layers :]
    places = INT64 * row.t if whole else 0
    saved = inputs * row.s * row.p * row.hidden + sum(row.layer(index) - row.dropped(index) for index in whole) + places
    saved += row.kept_choice(layers, len(layers) - len(whole))
    saved += row.first_edge() if layers.start == 0 else 0
    return int(saved + (row.last_edge() if layers.stop == config.model.architecture.num_hidden_layers else 0))


def _row(config: Config, batch: MicroBatch, expert_imbalance: float) -> Row:
    sizes = config.parallel
    cuts = (sizes.tensor_model_parallel_size, sizes.context_parallel_size, sizes.expert_tensor_parallel_size)
    return cached_row(config.model.architecture, config.trainer, cuts, batch, expert_imbalance)


@lru_cache(maxsize=256)
def cached_row(
    arch: Architecture, trainer: Trainer, cuts: tuple[int, int, int], batch: MicroBatch, expert_imbalance: float
) -> Row:
    """Return the terms of a micro-batch on one rank, cut by TP, CP and ETP.

    Many layouts share their rows: neither PP nor EP changes what a layer of one rank keeps.
    """
    return Row(arch, trainer, cuts, batch, expert_imbalance)


class Row:
    """The terms of the module's table for one micro-batch on one rank."""

    def __init__(
        self,
        arch: Architecture,
        trainer: Trainer,
        cuts: tuple[int, int, int],
        batch: MicroBatch,
        expert_imbalance: float,
    ):
        self._trainer, self._batch, self._imbalance = trainer, batch, expert_imbalance
        self.arch = arch
        self.hidden = arch.hidden_size
        self.p = BYTES[trainer.params_dtype].weight
        self.tp, context, self.expert_tensor = cuts
        self.keys = batch.tokens
        self.t = batch.tokens // context
        self.s = self.t / self.tp
        self.padded_keys = batch.num_sequences * batch.longest
        self.padded = self.padded_keys / context
        self._kinds, self._kind_of = layer_kinds(self.arch)
        self._known: dict[int, float] = {}
        self.mask_bytes = self.p * self._masked_scores()

    def is_moe(self, index: int) -> bool:
        """Return whether a layer has experts."""
        return has_experts(self._kinds[self._kind_of[index]])

    def layer(self, index: int) -> float:
        """Return the bytes that a layer saves without recomputation."""
        kind = self._kind_of[index]
        if kind not in self._known:
            weights = self._kinds[kind]
            feed_forward = self._experts(weights) if has_experts(weights) else self._mlp(weights, "dense_mlp")
            norm_and_input = self.s * (self._norm(self.hidden) + self.p * self.hidden)
            self._known[kind] = self._attention(weights) + norm_and_input + feed_forward
        return self._known[kind]

    def dropped(self, index: int) -> float:
        """Return the bytes of a layer that the recomputation of its modules frees."""
        weights, modules = self._kinds[self._kind_of[index]], self._trainer.recompute_modules
        if has_experts(weights):
            shared = self._mlp(weights, "shared_experts") if "shared_experts" in modules else 0.0
            return self._experts(weights) if "moe" in modules else shared
        return self._mlp(weights, "dense_mlp") if "mlp" in modules else 0.0

    def first_edge(self) -> float:
        """Return what the embedding keeps: token ids, and which of them another rank holds."""
        return self.t * (INT64 + (self.tp > 1))

    def last_edge(self) -> float:
        """Return what final norm and log-probabilities keep: the norm, its output of all tokens, the targets."""
        return self.s * self._norm(self.hidden) + self.t * (self.p * self.hidden + INT64)

    def selection_chunk(self) -> float:
        """Return the memory to select keys for a chunk of queries, per query and key.

        The indexer's products before and after scaling, FP32 (`index_scores`); then scores, masked scores and their
        running count of ties, 16 bytes, and masks of one (`select_topk`).
        """
        per_score = 2 * FP32 * self.arch.index_n_heads + 2 * FP32 + INT64 + 4
        return per_score * self.scored_pairs()

    def scored_pairs(self) -> float:
        """Return the pairs of query and key that a rank scores at a time: of a chunk of each sequence of a block."""
        longest, step = self._batch.longest, self._trainer.attention_chunk_tokens
        of_block = min(self._batch.num_sequences, max(1, SCORES_PER_BLOCK // longest**2))
        return self.is_selected() * min(self.padded, of_block * step) * longest / self.tp

    def choice(self) -> float:
        """Return what a layer's choice of keys takes: places, of the queries that a tensor-parallel rank scores."""
        place = 2 if self._batch.longest <= 2**15 else 4
        return self.is_selected() * place * self.s * self.arch.index_topk

    def kept_choice(self, layers: range, num_recomputed: int) -> float:
        """Return what choices of keys take that later layers take over, or that recomputation reads.

        Args:
            layers: Of a chunk.
            num_recomputed: How many of them, the first, are computed again in full.
        """
        if self.arch.index_topk_freq == 1:
            layers = layers[: num_recomputed if self._trainer.keep_index_choice == "all" else 0]
        return self.choice() * sum(chooses_keys(self.arch, index) for index in layers)

    def logprob_chunk(self) -> float:
        """Return the logits of a chunk in FP32, which become their gradient, and the matrix's gradient in FP32.

        Counted from `rl.algorithm.logprobs`. Weights of p < 4 bytes have the products in p bytes, too, before they are
        added up; the forward pass's exponentials exist for a sixteenth of a chunk.
        """
        rows, words = min(self.t, self._trainer.log_probs_chunk_size), self.arch.vocab_size // self.tp
        narrow = self.p if self.p < FP32 else 0
        return (rows + self.hidden) * words * (FP32 + narrow) + rows * words * FP32 / 16

    def dispatch(self) -> float:
        """Return token copies in flight: sent and returned by this rank, received and answered by its experts."""
        sent = self.s * self.arch.num_experts_per_tok
        return self.p * self.hidden * 2 * (sent + self._expert_rows())

    def _norm(self, width: int) -> float:
        return self.p * width + FP32

    def heads(self) -> int:
        """Return the heads of queries."""
        return self.arch.num_attention_heads // self.tp

    def _attention(self, weights: tuple[Weight, ...]) -> float:
        if is_delta_net(weights):
            return self.s * (self._norm(self.hidden) + self.p * self.hidden) + DeltaNet(self.arch, self).kept_in_torch()
        projections = (
            self._latents() if self.arch.kv_lora_rank else self.s * (self._norm(self.hidden) + self.p * self.hidden)
        )
        query, key_value, value = self.widths(weights)
        row = self.t * (query + value) + self.keys * key_value
        block = self.padded * (query + max(query, value)) + self.padded_keys * max(key_value, 2 * (key_value - value))
        statistics = FP32 * self.heads() * self.padded
        # The gate, the output before it, and the gate's sigmoid.
        row += self.gated() * 3 * self.t * value
        return projections + self.p * (row + block) + statistics + self.mask_bytes

    def _latents(self) -> float:
        arch, p = self.arch, self.p
        latents = sum(self._norm(rank) + p * rank for rank in (arch.q_lora_rank, arch.kv_lora_rank) if rank)
        # The latent of keys was split from a row with the rotary key.
        return self.s * (self._norm(self.hidden) + p * self.hidden + latents + p * arch.qk_rope_head_dim)

    def widths(self, weights: tuple[Weight, ...]) -> tuple[float, float, float]:
        """Return the width of the queries, of keys and values, and of the attention's output on this rank."""
        if self.arch.kv_lora_rank:
            per_query = self.arch.qk_nope_head_dim + self.arch.qk_rope_head_dim
            value = self.heads() * self.arch.v_head_dim
            return self.heads() * per_query, self.heads() * per_query + value, value
        matrices = [weight for weight in weights if weight.component == "attention" and len(weight.shape) == 2]
        width = matrices[-1].shape[1] / self.tp
        total = sum(weight.num_elements for weight in matrices) / self.hidden / self.tp
        return width, total - self.gated() * width - 2 * width, width

    def gated(self) -> bool:
        """Return whether the attention's output has a gate, which is as wide."""
        return family_of(self.arch).gated_attention

    def is_selected(self) -> bool:
        """Return whether the indexer has a choice: below top-k nothing is scored."""
        return self.arch.index_n_heads > 0 and self.arch.index_topk < self._batch.longest

    def _masked_scores(self) -> float:
        """Return the pairs of a query and a key that masks hold; the first queries, which see top-k keys, have none."""
        if not self.is_selected():
            return 0.0
        longest, step = self._batch.longest, min(self._trainer.attention_chunk_tokens, self._batch.longest)
        first = self.arch.index_topk if self.arch.index_topk >= step else 0
        ends = [(start, min(start + step, longest)) for start in range(first, longest, step)]
        pairs = sum((end - start) * end for start, end in ends)
        return self._batch.num_sequences * pairs * self.padded / self.padded_keys

    def _mlp(self, weights: tuple[Weight, ...], component: str) -> float:
        down = [weight for weight in weights if weight.component == component]
        return self.t * self.p * 5 * down[-1].shape[1] / self.tp if down else 0.0

    def _experts(self, weights: tuple[Weight, ...]) -> float:
        arch = self.arch
        router = FP32 * arch.n_routed_experts + (INT64 + FP32) * arch.num_experts_per_tok + FP32
        placing = (1 + FP32) * arch.n_routed_experts + INT64 * arch.num_experts_per_tok
        width = arch.moe_intermediate_size / self.expert_tensor
        rows = self._expert_rows() * (self.p * (self.hidden + 6 * width) + FP32)
        return self._mlp(weights, "shared_experts") + self.s * (router + placing) + rows

    def _expert_rows(self) -> float:
        """Return the rows that this rank's experts compute; ranks that share an expert gather each other's."""
        gathered = self.expert_tensor
        return self.s * self.arch.num_experts_per_tok * gathered * self._imbalance


def recomputation_chooses(arch: Architecture, trainer: Trainer) -> bool:
    """Return whether the keys of layers that are computed again in full are chosen again."""
    return trainer.keep_index_choice == "none" and arch.index_topk_freq == 1


def has_experts(weights: Iterable[Weight]) -> bool:
    """Return whether the weights of a layer have experts among them."""
    return any(weight.split == "expert" for weight in weights)
