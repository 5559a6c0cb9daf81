"""How long a training step takes, phase by phase, and the best split of nodes when trainer and engines are apart.

    rollout        beyond staleness 0, what `async_simulation` says that the trainer waits for its responses; else
                   `decoding.rollout_time` of one engine's share of the samples; where some engines only prefill, the
                   others share the samples and start when all prompts are prefilled
    old_logprobs   a forward pass over the samples of all updates but the first; none where the engine's are taken
    train          forward, backward, recomputation and collectives by cause (`update_time`), and the optimizer's state
                   read and written once per update
    weight_sync    what each rank of an engine keeps, through the host's memory; or all through rank 0 or shared files
    save           one checkpoint at the rate of shared storage; every `trainer.save_interval` steps, during the next
                   step's rollout, so that a step waits only for what is longer
    evaluation     held-out prompts and suites: on one node before and after the run; with `evaluation.interval` on the
                   engines of training, too
    idle           of the above: seconds in which an average GPU waits (`idle_time`)

Sources: constants in `rates`, `attainable` and `fitted`. Only for GPUs: none of them was measured elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.config.derived import (
    engine_gpus,
    is_off_policy,
    layers_per_stage,
    num_updates_per_step,
    prefill_gpus,
    recomputed_share,
    runs_ahead,
    trainer_nodes,
    uses_engines,
    weight_transport,
    world_size,
)
from posttrain.config.schema import Config, Parallel
from posttrain.plan.flags.indexer_kernel import FUSED, indexer_kernel
from posttrain.plan.flags.sparse_kernels import CUDNN, TILELANG, sparse_kernel
from posttrain.plan.sizing.activations import recomputation_chooses
from posttrain.plan.sizing.engine import engine_memory
from posttrain.plan.sizing.evaluation import evaluation_nodes, serving_config
from posttrain.plan.sizing.memory import BYTES, GIB
from posttrain.plan.sizing.model_size import count_parameters, model_weights
from posttrain.plan.sizing.storage import storage
from posttrain.plan.timing import attainable
from posttrain.plan.timing.async_steps import EngineFleet, busy_seconds, simulated_steps, steps_of
from posttrain.plan.timing.decoding import RolloutTime
from posttrain.plan.timing.fitted import FITTED
from posttrain.plan.timing.idle_time import AheadTimes, StepTimes, idle_gpu_seconds, idle_gpu_seconds_ahead, job_gpus
from posttrain.plan.timing.rates import (
    BASE64,
    HOST_OPTIMIZER_BYTES_PER_SECOND,
    JSON_BYTES_PER_SECOND,
    MEMORY_SHARE,
    QUANTISED_BYTES_PER_SECOND,
    SHARD_BYTES_PER_SECOND,
    SHARD_LINK_SHARE,
)
from posttrain.plan.timing.rollout_of_step import (
    Workload,
    engine_of,
    evaluation_seconds,
    rollout_of,
    rollout_of_step,
    workload,
)
from posttrain.plan.timing.update_time import Trainer, forward_causes, mfu, train_causes

NOT_MODELLED = (
    "step time: on a CPU; drafts that are accepted less often as the policy moves; moving caches from engines that "
    "prefill to engines that decode; several waves of requests where an engine's limit is reached or its KV cache is "
    "full; sleeping and waking, and rewards, which take published systems about half a minute a step (compare "
    "`benchmarks/published_fit.py`)",
    "weight_sync: digests; ways through the host's memory, which are taken where trainer and engines have other "
    "versions of NCCL, with which it takes twenty times as long in a simulation of GLM-5 (`benchmarks/weight_sync.py`)",
    "asynchronous steps: grading, requests that are spread unevenly over engines, a KV cache that is full",
    "step time: rows padded to their longest sequence, and waiting for the slowest rank; what kernels lose is two "
    "constants, fitted on published runs (`benchmarks/published_fit.py`)",
)

# Kernels of attention to chosen keys, by their names in `attainable`: cuDNN's has not been measured.
SPARSE_KERNELS = {TILELANG: "tilelang", CUDNN: "sparse"}

IN_EVERY_STEP = ("rollout", "old_logprobs", "train", "weight_sync")


@dataclass(frozen=True)
class Split:
    """Nodes of trainer and engines that work at the same time, each on its own nodes.

    Args:
        train_nodes: The trainer's.
        rollout_nodes: The engines'.
        train_seconds: Log-probabilities and training of a step.
        rollout_seconds: A step's rollout.
    """

    train_nodes: int
    rollout_nodes: int
    train_seconds: float
    rollout_seconds: float

    @property
    def step_seconds(self) -> float:
        """The slower of the two: each works on the other's last result."""
        return max(self.train_seconds, self.rollout_seconds)


def train_seconds(trainer: Trainer, work: Workload) -> float:
    """Return the time of forward and backward passes over a step's samples."""
    return sum(train_causes(trainer, work.num_samples, work.mean_tokens).values())


def logprob_seconds(trainer: Trainer, work: Workload) -> float:
    """Return the time of one forward pass over a step's samples."""
    return sum(forward_causes(trainer, work.num_samples, work.mean_tokens).values())


def update_causes(config: Config) -> dict[str, float]:
    """Return cause -> seconds of a step's training, the optimizer among them, the longest first."""
    work = workload(config)
    causes = train_causes(trainer_of(config), work.num_samples, work.mean_tokens)
    causes["optimizer"] = num_updates_per_step(config) * optimizer_seconds(config)
    return dict(sorted(causes.items(), key=lambda item: -item[1]))


def training_seconds(config: Config) -> float:
    """Return how long a step's log-probabilities and training take."""
    logprobs = _share_of_old_pass(config) * logprob_seconds(trainer_of(config), workload(config))
    return sum(update_causes(config).values()) + logprobs


def training_seconds_on(config: Config, nodes: int) -> float:
    """Return how long log-probabilities, forward and backward of a step take on so many nodes, without a pipeline."""
    trainer, work = _without_pipeline(config, nodes * config.hardware.gpus_per_node), workload(config)
    return train_seconds(trainer, work) + _share_of_old_pass(config) * logprob_seconds(trainer, work)


def update_mfu(config: Config) -> float:
    """Return which share of the GPUs' peak training reaches: operations of the model, none twice."""
    work = workload(config)
    return mfu(trainer_of(config), work.num_samples, work.mean_tokens, sum(update_causes(config).values()))


def _share_of_old_pass(config: Config) -> float:
    """Return the share of a step's samples whose old log-probabilities no other pass gives."""
    from_trainer = uses_engines(config) and config.algorithm.old_logprobs == "trainer"
    return 1 - 1 / num_updates_per_step(config) if from_trainer else 0.0


def rollout_seconds(config: Config, sync: float) -> float:
    """Return how long a step waits for its responses: a rollout, or what is left of it beyond staleness 0.

    Args:
        config: The resolved configuration.
        sync: Transfer of new weights.
    """
    if not is_off_policy(config):
        return rollout_of_step(config, workload(config)).seconds
    training = training_seconds(config)
    simulated = simulated_steps(EngineFleet.of(config), workload(config), steps_of(config, training, sync))
    return max(simulated.step_seconds - training - sync, 0.0)


def idle_of_step(config: Config, rollout_seconds: float, checkpoint_wait: float) -> dict[str, float]:
    """Return cause -> GPU-seconds of a step in which GPUs wait.

    Args:
        config: The resolved configuration.
        rollout_seconds: Seconds in which a step waits for its responses.
        checkpoint_wait: Seconds per step in which all wait for a checkpoint.
    """
    work, share = workload(config), _share_of_old_pass(config)
    train = update_causes(config)
    old = forward_causes(trainer_of(config), work.num_samples, work.mean_tokens)
    training = sum(train.values()) + share * sum(old.values())
    pipeline = train.get("pipeline idle", 0.0) + share * old.get("pipeline idle", 0.0)
    if runs_ahead(config):
        busy = busy_seconds(EngineFleet.of(config), work, config.rollout.max_staleness)
        # A step's transfer of weights is short beside the rest, and both sides take part in it.
        times = AheadTimes(rollout_seconds, max(rollout_seconds + training - busy, 0.0), pipeline, checkpoint_wait)
        return idle_gpu_seconds_ahead(config, times)
    rollout = rollout_of_step(config, work)
    if config.rollout.tail_fraction:
        rollout = _without_tail(rollout, rollout_seconds, config.rollout.tail_fraction)
    return idle_gpu_seconds(config, StepTimes(rollout, training, pipeline, checkpoint_wait))


def _without_tail(rollout: RolloutTime, seconds: float, tail_fraction: float) -> RolloutTime:
    """Return a rollout of `seconds` that generates the same tokens, with more responses started at a time."""
    busy = rollout.busy_share * rollout.seconds / (seconds * (1 + tail_fraction))
    return dataclasses.replace(rollout, seconds=seconds, busy_share=min(busy, 1.0))


def step_with_save_seconds(config: Config, shared_storage: float) -> float:
    """Return how long a step takes that ends with a checkpoint; 0 for a machine without GPUs."""
    seconds = step_durations(config, shared_storage)
    return sum(seconds[f"step_{phase}"] for phase in (*IN_EVERY_STEP, "save")) if seconds else 0.0


def step_durations(config: Config, shared_storage: float) -> dict[str, float]:
    """Return "step" and "step_{phase}" -> seconds, and those of the rules that train and evaluate.

    Args:
        config: The resolved configuration.
        shared_storage: Bytes per second of shared storage.

    Returns:
        Nothing for a machine without GPUs. `step_save` is one checkpoint; `step` holds its share of the wait for one,
        and only after the last step it is waited for in full. `step_idle` is part of the other phases, averaged
        over all GPUs of the job.
    """
    if config.hardware.device == "cpu":
        return {}
    work, trainer = workload(config), trainer_of(config)
    sync = sync_seconds(config, shared_storage) if uses_engines(config) else 0.0
    phases = {
        "rollout": rollout_seconds(config, sync),
        "old_logprobs": _share_of_old_pass(config) * logprob_seconds(trainer, work),
        "train": sum(update_causes(config).values()),
        "weight_sync": sync,
        "save": storage(config).training_checkpoint / shared_storage,
    }
    wait = max(phases["save"] - phases["rollout"], 0.0) / config.trainer.save_interval
    phases["idle"] = sum(idle_of_step(config, phases["rollout"], wait).values()) / job_gpus(config)
    step = sum(phases[name] for name in IN_EVERY_STEP) + wait
    seconds = {"step": step, **{f"step_{name}": value for name, value in phases.items()}}
    total = config.training.num_steps * step + phases["save"]
    if config.evaluation.interval:
        seconds["step_evaluation"] = evaluation_seconds(config)
        total += (config.training.num_steps - 1) // config.evaluation.interval * seconds["step_evaluation"]
    rules = {"train": total}
    if evaluation_nodes(config) and not config.evaluation.addresses:
        alone = evaluation_seconds(serving_config(config))
        rules |= dict.fromkeys(("evaluate before", "evaluate after"), alone)
    return _rounded(seconds | rules)


def trainer_of(config: Config) -> Trainer:
    """Return the trainer of a configuration; micro-batches hold as many tokens as the budget allows."""
    return _trainer(config, world_size(config), tuple(layers_per_stage(config)), config.parallel)


def _trainer(config: Config, num_gpus: int, stages: tuple[int, ...], parallel: Parallel) -> Trainer:
    work, updates, topk = workload(config), num_updates_per_step(config), config.model.architecture.index_topk
    trainer = Trainer(
        arch=config.model.architecture,
        hardware=config.hardware,
        num_gpus=num_gpus,
        stages=stages,
        num_chunks=parallel.virtual_pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        num_updates=updates,
        kernel=SPARSE_KERNELS.get(sparse_kernel(config).name) if work.mean_tokens > topk else None,
        is_indexer_fused=indexer_kernel(config).name == FUSED,
        chooses_again=recomputation_chooses(config.model.architecture, config.trainer),
        recompute=recomputed_share(config),
        recompute_modules=tuple(config.trainer.recompute_modules),
        fitted=FITTED,
    )
    budget = config.trainer.max_tokens_per_gpu * trainer.context
    multiple = trainer.num_stages if trainer.num_chunks > 1 else 1
    per_rank = config.training.global_batch_size * work.mean_tokens / trainer.data
    micro_batches = max(math.ceil(per_rank / (budget * multiple)), 1) * multiple
    return dataclasses.replace(trainer, num_micro_batches=micro_batches)


def optimizer_seconds(config: Config) -> float:
    """Return the time of one update: gradients and state are read, state and weights written."""
    cost, parameters = BYTES[config.trainer.params_dtype], count_parameters(model_weights(config.model.architecture))
    moved = parameters * (cost.gradient + 2 * cost.optimizer + cost.weight)
    if config.trainer.optimizer_cpu_offload:
        return moved / (trainer_nodes(config) * HOST_OPTIMIZER_BYTES_PER_SECOND)
    return moved / (world_size(config) * config.hardware.hbm_gb_per_s * 1e9 * MEMORY_SHARE)


def sync_seconds(config: Config, shared_storage: float) -> float:
    """Return the time in which all engines get new weights, as `engine.weight_transport` says.

    Args:
        config: The resolved configuration.
        shared_storage: Bytes per second.
    """
    served = engine_memory(config)
    kept = max(part.weights_gib_per_gpu for part in (served, served.prefill) if part) * GIB
    if weight_transport(config) == "sharded":
        # Where engines have nodes of their own, they may have more GPUs than there are ranks that send.
        gpus = engine_gpus(config)
        of_rank = kept * max(1.0, gpus / world_size(config))
        if config.hardware.device != "cpu":
            link = attainable.link(config.hardware, world_size(config) + gpus * config.engine.own_nodes)
            return of_rank / QUANTISED_BYTES_PER_SECOND + of_rank / (SHARD_LINK_SHARE * link)
        of_node = kept * max(min(config.hardware.gpus_per_node, gpus), gpus / trainer_nodes(config))
        return max(of_rank / SHARD_BYTES_PER_SECOND, of_node / (config.hardware.network_gb_per_s * 1e9))
    weights = model_weights(config.model.architecture)
    size = sum(weight.fp8_bytes if config.rollout.fp8 else weight.bf16_bytes for weight in weights)
    if weight_transport(config) == "disk":  # written by rank 0, then read by every engine
        return size * (1 + config.engine.num_engines) / shared_storage
    return size * BASE64 * engine_gpus(config) / JSON_BYTES_PER_SECOND


def best_split(config: Config, fits: Callable[[int], bool] | None = None) -> Split | None:
    """Return the split of the nodes with the shortest step, when trainer and engines have nodes of their own.

    Engines keep their size, and those that only prefill their number; the trainer is taken without a pipeline, because
    its layout for fewer nodes is a choice of its own. None where no split leaves both enough.

    Args:
        config: The resolved configuration.
        fits: Whether the trainer fits on so many nodes; by default, whether its state fits into their GPUs together.
    """
    fits = fits or (lambda nodes: state_fits(config, nodes))
    return min(
        (split for nodes in range(1, config.nodes) if fits(nodes) and (split := _split(config, nodes))),
        key=lambda split: split.step_seconds,
        default=None,
    )


def split_part(config: Config) -> dict[str, float] | None:
    """Return the best split as it stands in `plan.json`; nothing without GPUs, engines or a split."""
    split = best_split(config) if config.hardware.device == "cuda" and uses_engines(config) else None
    return None if split is None else _rounded({**dataclasses.asdict(split), "step_seconds": split.step_seconds})


def _split(config: Config, train_nodes: int) -> Split | None:
    work, per_node = workload(config), config.hardware.gpus_per_node
    decode_gpus = (config.nodes - train_nodes) * per_node - prefill_gpus(config)
    engines = decode_gpus // config.engine.gpus_per_engine
    if engines < 1:
        return None
    return Split(
        train_nodes,
        config.nodes - train_nodes,
        training_seconds_on(config, train_nodes),
        rollout_of(engine_of(config, engines), engines, work).seconds,
    )


def _without_pipeline(config: Config, num_gpus: int) -> Trainer:
    """Return the trainer on so many GPUs without stages: its sizes are the configuration's where they divide it."""
    sizes = config.parallel
    tensor = math.gcd(sizes.tensor_model_parallel_size, num_gpus)
    parallel = dataclasses.replace(
        sizes,
        tensor_model_parallel_size=tensor,
        context_parallel_size=math.gcd(sizes.context_parallel_size, num_gpus // tensor),
        expert_model_parallel_size=math.gcd(sizes.expert_model_parallel_size, num_gpus),
        virtual_pipeline_model_parallel_size=1,
    )
    return _trainer(config, num_gpus, (), parallel)


def state_fits(config: Config, nodes: int) -> bool:
    """Return whether weights, gradients and optimizer state fit into the memory of so many nodes' GPUs together."""
    cost, gpus = BYTES[config.trainer.params_dtype], nodes * config.hardware.gpus_per_node
    on_gpu = cost.weight + cost.gradient + (0 if config.trainer.optimizer_cpu_offload else cost.optimizer)
    parameters = count_parameters(model_weights(config.model.architecture))
    return parameters * on_gpu <= gpus * config.hardware.memory_gib_per_gpu * 1024**3


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}
