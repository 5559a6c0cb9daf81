"""The workflow's chain of rules for one configuration: what runs after what, how often, and on how much.

The Snakefile decides what runs; this is its picture, drawn by the report and the plan. A test of the workflow
holds both against each other.
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
        nodes: Nodes of one job.
        gpus: GPUs of one job.
    """

    name: str
    does: str
    after: tuple[str, ...]
    num_jobs: int = 1
    nodes: int = 1
    gpus: int = 0

    @property
    def rule(self) -> str:
        """Name of the rule, its script and its log folder."""
        return self.name.split(" ")[0]


def rule_chain(config: Config, is_fork: bool = False, evaluation_nodes: int = 1) -> list[RuleNode]:
    """Return the rules that lead to the report, in the order of the data.

    Args:
        config: The resolved configuration.
        is_fork: The run begins with another run's state.
        evaluation_nodes: Nodes that serve the model while it is evaluated; what runs, runs on one.
    """
    training = _training_rules(config, is_fork, evaluation_nodes)
    return [*_source_rules(config), *_checkpoint_rules(config), *training]


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
            RuleNode("quantize", "quantises to FP8 in parts", patched, parts),
            RuleNode("finalize_quantized", "joins and checks the parts", ("quantize",)),
        ]
    if is_staged(config):
        staged = (torch_dist, *(("finalize_quantized",) if config.rollout.fp8 else patched))
        rules.append(
            RuleNode(
                "stage_to_node_local",
                "copies to the node's own disk, verified",
                staged,
                len(config.site.node_names),
            )
        )
    return rules


def _training_rules(config: Config, is_fork: bool, evaluation_nodes: int) -> list[RuleNode]:
    gpus_per_node = config.hardware.gpus_per_node if config.hardware.device == "cuda" else 0
    parts = config.convert.num_parts
    torch_dist = "adopt_torch_dist" if config.download.torch_dist_folder else "finalize_torch_dist"
    rollout = "finalize_quantized" if config.rollout.fp8 else "patch_hf_config"
    before = ("stage_to_node_local",) if is_staged(config) else (torch_dist, rollout)
    evaluated = {"nodes": evaluation_nodes, "gpus": evaluation_nodes * gpus_per_node}
    fork = [RuleNode("fork_checkpoint", "begins with another run's state", ())] if is_fork else []
    return [
        *fork,
        RuleNode(
            "evaluate before",
            "pass rate of the model as it came",
            ("patch_hf_config", "download_dataset"),
            **evaluated,
        ),
        RuleNode(
            "train_grpo",
            "rollout, update, weight sync",
            (*before, "download_dataset", *(rule.name for rule in fork)),
            1,
            config.nodes,
            config.nodes * gpus_per_node,
        ),
        RuleNode("export_hf", "writes the trained model in Hub layout, in parts", ("train_grpo",), parts),
        RuleNode("finalize_export_hf", "joins and checks the parts", ("export_hf",)),
        RuleNode(
            "evaluate after",
            "pass rate of the trained model",
            ("finalize_export_hf", "download_dataset"),
            **evaluated,
        ),
        RuleNode("render_report", "writes the report", ("evaluate before", "evaluate after")),
    ]
