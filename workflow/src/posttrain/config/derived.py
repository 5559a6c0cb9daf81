"""Values that follow from others, and the rules that join several keys. Pure arithmetic, no torch, no files."""

from __future__ import annotations

from posttrain.config.schema import Config
from posttrain.errors import Problem


def world_size(config: Config) -> int:
    """Return the number of trainer ranks."""
    return config.nodes * config.hardware.gpus_per_node


def model_parallel_size(config: Config) -> int:
    """Return the ranks that hold one copy of the dense weights: TP x PP x CP."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def data_parallel_size(config: Config) -> int:
    """Return the number of ranks that see different samples."""
    return world_size(config) // model_parallel_size(config)


def rollout_samples_per_step(config: Config) -> int:
    """Return the samples that one rollout makes."""
    return config.rollout.rollout_batch_size * config.rollout.num_samples_per_prompt


def num_updates_per_step(config: Config) -> int:
    """Return the optimizer steps per rollout."""
    return rollout_samples_per_step(config) // config.training.global_batch_size


def layers_per_stage(config: Config) -> list[int]:
    """Return the number of decoder layers of each pipeline stage, first to last.

    Example:
        78 layers on 4 stages with 18 in the last give [20, 20, 20, 18].
    """
    stages = config.parallel.pipeline_model_parallel_size
    layers = config.model.architecture.num_hidden_layers
    last = config.parallel.num_layers_in_last_pipeline_stage
    if stages == 1 or last == 0:
        return [layers // stages] * stages
    return [(layers - last) // (stages - 1)] * (stages - 1) + [last]


def check_consistency(config: Config) -> list[Problem]:
    """Return every violated rule that joins several keys."""
    return [
        *_check_source(config),
        *_check_architecture(config),
        *_check_layout(config),
        *_check_batches(config),
        *_check_hardware(config),
    ]


def _check_source(config: Config) -> list[Problem]:
    source, problems = config.model.source, []
    if source.kind == "hub":
        if source.repo_id.count("/") != 1:
            problems.append(
                Problem("model.source.repo_id", repr(source.repo_id), "owner/name", "give the Hub repository")
            )
        problems += _check_revision("model.source.revision", source.revision)
    if source.kind == "folder" and not source.folder:
        problems.append(Problem("model.source.folder", "''", "a folder", "give the folder of the checkpoint"))
    if config.data.kind == "hub":
        problems += _check_revision("data.revision", config.data.revision)
    if config.data.kind == "jsonl":
        problems += [
            Problem(f"data.{name}", "''", "a jsonl file", "give the path of the prompts")
            for name in ("train_file", "heldout_file")
            if not getattr(config.data, name)
        ]
    if config.data.kind == "sort_digits" and config.data.num_train_prompts < 1:
        problems.append(
            Problem("data.num_train_prompts", str(config.data.num_train_prompts), "at least 1", "generate some")
        )
    return problems


def _check_revision(key: str, revision: str) -> list[Problem]:
    if len(revision) == 40 and all(letter in "0123456789abcdef" for letter in revision):
        return []
    remedy = "pin the commit that the repository's page shows, in quotes"
    return [Problem(key, repr(revision), "40 hex digits", remedy)]


def _check_architecture(config: Config) -> list[Problem]:
    arch, problems = config.model.architecture, []
    has_indexer = arch.index_n_heads > 0
    if has_indexer != (arch.model_type == "glm_moe_dsa"):
        allowed = "at least 1 for glm_moe_dsa, 0 for deepseek_v3"
        problems.append(
            Problem("model.architecture.index_n_heads", str(arch.index_n_heads), allowed, "match the model type")
        )
    if has_indexer and (arch.index_topk < 1 or arch.index_head_dim < arch.qk_rope_head_dim):
        allowed = f"index_topk of at least 1 and index_head_dim of at least {arch.qk_rope_head_dim} (qk_rope_head_dim)"
        value = f"topk {arch.index_topk}, head_dim {arch.index_head_dim}"
        problems.append(Problem("model.architecture.index_topk", value, allowed, "take both from config.json"))
    if arch.num_experts_per_tok > arch.n_routed_experts:
        problems.append(
            Problem(
                "model.architecture.num_experts_per_tok",
                str(arch.num_experts_per_tok),
                f"at most {arch.n_routed_experts} (n_routed_experts)",
                "take both from config.json",
            )
        )
    return problems


def _check_layout(config: Config) -> list[Problem]:
    arch, parallel, problems = config.model.architecture, config.parallel, []
    ranks, copy = world_size(config), model_parallel_size(config)
    if ranks % copy:
        problems.append(
            Problem(
                "parallel",
                f"TP x PP x CP = {copy}",
                f"a divisor of the {ranks} ranks",
                "choose sizes whose product divides nodes x GPUs per node",
            )
        )
    problems += _check_divides(
        "tensor_model_parallel_size",
        parallel.tensor_model_parallel_size,
        {
            "num_attention_heads": arch.num_attention_heads,
            "vocab_size": arch.vocab_size,
            "intermediate_size": arch.intermediate_size,
        },
    )
    problems += _check_divides(
        "expert_model_parallel_size", parallel.expert_model_parallel_size, {"n_routed_experts": arch.n_routed_experts}
    )
    expert_ranks = (
        parallel.expert_model_parallel_size
        * parallel.expert_tensor_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    if ranks % expert_ranks:
        problems.append(
            Problem(
                "parallel.expert_model_parallel_size",
                f"EP x ETP x PP = {expert_ranks}",
                f"a divisor of the {ranks} ranks",
                "lower EP, ETP or PP",
            )
        )
    tensor, expert = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if tensor > 1 and expert == 1 and parallel.expert_tensor_parallel_size != tensor:
        # With EP 1 Megatron takes experts for dense weights; with ETP below TP each tensor-parallel rank then trains
        # its copy on its own part of the sequence, and nobody adds the gradients up.
        problems.append(
            Problem(
                "parallel.expert_tensor_parallel_size",
                str(parallel.expert_tensor_parallel_size),
                f"{tensor} (tensor_model_parallel_size), or any with expert_model_parallel_size above 1",
                "raise expert_model_parallel_size, as the recipes do",
            )
        )
    if sum(layers_per_stage(config)) != arch.num_hidden_layers or min(layers_per_stage(config)) < 1:
        problems.append(
            Problem(
                "parallel.num_layers_in_last_pipeline_stage",
                str(parallel.num_layers_in_last_pipeline_stage),
                f"so that the other {parallel.pipeline_model_parallel_size - 1} stages share "
                f"{arch.num_hidden_layers} layers evenly",
                "change the last stage or the number of stages",
            )
        )
    return problems


def _check_divides(name: str, size: int, dimensions: dict[str, int]) -> list[Problem]:
    return [
        Problem(f"parallel.{name}", str(size), f"a divisor of {dimension} ({what})", "choose one that divides it")
        for what, dimension in dimensions.items()
        if dimension % size
    ]


def _check_batches(config: Config) -> list[Problem]:
    problems = []
    samples, batch = rollout_samples_per_step(config), config.training.global_batch_size
    if samples % batch:
        problems.append(
            Problem(
                "training.global_batch_size",
                str(batch),
                f"a divisor of the {samples} samples of a rollout",
                "change it, rollout_batch_size or num_samples_per_prompt",
            )
        )
    ranks = data_parallel_size(config)
    if ranks and batch % ranks:  # no rank at all: the layout is refused already
        problems.append(
            Problem(
                "training.global_batch_size",
                str(batch),
                f"a multiple of {ranks}, the data-parallel ranks, which run equally many micro-batches",
                "raise the batch, or use more tensor or pipeline parallelism",
            )
        )
    longest = config.rollout.max_response_tokens
    if config.trainer.max_tokens_per_gpu * config.parallel.context_parallel_size < longest:
        problems.append(
            Problem(
                "trainer.max_tokens_per_gpu",
                str(config.trainer.max_tokens_per_gpu),
                f"at least {longest} per context-parallel group (rollout.max_response_tokens)",
                "raise the budget or cut the responses",
            )
        )
    return problems


def _check_hardware(config: Config) -> list[Problem]:
    problems = []
    if config.trainer.deepep and not config.hardware.deepep:
        problems.append(
            Problem(
                "trainer.deepep",
                "true",
                f"false on {config.hardware.name}",
                "set trainer.deepep=false; tokens then go through Megatron's all-to-all",
            )
        )
    if config.hardware.device == "cpu" and config.trainer.optimizer_cpu_offload:
        problems.append(
            Problem("trainer.optimizer_cpu_offload", "true", "false on a CPU", "the state is in host memory already")
        )
    return problems
