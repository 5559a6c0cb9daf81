"""The workflow's chain of rules for one configuration: what runs after what, and how often.

The Snakefile decides what runs; this is its picture, drawn by the report and the plan. A test of the workflow
holds both against each other. What a job takes is said by `job_needs`.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.config.schema import Config


@dataclass(frozen=True)
class RuleNode:
    """One rule in the chain.

    Args:
        name: Unique in the chain: the rule's name, or "evaluate before" and "evaluate after".
        does: What it does, in a few words.
        after: Names of the rules it waits for.
        num_jobs: How many jobs of it run side by side.
    """

    name: str
    does: str
    after: tuple[str, ...]
    num_jobs: int = 1

    @property
    def rule(self) -> str:
        """Name of the rule, its script and its log folder."""
        return self.name.split(" ")[0]


def rule_chain(config: Config, is_fork: bool = False) -> list[RuleNode]:
    """Return the rules that lead to the report, in the order of the data.

    Args:
        config: The resolved configuration.
        is_fork: The run begins with another run's state.
    """
    return [*_source_rules(config), *_checkpoint_rules(config), *_training_rules(config, is_fork)]


def is_staged(config: Config) -> bool:
    """Tell whether rules copy the weights to nodes before training starts."""
    return bool(config.site.node_names) and config.stage.copy != "nothing"


def _source_rules(config: Config) -> list[RuleNode]:
    is_made = config.model.source.kind == "made"
    made = [RuleNode("make_tiny_model", "makes and warms up a small model", ())] if is_made else []
    fetched_after = ("make_tiny_model",) if is_made else ()
    return [
        *made,
        RuleNode("list_hf_checkpoint", "lists the model's files with their hashes", fetched_after),
        RuleNode(
            "download_hf_checkpoint",
            "fetches the model in parts, every file verified",
            ("list_hf_checkpoint",),
            config.download.num_parts,
        ),
        RuleNode("finalize_hf_checkpoint", "joins and checks the parts", ("download_hf_checkpoint",)),
        RuleNode("download_dataset", "fetches or generates the prompts", ()),
        RuleNode("patch_hf_config", "checks config and tensors, links the weights", ("finalize_hf_checkpoint",)),
    ]


def _checkpoint_rules(config: Config) -> list[RuleNode]:
    parts, patched = config.convert.num_parts, ("patch_hf_config",)
    if config.download.torch_dist_folder:
        rules = [RuleNode("adopt_torch_dist", "takes a checkpoint that is there, after comparing it", patched)]
    else:
        rules = [
            RuleNode("convert_hf_to_torch_dist", "writes Megatron's format in parts", patched, parts),
            RuleNode("finalize_torch_dist", "joins and checks the parts", ("convert_hf_to_torch_dist",)),
        ]
    torch_dist = rules[-1].name
    if config.rollout.fp8:
        rules += [
            RuleNode("quantize_rollout_fp8", "quantises to FP8 in parts", patched, parts),
            RuleNode("finalize_rollout_fp8", "joins and checks the parts", ("quantize_rollout_fp8",)),
        ]
    if is_staged(config):
        staged = (torch_dist, *(("finalize_rollout_fp8",) if config.rollout.fp8 else patched))
        rules.append(
            RuleNode(
                "stage_to_node_local",
                "copies to the node's own disk, verified",
                staged,
                len(config.site.node_names),
            )
        )
    return rules


def _training_rules(config: Config, is_fork: bool) -> list[RuleNode]:
    parts = config.convert.num_parts
    torch_dist = "adopt_torch_dist" if config.download.torch_dist_folder else "finalize_torch_dist"
    rollout = "finalize_rollout_fp8" if config.rollout.fp8 else "patch_hf_config"
    before = ("stage_to_node_local",) if is_staged(config) else (torch_dist, rollout)
    fork = [RuleNode("fork_checkpoint", "begins with another run's state", ())] if is_fork else []
    return [
        *fork,
        RuleNode(
            "evaluate before",
            "pass rate of the model as it came",
            ("patch_hf_config", "download_dataset"),
        ),
        RuleNode(
            "train_grpo",
            "rollout, update, weight sync",
            (*before, "download_dataset", *(rule.name for rule in fork)),
        ),
        RuleNode("export_hf", "writes the trained model in Hub layout, in parts", ("train_grpo",), parts),
        RuleNode("finalize_export_hf", "joins and checks the parts", ("export_hf",)),
        RuleNode(
            "evaluate after",
            "pass rate of the trained model",
            ("finalize_export_hf", "download_dataset"),
        ),
        RuleNode("render_report", "writes the report", ("evaluate before", "evaluate after")),
    ]
