"""The rules as such: each with its script, log, benchmark and message, and no lint without a reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.planned_jobs import planned_jobs
from tests.support.workflow_runs import ROOT, run_snakemake

from posttrain.config.site_rules import time_limit_minutes
from posttrain.planner.job_needs import RuleNeeds, check_served, job_needs
from posttrain.planner.resolve import resolve

# They run nothing: they name results, or join the nodes.
WITHOUT_WORK = {"all", "stage_all_nodes", "finalize_rollout_fp8", "finalize_serving", "finalize_bf16"}
ACCEPTED_LINTS = {
    # It is extended for the steps, and every shell has one.
    "Environment variable PATH used but not asserted with envvars directive",
    # `make env` is the one environment of all rules; SGLang has its own, and a process starts it, not a rule.
    "Specify a conda environment or container for each rule",
    # Folders of the code, as the working directory sees them: as params, a clone that moves would run all again.
    "Shell command directly uses variable SCRIPTS from outside of the rule",
    # The configuration as a whole: as a param of rules that use a part of it, any change of it would run them again.
    "Shell command directly uses variable RESOLVED_FILE from outside of the rule",
    # This node's disk: as a param, another node would train a finished run again.
    "Shell command directly uses variable NODE_LOCAL from outside of the rule",
    # Who starts the command where: as a param, another cluster would train a finished run again.
    "Shell command directly uses variable ON_ALL_NODES from outside of the rule",
    "Shell command directly uses variable ON_ONE_NODE from outside of the rule",
    "Shell command directly uses variable IN_IMAGE from outside of the rule",
}


def rules_of_the_workflow() -> dict[str, str]:
    """Return every rule's name and text."""
    rules = {}
    for path in [ROOT / "Snakefile", *(ROOT / "workflow" / "rules").glob("*.smk")]:
        for block in re.split(r"^ *(?=rule \w+:$)", path.read_text(), flags=re.MULTILINE)[1:]:
            name, _, text = block.removeprefix("rule ").partition(":")
            rules[name] = text
    return rules


RULES = rules_of_the_workflow()


def test_every_rule_was_found() -> None:
    assert {"all", "make_tiny_model", "train_grpo", "verify"} <= RULES.keys()
    assert len(RULES) == sum(
        len(re.findall(r"^\s*rule ", path.read_text(), re.MULTILINE))
        for path in [ROOT / "Snakefile", *(ROOT / "workflow" / "rules").glob("*.smk")]
    )


def test_rules_and_scripts_share_their_names() -> None:
    assert RULES.keys() - WITHOUT_WORK == {path.stem for path in (ROOT / "scripts").glob("*.py")}


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"all"}))
def test_a_rule_is_complete(name: str) -> None:
    text = RULES[name]
    assert re.search(r"^\s*message:$", text, re.MULTILINE)
    if name in WITHOUT_WORK:
        return
    script = rf'"POSTTRAIN_LOG={{log:q}} ({{(ON_ALL_NODES|ON_ONE_NODE|IN_IMAGE)}})?python {{SCRIPTS}}/{name}\.py '
    assert re.search(script, text), "a rule runs the script of its name"
    assert re.search(rf'^\s*log:\n\s+.*"{name}"', text, re.MULTILINE), "a rule's logs lie in the folder of its name"
    # A benchmark is an output: what only answers has none, or it would be asked once.
    has_output, has_benchmark = (re.search(rf"^\s*{word}:$", text, re.MULTILINE) for word in ("output", "benchmark"))
    assert bool(has_output) == bool(has_benchmark)


# The picture leaves out the target, the configuration's own files, and the file that joins the nodes' copies.
NOT_DRAWN = {"all", "resolve_config", "stage_all_nodes"}
RECIPES = [path.stem.rpartition("_") for path in sorted((ROOT / "config" / "nodes").glob("*.yaml"))]
PLANNED: list[dict[str, object]] = [
    *({"model": model, "nodes": int(nodes), "site": "local"} for model, _, nodes in RECIPES),
    {"model": "glm5", "nodes": 16, "site": "example_slurm", "set": "site.slurm.spare_nodes=2"},
    {"model": "glm5_4layer", "site": "example_kubernetes"},
    {"model": "tiny", "site": "local"},
    {"model": "tiny", "site": "local", "set": "site.node_names=[] rollout.fp8=false"},
    {"model": "tiny", "site": "local", "set": "download.torch_dist_folder=somewhere"},
]


def test_what_snakemake_plans_is_what_the_chain_says(tmp_path: Path) -> None:
    """Who waits for whom, how many jobs there are, and what each takes, in its resources, its message and the plan."""
    for given, jobs in zip(PLANNED, planned_jobs(tmp_path, PLANNED), strict=True):
        config = resolve(given, ROOT / "config").config
        needs = RuleNeeds(config)
        chain = {rule.name: set(rule.after) for rule in needs.chain}
        planned = {name: {before for job in same for before in job["after"]} for name, same in jobs.items()}
        assert everything_before(chain) == everything_before(planned), given
        for row in needs.plan_part(given, {}):
            name, rule = row["name"], row["name"].partition(" ")[0]
            taken = {"nodes": row["nodes"], "gpus": row["gpus"]}
            if limit := job_needs(config, rule).time_limit:
                taken["runtime"] = time_limit_minutes(limit)
            assert row["jobs"] == len(jobs[name]), (given, name)
            for job in jobs[name]:
                assert {"nodes": 1, "gpus": 0} | job["resources"] == taken, (given, name)
                assert job["message"].endswith(needs.message(rule)), (given, name)
        served = [problem.value.partition(" ")[0] for problem in check_served(config)]
        nodes = jobs["evaluate before"][0]["resources"]["nodes"]
        assert served == ([str(nodes)] if nodes > 1 else []), given


def everything_before(inputs: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return rule -> all rules that must have ended before it."""
    found: dict[str, set[str]] = {}

    def ancestors(name: str) -> set[str]:
        if name not in found:
            found[name] = inputs[name].union(*(ancestors(other) for other in inputs[name])) - NOT_DRAWN
        return found[name]

    return {name: ancestors(name) for name in inputs if name not in NOT_DRAWN}


def test_no_lint_without_a_reason(tmp_path: Path) -> None:
    for config in ([], ["--config", "model=glm5"]):
        output = run_snakemake(tmp_path, "--lint", *config).stdout
        found = Counter(re.findall(r"^    \* (.*?)(?: in line \d+)?\.?:$", output, re.MULTILINE))
        assert sum(found.values()) >= len(RULES) - 2, output
        assert found.keys() == ACCEPTED_LINTS
