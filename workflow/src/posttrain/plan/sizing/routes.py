"""Memory and storage of routed experts (`algorithm.routing_replay`), in engines and on shared storage.

SGLang stores four bytes per selected expert and cache token in host memory; every GPU also stores them, including
shared experts, for the tokens of a forward pass of all data-parallel ranks. A rollout stores one byte, or two with more
than 256 experts, for layers with experts:

    GLM-5   78 layers of 8 experts: 2,496 bytes of a token in an engine, 600 in a rollout

Source: SGLang 0.5.23, srt/state_capturer/routed_experts.py and base.py.
"""

from __future__ import annotations

from posttrain.config.derived import rollout_samples_per_step, uses_queue
from posttrain.config.schema import Config
from posttrain.plan.flags.sglang_flags import CHUNKED_PREFILL_TOKENS_PER_RANK
from posttrain.plan.sizing.activations import longest_sample
from posttrain.plan.sizing.assumptions import Assumptions

NUMBER_BYTES = 4


def engine_routes_bytes(config: Config, kv_tokens_per_gpu: int | None) -> tuple[int, int]:
    """Return the bytes of an engine's routing records per GPU: on the GPU, and on the host.

    Args:
        config: The resolved configuration, with SGLang on GPUs.
        kv_tokens_per_gpu: Capacity of its cache in tokens; None without a pool.
    """
    arch, engine = config.model.architecture, config.engine
    if not config.algorithm.routing_replay or not kv_tokens_per_gpu:
        return 0, 0
    chunk = config.hardware.kernels.chunked_prefill_tokens or CHUNKED_PREFILL_TOKENS_PER_RANK * engine.gpus_per_engine
    at_once = max(chunk, engine.max_running_requests)
    of_layer = NUMBER_BYTES * arch.num_hidden_layers
    chosen = arch.num_experts_per_tok
    return at_once * of_layer * (chosen + arch.n_shared_experts), kv_tokens_per_gpu * of_layer * chosen


def stored_routes_bytes(config: Config, assumptions: Assumptions) -> int:
    """Return the maximum bytes of routes in a run's folder.

    They are those of all steps since the last checkpoint but one, and of groups that engines finish for later steps.
    """
    if not config.algorithm.routing_replay:
        return 0
    arch, training = config.model.architecture, config.training
    layers = arch.num_hidden_layers - arch.first_k_dense_replace
    number = 1 if arch.n_routed_experts <= 256 else 2
    steps = training.num_steps
    if not config.logging.keep_rollouts:
        steps = min(steps, config.trainer.save_interval + 1)
    if uses_queue(config):
        steps += config.rollout.max_staleness + 1
    tokens = rollout_samples_per_step(config) * longest_sample(config, assumptions)
    return steps * tokens * layers * arch.num_experts_per_tok * number
