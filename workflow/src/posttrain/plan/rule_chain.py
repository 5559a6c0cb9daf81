"""The workflow's chain of rules for one configuration, with their order and number of jobs.

The Snakefile determines what runs; the report and the plan draw this copy. A test of the workflow compares both.
`job_needs` has the resources of jobs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from posttrain.config.derived import needs_untrained
from posttrain.config.schema import Config
from posttrain.plan.sizing.evaluation import evaluates_fp8
from posttrain.plan.sizing.storage import makes_fp8, starts_in_fp8
from posttrain.store import suite_folders


@dataclass(frozen=True)
class RuleNode:
    """One rule in the chain.

    Args:
        name: Unique name: the rule's name, with "before" or "after" (training) for a rule with two jobs.
        does: Description in a few words.
        after: Names of the rules that it waits for.
        num_jobs: Number of its concurrent jobs.
    """

    name: str
    does: str
    after: tuple[str, ...]
    num_jobs: int = 1

    @property
    def rule(self) -> str:
        """Name of the rule, of its script and of its log folder."""
        return self.name.split(" ")[0]


def rule_chain(config: Config, is_fork: bool = False) -> list[RuleNode]:
    """Return the rules that lead to the report, in the order of the data.

    Args:
        config: The resolved configuration.
        is_fork: The run starts from another run's state.
    """
    left_out = {
        "make_tiny_model": config.model.source.kind != "made",
        "adopt_torch_dist": not config.download.torch_dist_folder,
        "convert_hf_to_torch_dist": bool(config.download.torch_dist_folder),
        "finalize_torch_dist": bool(config.download.torch_dist_folder),
        "quantize": not makes_fp8(config),
        "finalize_quantized": not makes_fp8(config),
        "quantize start": not (starts_in_fp8(config) and needs_untrained(config)),
        "finalize_quantized start": not starts_in_fp8(config),
        "quantize after": not evaluates_fp8(config),
        "finalize_quantized after": not evaluates_fp8(config),
        "stage_to_node_local": not config.site.node_names or config.stage.copy == "nothing",
        "fork_checkpoint": not is_fork,
        "download_rows": not config.evaluation.suites,
        "approve_environment": not config.data.environment,
    }
    rules = [rule for rule in [*_rules_of_weights(config), *_rules_of_a_run(config)] if not left_out.get(rule.name)]
    names = {rule.name for rule in rules}
    return [dataclasses.replace(rule, after=tuple(name for name in rule.after if name in names)) for rule in rules]


def _rules_of_weights(config: Config) -> list[RuleNode]:
    """Return all possible rules, each with all possible dependencies."""
    parts, joins, patched = config.convert.num_parts, "joins and checks the parts", ("patch_hf_config",)
    ready = ("adopt_torch_dist", "finalize_torch_dist", *_begun_with(config), *patched)
    downloaded, fetches = ("download_hf_checkpoint",), "fetches the model in parts, every file verified"
    return [
        RuleNode("make_tiny_model", "makes and warms up a small model", ()),
        RuleNode("list_hf_checkpoint", "lists the model's files with their hashes", ("make_tiny_model",)),
        RuleNode("download_hf_checkpoint", fetches, ("list_hf_checkpoint",), config.download.num_parts),
        RuleNode("finalize_hf_checkpoint", joins, downloaded),
        RuleNode("download_dataset", "fetches or generates the prompts", ()),
        RuleNode("download_rows", "fetches an evaluation's prompts", (), len(set(suite_folders(config).values()))),
        RuleNode("patch_hf_config", "checks config and tensors, links the weights", ("finalize_hf_checkpoint",)),
        RuleNode("adopt_torch_dist", "takes a checkpoint that is there, after comparing it", patched),
        RuleNode("convert_hf_to_torch_dist", "writes Megatron's format in parts", patched, parts),
        RuleNode("finalize_torch_dist", joins, ("convert_hf_to_torch_dist",)),
        RuleNode("quantize", "quantises to FP8 in parts", patched, parts),
        RuleNode("finalize_quantized", joins, ("quantize",)),
        RuleNode("quantize start", "quantises what the trainer does not send", patched),
        RuleNode(
            "finalize_quantized start", "joins it, config and tokenizer for empty engines", (*patched, "quantize start")
        ),
        RuleNode("stage_to_node_local", "copies to the node's own disk, verified", ready, len(config.site.node_names)),
    ]


def _rules_of_a_run(config: Config) -> list[RuleNode]:
    ready = ("stage_to_node_local", "adopt_torch_dist", "finalize_torch_dist", *_begun_with(config))
    before = (*ready, "approve_data", "approve_environment", "fork_checkpoint")
    prompts = ("download_dataset", "download_rows")
    checked = ("patch_hf_config", *prompts)
    came = ("finalize_quantized",) if evaluates_fp8(config) else ()
    exported = ("finalize_quantized after", "check_export", "finalize_export_hf", *prompts)
    evaluated = ("evaluate before", "evaluate after")
    parts = config.convert.num_parts
    return [
        RuleNode("fork_checkpoint", "begins with another run's state", ()),
        RuleNode("approve_data", "grades every label as a response", checked),
        RuleNode("approve_environment", "plays scripted agents", ("patch_hf_config", "download_dataset")),
        RuleNode("evaluate before", "pass rate of the model as it came", (*came, *checked)),
        RuleNode("train", "rollout, update, weight sync", before),
        RuleNode("export_hf", "writes the trained model in Hub layout, in parts", ("train",), parts),
        RuleNode("finalize_export_hf", "joins and checks the parts", ("export_hf",)),
        RuleNode("check_export", "transformers loads it, and says what the trainer said", ("finalize_export_hf",)),
        RuleNode("quantize after", "quantises to FP8 in parts", ("finalize_export_hf",), parts),
        RuleNode("finalize_quantized after", "joins and checks the parts", ("quantize after",)),
        RuleNode("evaluate after", "pass rate of the trained model", exported),
        RuleNode("render_report", "writes the report", evaluated),
    ]


def _begun_with(config: Config) -> tuple[str, ...]:
    """Return the rules that make the engines' initial files, unless they are the patched checkpoint."""
    if not config.rollout.fp8:
        return ()
    return ("finalize_quantized start",) if starts_in_fp8(config) else ("finalize_quantized",)
