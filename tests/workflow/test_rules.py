"""The rules as such: each with its script, log, benchmark and message, and no lint without a reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.planned_jobs import planned_jobs
from tests.support.workflow_runs import ROOT, run_snakemake

from posttrain.__main__ import ALONE, ANNEXES, COMMANDS
from posttrain.config.site_rules import time_limit_minutes
from posttrain.plan.job_needs import RuleNeeds, check_served, job_needs
from posttrain.plan.resolve import resolve
from posttrain.store.format_versions import CURRENT_RULES

# They run nothing: they name results, or join the nodes.
WITHOUT_WORK = {"all", "stage_all_nodes", "finalize_rollout_fp8", "finalize_serving", "finalize_bf16"}
FILES = [ROOT / "Snakefile", *(ROOT / "workflow" / "rules").glob("*.smk")]
# An answer to the linter stands in a comment beside the code.
ANSWER = r'# To `snakemake --lint`, "(.+?)": \w'


def rules_of_the_workflow() -> dict[str, str]:
    """Return every rule's name and text."""
    rules = {}
    for path in FILES:
        for block in re.split(r"^ *(?=rule \w+:$)", path.read_text(), flags=re.MULTILINE)[1:]:
            name, _, text = block.removeprefix("rule ").partition(":")
            rules[name] = text
    return rules


RULES = rules_of_the_workflow()


def test_every_rule_was_found() -> None:
    assert {"all", "make_tiny_model", "train", "verify"} <= RULES.keys()
    assert len(RULES) == sum(len(re.findall(r"^\s*rule ", path.read_text(), re.MULTILINE)) for path in FILES)


def test_rules_share_their_names_with_scripts_and_commands() -> None:
    """A command has a module and a test of its name, too, and `posttrain --help` tells of it."""
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")} - CURRENT_RULES.keys()
    modules = {path.stem for path in (ROOT / "workflow/src/posttrain/commands").glob("*.py")} - {"__init__"}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests/unit/commands").glob("test_*.py")}
    commands, of_annexes, alone = ({name.replace("-", "_") for name in names} for names in (COMMANDS, ANNEXES, ALONE))
    assert modules == tests == commands - of_annexes
    for path in (module.replace(".", "/") for module in ANNEXES.values()):
        folder, _, name = path.rpartition("/")
        assert (ROOT / f"workflow/src/{path}.py").exists()
        assert (ROOT / f"tests/{folder}/test_{name}.py").exists()
    assert RULES.keys() - WITHOUT_WORK == scripts | commands - alone
    assert scripts & commands == set()


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"all"}))
def test_a_rule_is_complete(name: str) -> None:
    text = RULES[name]
    assert re.match(r'\s*"""[A-Z][^\n]{10,110}\."""\n', text), "what `snakemake --list` shows"
    assert re.search(r"^\s*message:$", text, re.MULTILINE)
    if name in WITHOUT_WORK:
        return
    program = rf'^\s*shell:\n\s+runs\(\s*"{name}"'
    assert re.search(program, text, re.MULTILINE), "a rule runs the script or the command of its name"
    assert re.search(rf'^\s*log:\n\s+.*"{name}"', text, re.MULTILINE), "a rule's logs lie in the folder of its name"
    # A benchmark is an output: what only answers has none, or it would be asked once.
    has_output, has_benchmark = (re.search(rf"^\s*{word}:$", text, re.MULTILINE) for word in ("output", "benchmark"))
    assert bool(has_output) == bool(has_benchmark)


@pytest.mark.parametrize("name", ["evaluate", "ask_precision", "render_report"])
def test_what_vouches_for_an_output_is_deleted_before_it(name: str) -> None:
    """Snakemake deletes outputs in their order when a job that was killed starts anew, and may be killed meanwhile."""
    outputs = re.search(r"^\s*output:\n(.*?)^\s*log:$", RULES[name], re.MULTILINE | re.DOTALL)
    assert outputs
    assert re.findall(r"^\s*(\w+)=", outputs[1], re.MULTILINE)[0] == "receipt"


def test_each_precision_is_asked_on_the_nodes_that_hold_it(tmp_path: Path) -> None:
    words = ("-n", "-p", "compare_precisions", "--config", "model=glm5", "site=example_slurm")
    told = run_snakemake(tmp_path, *words).stdout
    for precision, nodes in (("original", 2), ("fp8", 1)):
        assert f"ask engines of the trained model as {precision} (nodes: {nodes})" in told
        (asked,) = re.findall(rf"beside_engines --resolved \S+ --precision {precision} --checkpoint (\S+) ", told)
        assert re.search(rf" -- python \S+ask_precision.py .*--precision {precision} --checkpoint {asked} ", told)
    assert "compare the trained model with fp8 (1 node, 8 GPUs)" in told


# The picture leaves out the target, the configuration's own files, and the file that joins the nodes' copies.
NOT_DRAWN = {"all", "resolve_config", "stage_all_nodes"}
RECIPES = [path.stem.rpartition("_") for path in sorted((ROOT / "config" / "nodes").glob("*.yaml"))]
PLANNED: list[dict[str, object]] = [
    *({"model": model, "nodes": int(nodes), "site": "local"} for model, _, nodes in RECIPES),
    {"model": "glm5", "nodes": 16, "site": "example_slurm", "set": "site.slurm.spare_nodes=2"},
    {"model": "glm5_4layer", "site": "example_kubernetes"},
    {"model": "tiny", "site": "local"},
    {"model": "tiny", "site": "local", "set": "site.node_names=[] rollout.fp8=false"},
    {"model": "tiny", "site": "local", "set": "rollout.fp8=false evaluation.precision=fp8"},
    {"model": "tiny", "site": "local", "set": "download.torch_dist_folder=somewhere"},
    {"model": "tiny", "site": "local", "recipe": "calculator"},
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
            more = ["not rehearsed"] if rule == "train" and config.hardware.device == "cuda" else []
            if limit := job_needs(config, rule).time_limit:
                taken["runtime"] = time_limit_minutes(limit)
            assert row["jobs"] == len(jobs[name]), (given, name)
            for job in jobs[name]:
                assert {"nodes": 1, "gpus": 0} | job["resources"] == taken, (given, name)
                told = needs.message("evaluate" if rule == "evaluate" else name, *more)
                assert job["message"].endswith(told), (given, name)
        served = [problem.value.partition(" ")[0] for problem in check_served(config)]
        nodes = jobs["evaluate before"][0]["resources"]["nodes"]
        is_local = config.site.launcher == "local"
        assert served == ([str(nodes)] if nodes > 1 and is_local else []), given


def test_a_changed_limit_of_programs_repeats_the_check_that_runs_them(tmp_path: Path) -> None:
    changes = ("", "sandbox.seconds=9", "data.reward=code", "data.reward=code sandbox.seconds=9")
    planned = planned_jobs(tmp_path, [{"model": "tiny", "site": "local", "set": change} for change in changes])
    unused, unused_9, used, used_9 = (jobs["approve_data"][0]["settings"] for jobs in planned)
    assert unused == unused_9
    assert used != used_9


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
        assert sum(found.values()) >= len(RULES.keys() - WITHOUT_WORK) - 2, (
            "of every rule, but for those that this model has not"
        )
        assert found.keys() == {lint for path in FILES for lint in re.findall(ANSWER, path.read_text())}
