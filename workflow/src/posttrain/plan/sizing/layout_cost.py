"""Estimated time of an update for a layout, precise enough to order layouts.

    update = (m + (PP - 1) / v) (compute and communication of the largest stage, v messages to the next) + exchange of
             gradients and weights

with m micro-batches per rank and v chunks per stage. A stage of n layers computes 8 a n T / (TP CP) for a micro-batch
of T tokens: a active parameters per layer, forward 2, backward 4, recomputation 2 (Korthikanti et al., arXiv
2205.05198, section 5). Bytes that a rank sends per layer and micro-batch, each in forward, recomputation and backward
(H hidden size, p bytes):

    TP   all-gather and reduce-scatter around attention and around the MLP (sequence parallelism)    4 t p H (TP-1)/TP
    CP   gathered keys and values, for MLA their latent                                              T p width (CP-1)/CP
    EP   token copies to the experts and back                                                        2 s K p H (EP-1)/EP
    ETP  token copies gathered by the ranks that share an expert, and their sum scattered            2 s K p H (ETP-1)

and p t H / TP to the next stage and back; per update (4 + p) B for each replicated parameter. Groups within a node use
its links: in Megatron's order of ranks TP and CP are neighbours, and so are ETP and EP. The bubble is
(PP - 1) / (m v + PP - 1) (Narayanan et al., arXiv 2104.04473, section 2.2).

Attention scores, imbalance of experts and overlap are ignored: the figure orders layouts and does not predict a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from posttrain.config.derived import data_parallel_size, layers_per_stage, micro_batch_multiple
from posttrain.config.schema import Architecture, Config, Hardware
from posttrain.plan.sizing.activations import MicroBatch
from posttrain.plan.sizing.memory import BYTES, StageMemory, shards
from posttrain.plan.sizing.model_size import count_active_parameters

# Forward, its recomputation, backward: each sends the same bytes.
PASSES = 3


# Assumed shares of a machine's peaks, in `config/hardware`, that training reaches.
COMPUTE_SHARE, NODE_LINK_SHARE, NETWORK_SHARE = 0.4, 2 / 3, 0.8


@dataclass(frozen=True)
class Rates:
    """Assumed rates per GPU; only their ratios matter here.

    Args:
        flops: Matrix products, operations per second.
        node_link: To GPUs of the same node, bytes per second.
        network: To other nodes, bytes per second.
        launch_seconds: Minimum time of a layer in one micro-batch, because it launches some hundred kernels.
        latency_seconds: Latency of one collective or message.
    """

    flops: float
    node_link: float
    network: float
    launch_seconds: float = 1.0e-3
    latency_seconds: float = 5.0e-5

    @classmethod
    def of(cls, hardware: Hardware) -> Rates:
        """Return the rates of a machine."""
        return cls(
            flops=COMPUTE_SHARE * hardware.bf16_tflops * 1e12,
            node_link=NODE_LINK_SHARE * hardware.gpu_link_gb_per_s * 1e9,
            network=NETWORK_SHARE * hardware.network_gb_per_s * 1e9 / hardware.gpus_per_node,
        )


@dataclass(frozen=True)
class Cost:
    """Time of an update and its parts.

    Args:
        seconds: Seconds of one update.
        num_micro_batches: Micro-batches per rank.
        idle_fraction: Share of the pipeline's time in which a rank waits, because of the bubble and shorter stages.
        communication_fraction: Share of the seconds for communication.
    """

    seconds: float
    num_micro_batches: int
    idle_fraction: float
    communication_fraction: float


def layout_cost(config: Config, stages: list[StageMemory], batch: MicroBatch, rates: Rates | None = None) -> Cost:
    """Return the cost of an update whose samples are as long as `batch`'s longest.

    Args:
        config: The configuration with the layout.
        stages: Persistent memory of its ranks.
        batch: The fullest micro-batch.
        rates: Assumed rates; by default those of the hardware.
    """
    parallel, counts, rates = config.parallel, layers_per_stage(config), rates or Rates.of(config.hardware)
    samples = config.training.global_batch_size // data_parallel_size(config)
    together = min(samples, max(1, batch.tokens // batch.longest))
    multiple, tokens = micro_batch_multiple(config), together * batch.longest
    micro_batches = -(-samples // (together * multiple)) * multiple
    active = _active_per_layer(config.model.architecture)
    cut = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    compute = max(8 * active * tokens / cut / rates.flops, rates.launch_seconds)
    turns = micro_batches + (len(counts) - 1) / parallel.virtual_pipeline_model_parallel_size
    sent = turns * max(counts) * _seconds_sent_per_layer(config, tokens, rates)
    sent += turns * _seconds_to_next_stage(config, tokens / cut, rates)
    sent += _seconds_of_exchange(config, stages, rates)
    seconds = turns * max(counts) * compute + sent
    busy = micro_batches * sum(counts) / len(counts)
    return Cost(
        seconds=seconds,
        num_micro_batches=micro_batches,
        idle_fraction=1 - busy / (turns * max(counts)),
        communication_fraction=sent / seconds,
    )


def _seconds_sent_per_layer(config: Config, tokens: int, rates: Rates) -> float:
    arch, parallel = config.model.architecture, config.parallel
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    expert, expert_tensor = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    p, per_rank = BYTES[config.trainer.params_dtype].weight, tokens / context
    in_node = config.hardware.gpus_per_node

    def seconds(sent_bytes: float, group: int, span: int) -> float:
        rate = rates.node_link if span <= in_node else rates.network
        return sent_bytes * (group - 1) / group / rate + (rates.latency_seconds if group > 1 else 0.0)

    row = p * arch.hidden_size
    latent = p * ((arch.kv_lora_rank + arch.qk_rope_head_dim) or arch.hidden_size)
    copies = 2 * per_rank / tensor * arch.num_experts_per_tok * row
    return PASSES * (
        seconds(4 * per_rank * row, tensor, tensor)
        + seconds(tokens * latent, context, tensor * context)
        + seconds(copies, expert, expert * expert_tensor)
        + seconds(copies * expert_tensor, expert_tensor, expert_tensor)
    )


def _seconds_to_next_stage(config: Config, tokens: float, rates: Rates) -> float:
    if config.parallel.pipeline_model_parallel_size == 1:
        return 0.0
    sent_bytes = tokens * BYTES[config.trainer.params_dtype].weight * config.model.architecture.hidden_size
    messages = 2 * config.parallel.virtual_pipeline_model_parallel_size
    return messages * (sent_bytes / rates.network + rates.latency_seconds)


def _seconds_of_exchange(config: Config, stages: list[StageMemory], rates: Rates) -> float:
    """Return the time to reduce gradients and gather weights on the fullest stage, for replicated weights."""
    dense_shards, expert_shards = shards(config)
    if dense_shards == 1:
        return 0.0
    per_element = BYTES[config.trainer.params_dtype].gradient + BYTES[config.trainer.params_dtype].weight
    shared = max(
        stage.dense_elements * (1 - 1 / dense_shards) + stage.expert_elements * (1 - 1 / expert_shards)
        for stage in stages
    )
    return per_element * shared / rates.network + 2 * rates.latency_seconds


@lru_cache(maxsize=64)
def _active_per_layer(arch: Architecture) -> float:
    return count_active_parameters(arch) / arch.num_hidden_layers
