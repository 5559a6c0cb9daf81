"""Memory of a micro-batch on an NVIDIA GPU, under Transformer Engine's modules.

Letters as in `activations`; besides, on this rank: F width of an MLP, M of an expert; q, k, v, o widths of queries,
keys, values and the attention's output; a response tokens of the row, r = min(a, chunk of log-probabilities); V words;
U tokens that reach its experts, R rows that these compute. E experts in all.

    kept for the backward pass, per layer      its input, p s H; of a pipeline's stage its output, too; what is not
                                               recomputed keeps all that its backward pass finds
    of Transformer Engine, from the first use  32 MiB for cuBLAS, four more where experts are grouped; from the first
                                               backward pass one gradient that nobody reads, p B an element, of each
                                               different shape of a matrix that is cut (one expert's among them)

Then the peak is the largest of some moments; they do not meet. What attention takes stands in `attention_cuda`:

    loss, backward           4 V H + p V H of the matrix's gradient, (4 + p) r V of logits, 2 p a H of hidden states;
                             or 4 V H, (4 + p + p) r V: a chunk's gradient meets that of the one before; with p = 4
                             nothing is copied, and there are 4 V H and 4 r V
    loss, forward            (4 + p + 4 / 16) r V, p a H; with p = 4 one p less
    embedding, backward      p V H, p t H
    a layer, backward        what attention keeps; p s H of each norm, the residual, the gradient;
      its MLP                5 p t F at the activation function's gradient, p s H of its output
      or its experts         p (2 U H + R (2 H + 3 M)) at the end of the recomputed forward pass, 12 E s of the router,
                             3 p t F and p s H of shared experts
      or attention alone     while it is differentiated, or selects keys
    a layer, forward         p s H of the stage's input, of the layer's where it is not the first, and of what went to
                             the next stage; 2 p s H and 3 p t F of an MLP; or 2 p s H, p (U H + R (2 H + 3 M)), 12 E s,
                             and p s H of shared experts; where keys are chosen three rows of p s H;
      or attention           alone

Where chunks interleave, three rows of p s H more are on their way in a forward pass, and four, on the last stage three,
in training; each chunk has its own cosines and sines.
Without recomputation a layer's backward pass adds to what is kept no more than its gradients, first of the last layer.
Without DeepEP's dispatcher a rank permutes its own rows, and those that arrive: U is s K + R then, in a forward pass R,
and s K where no other rank has experts. Where the embedding is the output matrix as well, its gradient p V H of the
loss lies beside the layers' until the embedding has its own.

Source: counted operation by operation in the rehearsal (`posttrain_rehearsal`) of Transformer Engine and Megatron Core,
whose places are `pytorch/module/base.py` (`get_dummy_wgrad`), `pytorch/cpp_extensions/gemm.py` (workspaces),
`core/transformer/moe/`, `core/fusions/`. `tests/posttrain_rehearsal/test_plan_against_rehearsal.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from posttrain.config.derived import stage_chunks
from posttrain.config.families import shared_experts_width
from posttrain.config.schema import Architecture, Config, Parallel, Trainer
from posttrain.plan.flags.indexer_kernel import FUSED as FUSED_INDEXER
from posttrain.plan.flags.indexer_kernel import indexer_kernel
from posttrain.plan.flags.sparse_kernels import FUSED, sparse_kernel
from posttrain.plan.sizing.activations import (
    MicroBatch,
    cached_row,
    has_experts,
    most_in_flight,
    recomputation_chooses,
)
from posttrain.plan.sizing.assumptions import Assumptions
from posttrain.plan.sizing.attention_cuda import Attention, Layer
from posttrain.plan.sizing.memory import BYTES, layer_kinds

WORKSPACE_BYTES = 32 << 20
GROUPED_STREAMS = 4
FP32 = 4
# Exponentials exist beside their logits for one part in so many of a chunk (`rl.algorithm.logprobs`).
BLOCKS_PER_CHUNK = 16
# The router's scores, probabilities and maps, per expert and token.
ROUTER_BYTES = 12


@dataclass(frozen=True)
class Moment:
    """Bytes on one rank when a phase is at its fullest.

    Args:
        activations: Kept for the backward pass, and of the layer that is computed.
        dispatch: Rows of the experts and on their way to them and back.
        logprobs: Logits, and gradients of output matrix and hidden states.
    """

    activations: float
    dispatch: float = 0.0
    logprobs: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.activations + self.dispatch + self.logprobs


def kernel_bytes(config: Config, stage: int, has_trained: bool = True) -> int:
    """Return what Transformer Engine keeps on a rank of a stage; 0 where its modules are not used.

    Args:
        config: The resolved configuration.
        stage: Its number.
        has_trained: There was a backward pass.

    Example:
        GLM-5's 4 layers over TP4 EP8: 160 MiB of workspaces, and 0.263 GiB for the gradients of nine shapes.
    """
    if not config.hardware.compute_capability:
        return 0
    arch, parallel, kinds = config.model.architecture, config.parallel, _stage_kinds(config, stage)
    cuts = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    width = BYTES[config.trainer.params_dtype].weight
    gradients = width * _cut_elements(arch, kinds, cuts) if has_trained else 0
    return WORKSPACE_BYTES * (1 + GROUPED_STREAMS * _groups_experts(arch, kinds)) + gradients


def fullest_moment(
    config: Config, stage: int, batch: MicroBatch, assumptions: Assumptions, is_backward: bool
) -> Moment:
    """Return what a rank of a stage needs for micro-batches like `batch` where it needs most.

    Args:
        config: The resolved configuration.
        stage: Its number.
        batch: The largest micro-batch.
        assumptions: Imbalance of the experts.
        is_backward: With a backward pass; else log-probabilities alone.
    """
    moments, kinds = _moments(config, batch, assumptions), _stage_kinds(config, stage)
    is_first, is_last = stage == 0, stage == config.parallel.pipeline_model_parallel_size - 1
    chunks = stage_chunks(config)[stage]
    if not is_backward:
        # Behind other layers there is the one before's output; what went to the next stage is there until more does.
        rows = 1 + (sum(map(len, chunks)) > 1) + (3 if len(chunks) > 1 else not is_last)
        ends = [moments.loss_forward()] if is_last else []
        return max([*(moments.layer_forward(kind, rows) for kind in kinds), *ends], key=lambda moment: moment.total)
    if config.trainer.recompute_granularity != "full":
        kinds = _kinds_of(config.model.architecture, (chunks[-1][-1:],))  # the others have freed what they kept by then
    most = max(map(len, chunks))
    kept, found = moments.kept(stage, chunks), [moments.layer_backward(kind, most) for kind in kinds]
    if is_first:
        found.append(moments.embedding_backward())
    if is_last:
        found.append(moments.loss_backward())
    fullest = max(found, key=lambda moment: moment.total)
    return Moment(kept + fullest.activations, fullest.dispatch, fullest.logprobs)


def _stage_kinds(config: Config, stage: int) -> tuple[int, ...]:
    """Return which of the model's different layers a stage has."""
    return _kinds_of(config.model.architecture, stage_chunks(config)[stage])


@lru_cache(maxsize=1024)
def _kinds_of(arch: Architecture, chunks: tuple[range, ...]) -> tuple[int, ...]:
    _, kind_of = layer_kinds(arch)
    return tuple(sorted({kind for layers in chunks for kind in kind_of[layers.start : layers.stop]}))


@lru_cache(maxsize=1024)
def _groups_experts(arch: Architecture, kinds: tuple[int, ...]) -> bool:
    return any(has_experts(layer_kinds(arch)[0][kind]) for kind in kinds)


@lru_cache(maxsize=1024)
def _cut_elements(arch: Architecture, kinds: tuple[int, ...], cuts: tuple[int, int]) -> int:
    """Return the elements of one matrix of each different shape, on a rank, of those that are cut."""
    layers, is_latent = layer_kinds(arch)[0], bool(arch.kv_lora_rank)
    shapes = {shape for kind in kinds for shape in _shapes(layers[kind], cuts, is_latent)}
    return sum(height * width for height, width in shapes)


def _shapes(layer: Layer, cuts: tuple[int, int], is_latent: bool) -> Iterator[tuple[int, int]]:
    matrices = [weight for weight in layer if weight.split != "none" and len(weight.shape) == 2]
    for component, group in groupby(matrices, key=lambda weight: weight.component):
        members = [*group]
        *inner, (height, width) = (weight.shape for weight in members)
        cut = cuts[members[0].split == "expert"]
        yield height, width // cut
        heights = [height for height, _ in inner]
        if component == "delta_net":
            heights = [sum(height for height, _ in inner)]
        elif component != "attention":
            heights = [2 * heights[0]]  # gate and up are one matrix
        elif not is_latent:
            heights = [heights[0] + 2 * heights[1]]  # and so are queries, keys and values
        yield from ((height // cut, width) for height, (_, width) in zip(heights, inner, strict=False))


def _moments(config: Config, batch: MicroBatch, assumptions: Assumptions) -> _Moments:
    # The lengths of stages change nothing of a row.
    parallel = replace(config.parallel, num_layers_in_first_pipeline_stage=0, num_layers_in_last_pipeline_stage=0)
    return _cached_moments(
        config.model.architecture,
        config.trainer,
        parallel,
        batch,
        assumptions.expert_imbalance,
        config.rollout.max_response_tokens,
        sparse_kernel(config).name in FUSED,
        indexer_kernel(config).name == FUSED_INDEXER,
    )


class _Moments:
    """The terms of the module's table for one micro-batch on one rank."""

    def __init__(
        self,
        arch: Architecture,
        trainer: Trainer,
        parallel: Parallel,
        batch: MicroBatch,
        imbalance: float,
        longest_response: int,
        has_kernel: bool,
        is_indexer_fused: bool,
    ):
        self._arch, self._trainer, self._stages = arch, trainer, parallel.pipeline_model_parallel_size
        self._modules = {*trainer.recompute_modules}
        cuts = (
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.expert_tensor_parallel_size,
        )
        self._row = row = cached_row(arch, trainer, cuts, batch, imbalance)
        self._p, self._narrow = row.p, row.p if row.p < FP32 else 0
        self._chooses_again = recomputation_chooses(arch, trainer)
        self._attention = Attention(arch, row, batch.longest, has_kernel, is_indexer_fused)
        self._kinds, self._kind_of = layer_kinds(arch)
        asked = min(batch.tokens, batch.num_sequences * longest_response)
        self._asked = asked / parallel.context_parallel_size
        self._words = arch.vocab_size / row.tp
        self._logits = min(self._asked, trainer.log_probs_chunk_size) * self._words
        self._thin = self._p * row.s * row.hidden  # hidden states, of which each tensor-parallel rank has a part
        self._wide = self._p * row.t * row.hidden
        self._matrix = self._p * self._words * row.hidden
        self._tied = self._matrix * (arch.tie_word_embeddings and self._stages == 1)
        # Each chunk has its own.
        angles = 2 * FP32 * (arch.qk_rope_head_dim or arch.head_dim) * batch.longest
        self._angles = angles * parallel.virtual_pipeline_model_parallel_size
        self._expert_cut = parallel.expert_tensor_parallel_size
        self._expert_width = arch.moe_intermediate_size / self._expert_cut
        experts, sent = parallel.expert_model_parallel_size, row.s * arch.num_experts_per_tok
        share = min(1.0, imbalance / experts) if experts > 1 else 1.0
        self._rows = sent * experts * share * self._expert_cut
        reached = experts * row.s * (1 - (1 - share) ** arch.num_experts_per_tok)
        is_spread = trainer.deepep and experts * self._expert_cut > 1
        arriving = self._rows if experts * self._expert_cut > 1 else 0.0
        self._reached = reached if is_spread else sent + arriving
        self._reached_forward = self._reached if is_spread or not arriving else arriving
        self._known: dict[tuple[int, bool], tuple[float, float, float]] = {}

    def kept(self, stage: int, chunks: Sequence[range]) -> float:
        """Return what all micro-batches in flight leave behind."""
        # Chunks that take turns are sent what they need ahead, and both ways at once.
        on_their_way = (4 - (stage == self._stages - 1)) * self._thin * (len(chunks) > 1)
        in_flight = most_in_flight([self._kept(layers) for layers in chunks], self._stages, stage)
        return self._angles + on_their_way + in_flight

    def _kept(self, layers: range) -> float:
        trainer, inputs, whole = self._trainer, 0, layers
        if trainer.recompute_granularity == "full" and trainer.recompute_method == "uniform":
            inputs, whole = -(-len(layers) // trainer.recompute_num_layers), range(0)
        elif trainer.recompute_granularity == "full":
            inputs, whole = min(trainer.recompute_num_layers, len(layers)), layers[trainer.recompute_num_layers :]
        is_handed_on = layers.stop < self._arch.num_hidden_layers
        choices = self._row.kept_choice(layers, len(layers) - len(whole))
        return (inputs + is_handed_on) * self._thin + choices + sum(self._saved(self._kind_of[i]) for i in whole)

    def layer_backward(self, kind: int, num_layers: int) -> Moment:
        """Return what a layer adds where its backward pass needs most, with others that are recomputed with it.

        Args:
            kind: Of the layer.
            num_layers: In the chunk that it stands in, at most.
        """
        layer, (attention, activations, dispatch) = self._kinds[kind], self._parts(kind, True)
        # Both norms' outputs, what is added to the second one's, and the gradient that came.
        first = 4 * self._thin + self._tied
        if self._trainer.recompute_granularity != "full":
            first -= self._saved(kind)  # it is among what is kept
        elif self._trainer.recompute_method == "uniform":
            first += (min(self._trainer.recompute_num_layers, num_layers) - 1) * self._saved(kind)
        choosing = self._attention.choosing(layer, True) if self._chooses_again else 0.0
        alone = max(choosing, attention + self._attention.gradients(layer))
        if "mla_up_proj" in self._modules:
            alone += self._attention.copied(layer)
            attention -= self._attention.dropped(layer)  # until the MLP's gradient is known
        if alone > attention + activations + dispatch:
            return Moment(first + alone)
        return Moment(first + attention + activations, dispatch)

    def layer_forward(self, kind: int, rows: int) -> Moment:
        """Return what a layer takes without a backward pass behind it, beside so many rows of hidden states."""
        layer, (_, activations, dispatch) = self._kinds[kind], self._parts(kind, False)
        activations += (rows + 2) * self._thin - self._inside_shared(layer)
        choosing, attention = self._attention.choosing(layer, False), self._attention.forward(layer)
        alone = max(choosing and choosing + 3 * self._thin, attention and attention + rows * self._thin)
        if alone > activations + dispatch:
            activations, dispatch = alone, 0.0
        return Moment(self._angles + activations, dispatch)

    def loss_backward(self) -> Moment:
        """Return what log-probabilities take while they are differentiated; the last norm's input is there, too."""
        hidden = 2 * self._p * self._asked * self._row.hidden
        elements = self._words * self._row.hidden
        product = self._narrow * max(elements, self._logits)
        logits = (FP32 + self._narrow) * self._logits
        return Moment(self._thin, logprobs=hidden + FP32 * elements + product + logits)

    def loss_forward(self) -> Moment:
        """Return what log-probabilities take."""
        exponentials = FP32 / BLOCKS_PER_CHUNK
        logprobs = self._p * self._asked * self._row.hidden + (FP32 + self._narrow + exponentials) * self._logits
        return Moment(self._angles + 2 * self._thin, logprobs=logprobs)

    def embedding_backward(self) -> Moment:
        """Return what the embedding's gradient takes."""
        return Moment(self._matrix + self._tied + self._wide)

    def _parts(self, kind: int, is_backward: bool) -> tuple[float, float, float]:
        """Return the bytes of attention, of the MLP or router and shared experts, and of routed rows."""
        if (kind, is_backward) not in self._known:
            layer = self._kinds[kind]
            self._known[kind, is_backward] = self._attention.kept(layer), *self._mlp(layer, is_backward)
        return self._known[kind, is_backward]

    def _saved(self, kind: int) -> float:
        """Return the bytes that a layer saves: all that its backward pass finds, but for modules that recompute it."""
        attention, activations, dispatch = self._parts(kind, False)
        # Rows on their way to experts and back, and what comes out of these, are read by no backward pass.
        rows = self._p * self._rows * (self._row.hidden + 3 * self._expert_width) if dispatch else 0.0
        return attention + activations + rows + 4 * self._thin - sum(self.dropped(kind).values())

    def dropped(self, kind: int) -> dict[str, float]:
        """Return module -> bytes of a layer that its recomputation drops, of those that are recomputed."""
        layer, (_, activations, dispatch) = self._kinds[kind], self._parts(kind, False)
        rows = self._p * self._rows * (self._row.hidden + 3 * self._expert_width) if dispatch else 0.0
        of_module = {
            "layernorm": 2 * self._thin,
            "mla_up_proj": self._attention.dropped(layer),
            "moe_act": self._p * self._rows * self._expert_width if dispatch else 0.0,
            "mlp": 0.0 if dispatch else activations,
            "shared_experts": self._inside_shared(layer),
            "moe": activations + rows if dispatch else 0.0,
        }
        return {module: of_module[module] for module in sorted(self._modules)}

    def _inside_shared(self, layer: Layer) -> float:
        """Return what shared experts keep of their own, besides what comes out."""
        width = shared_experts_width(self._arch) * has_experts(layer)
        return 3 * self._p * self._row.t * width / self._row.tp

    def _mlp(self, layer: Layer, is_backward: bool) -> tuple[float, float]:
        """Return the bytes of an MLP, or of router and shared experts; and those of routed rows."""
        row, arch = self._row, self._arch
        if not has_experts(layer):
            width = self._p * row.t * arch.intermediate_size / row.tp
            return (5 * width + self._thin if is_backward else 3 * width), 0.0
        shared = self._inside_shared(layer) + self._thin * bool(shared_experts_width(arch))
        copies = (2 * self._reached if is_backward else self._reached_forward) * row.hidden
        rows = self._rows * (2 * row.hidden + 3 * self._expert_width)
        return shared + ROUTER_BYTES * arch.n_routed_experts * row.s, self._p * (copies + rows)


_cached_moments = lru_cache(maxsize=1024)(_Moments)
