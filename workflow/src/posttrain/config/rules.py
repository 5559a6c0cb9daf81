"""The rules that join several keys of the configuration. Pure arithmetic, no torch, no files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain

from posttrain.config.data import GENERATED, KINDS, LOCAL_DATA, UNPINNED, Data, num_different, sources_of
from posttrain.config.derived import recomputable_modules, stage_chunks, uses_engines
from posttrain.config.engine_rules import ENGINE_RULES
from posttrain.config.environment_rules import ENVIRONMENT_RULES
from posttrain.config.families import check_architecture
from posttrain.config.fields import did_you_mean
from posttrain.config.formats import FP8_BLOCK
from posttrain.config.launch_rules import LAUNCH_RULES
from posttrain.config.layout_rules import LAYOUT_RULES
from posttrain.config.optimizer_rules import OPTIMIZER_RULES
from posttrain.config.presets import check_bounds
from posttrain.config.queue_rules import QUEUE_RULES
from posttrain.config.request import RUN_NAME
from posttrain.config.reward import BUILT_IN
from posttrain.config.reward_sum import parse_reward
from posttrain.config.schema import Config
from posttrain.config.service_rules import SERVICE_RULES
from posttrain.config.site_rules import SITE_RULES, check_launcher
from posttrain.config.suites import HELD_OUT, eval_tasks_of
from posttrain.config.supervised_rules import SUPERVISED_RULES
from posttrain.errors import ConfigError, Problem

Problems = Iterator[Problem]
# A node's name becomes a folder's, and so do a model's, a hardware's and a site's.
NODE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
REPOSITORY = r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+"
FORMATS = ("bf16", "fp8", "nvfp4")
# Neighbours in a row that share a scale. Not nvfp4: it is the default, and most never ask for it.
SERVING_GROUPS = {"mxfp8": 32, "int4": 128}
OTHER_RULES = (*ENGINE_RULES, *QUEUE_RULES, *SITE_RULES, *LAUNCH_RULES, *SERVICE_RULES, *ENVIRONMENT_RULES)


def check_consistency(config: Config) -> list[Problem]:
    """Return every violated rule."""
    return [problem for rule in (*RULES, check_bounds, *OTHER_RULES) for problem in rule(config)]


def check_convertible(config: Config) -> Problems:
    """Yield what can be planned but not fetched by this version: ask before any work starts."""
    source = config.model.source
    if source.kind == "hub" and source.revision == UNPINNED:
        remedy = "set='model.source.revision=...' with the commit that the repository's page shows"
        allowed = "40 hex digits to fetch it; it can be planned as it is"
        yield Problem("revision-not-pinned", "model.source.revision", UNPINNED, allowed, remedy)


def check_trainable(config: Config) -> Problems:
    """Yield what can be planned but not trained by this version, with what it cannot even convert.

    Experts are grouped as Megatron does it, and a launcher starts processes where it can.
    """
    yield from check_convertible(config)
    yield from _groups_of_experts(config)
    yield from check_launcher(config)


def _groups_of_experts(config: Config) -> Problems:
    # Groups are ranked by their best two experts; Megatron takes as many as a token chooses of each.
    arch = config.model.architecture
    if arch.n_group > 1 and arch.num_experts_per_tok // arch.topk_group != 2:
        allowed = f"half of {arch.num_experts_per_tok} (num_experts_per_tok) to train with this version"
        remedy = "plan it, or take another model"
        yield Problem(
            "expert-groups-untrainable", "model.architecture.topk_group", str(arch.topk_group), allowed, remedy
        )


def _model_source(config: Config) -> Problems:
    source = config.model.source
    if source.kind == "hub":
        yield from _repository("model.source.repo_id", source.repo_id)
        if source.revision != UNPINNED:
            yield from _pinned("model.source.revision", source.revision)
    if source.kind == "run" and not re.fullmatch(RUN_NAME, source.run):
        remedy = "`snakemake status --cores 1` shows all runs"
        yield Problem("not-set", "model.source.run", repr(source.run), "a run's name", remedy)
    if source.kind == "run" and source.revision and not re.fullmatch("[0-9a-f]{64}", source.revision):
        allowed = "'', or the 64 hex digits of the export's receipt"
        remedy = "leave it out: it is found by itself"
        yield Problem("not-a-digest", "model.source.revision", repr(source.revision), allowed, remedy)
    if source.kind == "folder" and not source.folder:
        yield Problem("not-set", "model.source.folder", "''", "a folder", "give the folder of the checkpoint")


def _data_sources(config: Config) -> Problems:
    for name, data in sources_of(config.data).items():
        section = f"data.sources.{name}" if name else "data"
        yield from _reward(config, data, f"{section}.reward")
        yield from _data_source(data, section)
        if name and not re.fullmatch(NODE_NAME, name):
            allowed = "letters, digits, '.', '_' and '-'; it starts with a letter or digit"
            yield Problem("not-a-name", "data.sources", repr(name), allowed, "give the source another name")


def _data_source(data: Data, section: str) -> Problems:
    if data.kind not in KINDS:
        yield Problem("unknown-choice", f"{section}.kind", repr(data.kind), f"one of {', '.join(KINDS)}", "choose one")
    if data.kind == "hub":
        yield from _repository(f"{section}.repo_id", data.repo_id)
        yield from _pinned(f"{section}.revision", data.revision)
    if data.kind in LOCAL_DATA or (data.kind == "hub" and not data.split):
        allowed = f"a file of prompts, or {section}.split" if data.kind == "hub" else "a file of prompts"
        if not data.train_file:
            yield Problem("not-set", f"{section}.train_file", "''", allowed, "give the path of the prompts")
    if data.kind != "hub":
        for name in ("subset", "split", "heldout_split"):
            if value := getattr(data, name):
                remedy = f"set {section}.kind=hub"
                yield Problem("unused-value", f"{section}.{name}", repr(value), f"'' with this {section}.kind", remedy)
    key, count = "data.num_train_prompts", data.num_train_prompts
    if data.kind in GENERATED and count < 1:
        yield Problem("not-a-count", key, str(count), "at least 1", "generate some")
    most, wanted = num_different(data), count + data.num_heldout_prompts
    if data.kind in GENERATED and wanted > most:
        allowed = f"at most {most} with the held-out ones: data.kind={data.kind} has no more prompts"
        remedy = "ask for fewer" + (", or raise data.num_digits" if data.kind == "sort_digits" else "")
        yield Problem("too-few-numbers", key, f"{count} of {wanted} in all", allowed, remedy)


def _suites(config: Config) -> Problems:
    for name, suite in config.evaluation.suites.items():
        section = f"evaluation.suites.{name}"
        if name == HELD_OUT or not re.fullmatch(NODE_NAME, name):
            allowed = f"letters, digits, '.', '_' and '-'; it starts with a letter or digit, and is not {HELD_OUT}"
            yield Problem("not-a-name", "evaluation.suites", repr(name), allowed, "give the suite another name")
        if suite.reward or "reasoning_gym" in config.data.reward:
            yield from _reward(config, eval_tasks_of(config)[name].data, f"{section}.reward")
        if suite.kind == "hub":
            yield from _repository(f"{section}.repo_id", suite.repo_id)
            if suite.revision != UNPINNED:
                yield from _pinned(f"{section}.revision", suite.revision)
        if not suite.file and (suite.kind == "files" or not suite.split):
            allowed = f"a file of prompts, or {section}.split" if suite.kind == "hub" else "a file of prompts"
            yield Problem("not-set", f"{section}.file", "''", allowed, "say where the prompts are")
        if config.evaluation.interval and not suite.num_prompts:
            allowed = "how many prompts are asked, with evaluation.interval: the plan forecasts what they cost"
            yield Problem("not-set", f"{section}.num_prompts", "0", allowed, "give their number")
        longest = config.rollout.max_response_tokens
        if suite.max_response_tokens > longest:
            allowed = f"at most {longest} (rollout.max_response_tokens), for which engines are laid out"
            key, remedy = f"{section}.max_response_tokens", "cut the suite's responses, or raise both"
            yield Problem("suite-responses-too-long", key, str(suite.max_response_tokens), allowed, remedy)
    if config.evaluation.interval and not uses_engines(config):
        remedy = "leave it out; before and after training engines are started for it"
        allowed = "0 where training has no engines"
        yield Problem(
            "evaluation-without-engines", "evaluation.interval", str(config.evaluation.interval), allowed, remedy
        )


def _reward(config: Config, data: Data, key: str) -> Problems:
    """Whether a function of the user's is there is found out once, when the command is given (`config.load`)."""
    try:
        terms = parse_reward(data.reward, key)
    except ConfigError as error:
        yield from error.problems
        return
    known = (*BUILT_IN, *config.reward.services, *config.reward.judges)
    for term in terms:
        if not term.is_own and term.grader not in known:
            allowed = f"{', '.join(known)}, path.py:function, or a name in reward.services or reward.judges"
            yield Problem(
                "unknown-reward", key, repr(term.grader), allowed, did_you_mean(term.grader, known) or "choose one"
            )
        if term.grader == "reasoning_gym" != data.kind:
            allowed = f"another grader with kind={data.kind}: this one calls the task that generated the row"
            remedy = "choose one of docs/rewards.md, or set kind=reasoning_gym"
            yield Problem("reward-of-another-kind", key, repr(data.reward), allowed, remedy)


def _repository(key: str, repo_id: str) -> Problems:
    if not re.fullmatch(REPOSITORY, repo_id):
        yield Problem("not-a-repository", key, repr(repo_id), "owner/name", "give the Hub repository")


def _pinned(key: str, revision: str) -> Problems:
    if len(revision) != 40 or not set(revision) <= set("0123456789abcdef"):
        remedy = "pin the commit that the repository's page shows, in quotes"
        yield Problem("revision-not-pinned", key, repr(revision), "40 hex digits", remedy)


def _architecture(config: Config) -> Problems:
    yield from check_architecture(config.model.architecture)


def _group(config: Config) -> Problems:
    # An advantage is the distance from the group's mean: of one response it is always 0, and nothing is learned.
    if uses_engines(config) and config.rollout.num_samples_per_prompt < 2:
        remedy = "raise it; lower rollout.rollout_batch_size to keep the number of samples"
        allowed = "at least 2: GRPO compares a prompt's responses"
        yield Problem("one-response-per-prompt", "rollout.num_samples_per_prompt", "1", allowed, remedy)


def _positions(config: Config) -> Problems:
    rollout, positions = config.rollout, config.model.architecture.max_position_embeddings
    longest = rollout.max_response_tokens
    if longest + max(rollout.max_prompt_tokens, 1) > positions:
        allowed = f"less than {positions} (max_position_embeddings), which prompt and response share"
        yield Problem("no-room-for-a-prompt", "rollout.max_response_tokens", str(longest), allowed, "cut the responses")


def _recomputation(config: Config) -> Problems:
    trainer = config.trainer
    chunk, smallest = trainer.recompute_num_layers, min(map(len, chain(*stage_chunks(config))), default=0)
    if trainer.recompute_granularity == "full" and chunk > smallest > 0:
        allowed = f"at most {smallest}, the layers of the smallest pipeline stage, or chunk of one"
        remedy = "recompute fewer layers at a time"
        yield Problem("recompute-exceeds-stage", "trainer.recompute_num_layers", str(chunk), allowed, remedy)
    key, modules = "trainer.recompute_modules", trainer.recompute_modules
    if (trainer.recompute_granularity == "selective") != bool(modules):
        allowed = "modules with trainer.recompute_granularity=selective, none otherwise"
        found, remedy = ", ".join(modules) or "none", "set both, or leave both out"
        yield Problem("recompute-modules-without-selective", key, found, allowed, remedy)
    possible = recomputable_modules(config)
    if impossible := [module for module in modules if module not in possible]:
        allowed = f"{', '.join(possible)} with {config.model.name} on {config.hardware.name}"
        yield Problem("recompute-module-missing", key, ", ".join(impossible), allowed, "leave out the others")
    if "moe" in modules and (inside := {"moe_act", "shared_experts"} & {*modules}):
        remedy = f"leave out {' and '.join(sorted(inside))}"
        allowed = "moe without the modules inside it"
        yield Problem("recompute-modules-nested", key, ", ".join(modules), allowed, remedy)


def _benchmark_rows(config: Config) -> Problems:
    rows = config.evaluation.serving.concurrency
    if not rows or any(not row.isdecimal() or int(row) < 1 for row in rows) or len({*rows}) < len(rows):
        allowed, remedy = "whole numbers from 1 on", "name the requests in flight, once each"
        yield Problem("not-concurrencies", "evaluation.serving.concurrency", ", ".join(rows) or "none", allowed, remedy)


def _names(config: Config) -> Problems:
    for key, name in (
        ("model.name", config.model.name),
        ("hardware.name", config.hardware.name),
        ("site.name", config.site.name),
    ):
        if not re.fullmatch(NODE_NAME, name):
            allowed = "up to 100 letters, digits, '.', '_' and '-' that start with a letter or digit"
            yield Problem(
                "not-a-name", key, repr(name), allowed, "give the name of its file: folders are named after it"
            )


def _hardware(config: Config) -> Problems:
    hardware, trainer = config.hardware, config.trainer
    if trainer.deepep and not hardware.trainer_deepep:
        remedy = "set trainer.deepep=false; tokens then go through Megatron's all-to-all"
        reason = f": {hardware.trainer_deepep_reason}" if hardware.trainer_deepep_reason else ""
        yield Problem("no-deepep", "trainer.deepep", "true", f"false on {hardware.name}{reason}", remedy)
    if hardware.compute_capability and not re.fullmatch(r"\d+\.\d", hardware.compute_capability):
        allowed, remedy = "a number such as 9.0, or none", "`nvidia-smi --query-gpu=compute_cap --format=csv` tells it"
        yield Problem(
            "not-a-capability", "hardware.compute_capability", repr(hardware.compute_capability), allowed, remedy
        )


def _formats(config: Config) -> Problems:
    hardware = config.hardware
    for key in ("formats", "emulated_formats"):
        if unknown := [name for name in getattr(hardware, key) if name not in FORMATS]:
            allowed = f"formats among {', '.join(FORMATS)}"
            yield Problem(
                "unknown-format", f"hardware.{key}", ", ".join(unknown), allowed, "correct the hardware's file"
            )
    computed = [*hardware.formats, *hardware.emulated_formats]
    # The embedded engine dequantises at load.
    if config.engine.kind != "sglang" or "fp8" in computed:
        return
    on_hardware = f"on {hardware.name}, which computes with {', '.join(computed)}"
    if config.rollout.fp8:
        remedy = "set rollout.fp8=false; the engines then need twice the memory"
        yield Problem("no-fp8", "rollout.fp8", "true", f"false {on_hardware}", remedy)
    if config.evaluation.precision == "fp8":
        yield Problem(
            "no-fp8", "evaluation.precision", "fp8", f"source or auto {on_hardware}", "set evaluation.precision=source"
        )


def _quantize(config: Config) -> Problems:
    quantize, layers = config.quantize, config.model.architecture.num_hidden_layers
    if quantize.scale == "power_of_two" and quantize.strategy != "block":
        allowed = (
            f"fp32 with quantize.strategy={quantize.strategy}: only scales of blocks are declared as powers of two"
        )
        remedy = "set quantize.strategy=block or quantize.scale=fp32"
        yield Problem("power-of-two-needs-blocks", "quantize.scale", "power_of_two", allowed, remedy)
    if quantize.keep_first_layers + quantize.keep_last_layers >= layers:
        kept = f"{quantize.keep_first_layers} first and {quantize.keep_last_layers} last"
        yield Problem(
            "no-layer-left", "quantize.keep_last_layers", kept, f"fewer than the {layers} layers", "keep fewer layers"
        )
    for pattern in quantize.keep_modules:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(
                "not-a-pattern", "quantize.keep_modules", repr(pattern), f"a regular expression ({error})", "correct it"
            )
    if config.serving.calibration and config.serving.format != "nvfp4":
        allowed = f"none with serving.format={config.serving.format}, which has no scales of activations"
        remedy = "leave it out, or set serving.format=nvfp4"
        yield Problem(
            "calibration-unused", "serving.calibration", ", ".join(config.serving.calibration), allowed, remedy
        )


def _merged_matrices(config: Config) -> Problems:
    """SGLang has gate and up of an MLP in one matrix and lets no block have rows of both (`Fp8LinearMethod`)."""
    arch, quantize = config.model.architecture, config.quantize
    serves_fp8 = config.rollout.fp8 or config.evaluation.precision == "fp8"
    if not (serves_fp8 and config.engine.kind == "sglang" and quantize.strategy == "block"):
        return
    num_dense = arch.first_k_dense_replace if arch.n_routed_experts else arch.num_hidden_layers
    if quantize.keep_first_layers >= num_dense or quantize.keep_modules or arch.intermediate_size % FP8_BLOCK == 0:
        return
    allowed = f"{num_dense} or more: their MLPs are {arch.intermediate_size} wide, no multiple of {FP8_BLOCK}"
    remedy = f"set quantize.keep_first_layers={num_dense}, or another quantize.strategy"
    yield Problem("rows-not-in-blocks", "quantize.keep_first_layers", str(quantize.keep_first_layers), allowed, remedy)


def _serving_rows(config: Config) -> Problems:
    """Rows of what is quantised are whole groups; where modules are kept, only the job can tell which are."""
    group, quantize = SERVING_GROUPS.get(config.serving.format), config.quantize
    if not group or quantize.keep_modules or quantize.keep_first_layers or quantize.keep_last_layers:
        return
    arch, experts_only = config.model.architecture, config.serving.format == "int4"
    widths: dict[str, int] = {}
    if arch.n_routed_experts or not experts_only:
        widths |= {"hidden_size": arch.hidden_size, "moe_intermediate_size": arch.moe_intermediate_size}
    if not experts_only:
        value_dim, has_dense = arch.v_head_dim or arch.head_dim, arch.first_k_dense_replace or not arch.n_routed_experts
        widths |= {
            "intermediate_size": arch.intermediate_size if has_dense else 0,
            "q_lora_rank": arch.q_lora_rank,
            "kv_lora_rank": arch.kv_lora_rank,
            "num_attention_heads": arch.num_attention_heads * value_dim,
            "linear_num_value_heads": arch.linear_num_value_heads * arch.linear_value_head_dim,
            "shared_expert_intermediate_size": arch.shared_expert_intermediate_size,
        }
    for name, width in widths.items():
        if width % group:
            allowed = f"rows of a multiple of {group} weights; {name} gives matrices with rows of {width}"
            remedy = f"choose another format, or keep these with quantize.keep_modules: {name} is the model's"
            yield Problem("rows-not-in-blocks", "serving.format", config.serving.format, allowed, remedy)


def _node_names(config: Config) -> Problems:
    names = config.site.node_names
    if len(set(names)) < len(names) or not all(re.fullmatch(NODE_NAME, name) for name in names):
        allowed = "different names of letters, digits, '.', '_' and '-' that start with a letter or digit"
        yield Problem("not-node-names", "site.node_names", repr(names), allowed, "give each node's host name once")


def _slices(config: Config) -> Problems:
    names = len(config.site.node_names)
    if config.stage.copy == "slices" and names not in (0, config.nodes):
        allowed = f"everything or nothing, or {config.nodes} site.node_names in the order of the nodes' ranks"
        remedy = "which slices a node needs follows from its rank: name the job's nodes, or none"
        yield Problem("slices-need-node-names", "stage.copy", f"slices with {names} site.node_names", allowed, remedy)


RULES: tuple[Callable[[Config], Problems], ...] = (
    _model_source,
    _data_sources,
    _suites,
    _architecture,
    *LAYOUT_RULES,
    _group,
    *SUPERVISED_RULES,
    *OPTIMIZER_RULES,
    _positions,
    _recomputation,
    _hardware,
    _formats,
    _quantize,
    _merged_matrices,
    _serving_rows,
    _benchmark_rows,
    _names,
    _node_names,
    _slices,
)
