"""Puts a `TrainingRun` together on every rank: joins the ranks, builds the policy, opens what a step needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from posttrain.config.derived import is_off_policy, proves_weights, runs_ahead, takes_turns, uses_engines, uses_queue
from posttrain.config.load import experiment_of
from posttrain.config.schema import Config
from posttrain.plan.sizing.storage import storage
from posttrain.report.sinks import MetricSinks
from posttrain.rl.algorithm.objective import Objective
from posttrain.rl.algorithm.policy_gradient import PolicyGradient
from posttrain.rl.algorithm.sft import SupervisedFineTuning
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.event_loop import EventLoop, LoopThread
from posttrain.rl.environments.kinds import environments_of
from posttrain.rl.evaluation.heldout import read_eval_tasks
from posttrain.rl.megatron_backend.initialize import joined_ranks
from posttrain.rl.megatron_backend.model import Policy, build_policy
from posttrain.rl.megatron_backend.plain_data import share_plain
from posttrain.rl.megatron_backend.served_values import ServedValues
from posttrain.rl.megatron_backend.sleep import SleepingTrainer
from posttrain.rl.megatron_backend.weights import HubWeights
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.rollout.coordinator import RolloutCoordinator
from posttrain.rl.rollout.generator import TrajectoryGenerator
from posttrain.rl.rollout.offline_responses import OfflineResponses
from posttrain.rl.rollout.queue_store import QueueStore
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.rl.rollout.source import QueueSource, RolloutMaker, RolloutSource, SharedSource, StoredSource
from posttrain.rl.training.checkpoint_writer import CheckpointWriter
from posttrain.rl.training.checkpoints import CheckpointFolder
from posttrain.rl.training.colocation import Colocation, SleepingEngines, wait_for_all
from posttrain.rl.training.mismatch import EngineComparison
from posttrain.rl.training.run import TrainingRun
from posttrain.rl.training.saved_state import CheckpointToLoad, SavedState
from posttrain.rl.training.step_evaluation import StepEvaluation
from posttrain.rl.weight_sync.engine_layout import EngineShards
from posttrain.rl.weight_sync.proof import WeightProof
from posttrain.rl.weight_sync.publish import WeightPublisher, narrowed_names, served_format
from posttrain.types import Prompt


@contextmanager
def open_run(
    config: Config,
    run_name: str,
    run_folder: Path,
    torch_dist: Path,
    model_folder: Path,
    read_prompts: Callable[[], list[Prompt]],
    engine_urls: Sequence[str],
    engine_secret: str,
    may_commit: Callable[[], None],
    finished: int | None = None,
    eval_folders: Mapping[str, Path] = {},
) -> Iterator[TrainingRun]:
    """Join the ranks, build the policy, and open everything the loop needs; a context manager that closes it all.

    Args:
        config: The resolved configuration.
        run_name: Name of the run in W&B.
        run_folder: Checkpoints, rollouts, metrics.
        torch_dist: Initial weights.
        model_folder: Checkpoint in Hub layout, with the tokenizer.
        read_prompts: Returns the training prompts.
        engine_urls: Engines, ready or still starting; empty if all rollouts are on disk or responses are offline.
        engine_secret: The secret that engines expect with each request.
        may_commit: See `CheckpointFolder`.
        finished: See `CheckpointToLoad`.
        eval_folders: Data of the evaluation tasks that run between steps, see `read_eval_tasks`.

    Raises:
        RuntimeError: This node sees a newer checkpoint.
    """
    checkpoints = CheckpointFolder(run_folder / "checkpoints", config.trainer.keep_checkpoints, may_commit)
    to_load = CheckpointToLoad(checkpoints, finished)
    with ExitStack() as stack:
        stack.enter_context(joined_ranks(config))
        runner = _open_loop(config, stack)
        store, is_first = QueueStore(run_folder / "rollouts"), dist.get_rank() == 0
        client = _open_client(config, engine_urls, engine_secret, runner, stack) if engine_urls and is_first else None
        policy, trainer, engines = _build(config, client, runner, has_engines=bool(engine_urls))
        maker = sinks = evaluation = None
        if is_first:
            maker, evaluation = _open_makers(
                config, model_folder, eval_folders, read_prompts, client, store, run_folder, runner, stack
            )
            sinks = stack.enter_context(_sinks_of(config, run_folder, run_name, to_load))
        values = _values_of(config, policy)
        shards = EngineShards(values, client, runner)
        yield TrainingRun(
            config=config,
            policy=policy,
            objective=objective_of(config),
            source=_source_of(config, runner, client, maker, store, has_engines=bool(engine_urls)),
            comparison=EngineComparison(config, policy, values) if uses_engines(config) else None,
            publisher=_publisher_of(config, shards, run_folder, model_folder, engine_secret if engine_urls else ""),
            state=_state_of(config, policy, trainer, torch_dist, to_load, checkpoints, store),
            sinks=sinks,
            traces=run_folder / "traces",
            evaluation=evaluation,
            turns=Colocation(trainer, engines, wait_for_all) if trainer and engines else None,
        )


def _open_loop(config: Config, stack: ExitStack) -> EventLoop:
    """Return the loop of everything that talks to engines and graders.

    It runs in a thread if engines generate, or graders work for a later step, while the trainer trains.
    """
    return stack.enter_context(LoopThread()) if is_off_policy(config) else stack.enter_context(asyncio.Runner())


def _values_of(config: Config, policy: Policy) -> ServedValues:
    weights = HubWeights(policy.chunks, config.model.architecture)
    return ServedValues(weights, served_format(config), narrowed_names(config))


def _source_of(
    config: Config,
    runner: EventLoop,
    client: EngineClient | None,
    maker: RolloutMaker | None,
    store: RolloutStore,
    has_engines: bool,
) -> RolloutSource:
    if uses_engines(config) and not has_engines:
        return StoredSource(store, config.rollout.rollout_batch_size)
    share, seconds = share_plain if dist.get_world_size() > 1 else None, config.engine.start_timeout_seconds
    if uses_queue(config):
        assert maker is None or isinstance(maker, TrajectoryGenerator)
        return QueueSource(runner, share, seconds, client, maker, runs_ahead(config))
    return SharedSource(runner, share, seconds, client, maker)


def _publisher_of(
    config: Config, engine_shards: EngineShards, run_folder: Path, model_folder: Path, engine_secret: str
) -> WeightPublisher | None:
    if not uses_engines(config):
        return None
    proof = WeightProof(engine_shards, engine_secret) if engine_secret and proves_weights(config) else None
    return WeightPublisher(config, engine_shards, run_folder / "served_weights", model_folder, proof)


def _sinks_of(config: Config, run_folder: Path, run_name: str, to_load: CheckpointToLoad) -> MetricSinks:
    return MetricSinks(run_folder, run_name, config.logging, to_load.finished or None, experiment_of(config))


def _build(
    config: Config, client: EngineClient | None, runner: EventLoop, has_engines: bool
) -> tuple[Policy, SleepingTrainer | None, SleepingEngines | None]:
    """Return the policy and its colocation, if any; offload colocated engines before building the policy."""
    if not has_engines or not takes_turns(config):
        return build_policy(config), None, None
    engines = SleepingEngines(client, runner, config.engine.start_timeout_seconds)
    engines.start()
    policy = build_policy(config)
    return policy, SleepingTrainer(policy), engines


def _state_of(
    config: Config,
    policy: Policy,
    trainer: SleepingTrainer | None,
    torch_dist: Path,
    to_load: CheckpointToLoad,
    checkpoints: CheckpointFolder,
    store: RolloutStore,
) -> SavedState:
    forget_before = _keep_rollouts if config.logging.keep_rollouts else store.forget_before
    writer = CheckpointWriter(policy, checkpoints, storage(config).training_checkpoint, forget_before, trainer)
    return SavedState(policy, torch_dist, to_load, checkpoints, writer)


def objective_of(config: Config) -> Objective:
    """Return the training objective of a configuration."""
    longest = config.rollout.max_response_tokens
    if config.training.objective == "sft":
        return SupervisedFineTuning(config.algorithm.loss_aggregation, longest)
    return PolicyGradient(config.algorithm, longest)


def _keep_rollouts(finished: int) -> None:
    """Delete no rollout: `logging.keep_rollouts`."""


def _open_makers(
    config: Config,
    model_folder: Path,
    eval_folders: Mapping[str, Path],
    read_prompts: Callable[[], list[Prompt]],
    client: EngineClient | None,
    store: QueueStore,
    run_folder: Path,
    runner: EventLoop,
    stack: ExitStack,
) -> tuple[RolloutMaker | None, StepEvaluation | None]:
    """Return the rollout source (offline responses or engines) and the evaluation between steps.

    If all rollouts are on disk already, it opens no tokenizer, graders or engines.
    """
    if client is None and uses_engines(config):
        return None, None
    tokenizer = ChatTokenizer(model_folder, config.data.chat_template_kwargs)
    if client is None:
        return OfflineResponses(config, read_prompts(), tokenizer), None
    graders = stack.enter_context(GraderPool.of(config))
    maker: RolloutMaker
    if uses_queue(config):
        environments = stack.enter_context(environments_of(config)) if config.data.environment else None
        generator = TrajectoryGenerator(config, read_prompts(), tokenizer, client, store, graders, environments)
        stack.callback(lambda: runner.run(generator.close()))
        maker = generator
    else:
        maker = RolloutCoordinator(config, read_prompts(), tokenizer, client, store, graders)
    if not config.evaluation.interval:
        return maker, None
    eval_tasks = read_eval_tasks(config, eval_folders)
    return maker, StepEvaluation(eval_tasks, tokenizer, client, graders, run_folder / "evaluations", runner)


def _open_client(
    config: Config, engine_urls: Sequence[str], secret: str, runner: EventLoop, stack: ExitStack
) -> EngineClient:
    engine, num_prefill = config.engine, config.engine.pd.num_prefill_engines
    ranks = [engine.gpus_per_engine] * engine.num_engines + [engine.pd.gpus_per_prefill_engine] * num_prefill
    vocab_size, seconds = config.model.architecture.vocab_size, engine.request_timeout_seconds
    client = EngineClient(engine_urls, secret, seconds, ranks, vocab_size, num_prefill)
    opened = AsyncExitStack()
    stack.callback(lambda: runner.run(opened.aclose()))
    return runner.run(opened.enter_async_context(client))
