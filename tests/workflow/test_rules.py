"""The rules as such: each with its script, log, benchmark and message, and no lint without a reason."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from tests.support.workflow_runs import ROOT, run_snakemake

from posttrain.__main__ import COMMANDS
from posttrain.observability.rule_chain import rule_chain
from posttrain.planner.layout_choice import resolve

# They run nothing: one names the results, the other joins the nodes.
WITHOUT_WORK = {"all", "stage_all_nodes"}
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
    assert {"all", "make_tiny_model", "train_grpo", "verify"} <= RULES.keys()
    assert len(RULES) == sum(len(re.findall(r"^\s*rule ", path.read_text(), re.MULTILINE)) for path in FILES)


def test_rules_share_their_names_with_scripts_and_commands() -> None:
    """A command has a module and a test of its name, too, and `posttrain --help` tells of it."""
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    modules = {path.stem for path in (ROOT / "workflow/src/posttrain/commands").glob("*.py")} - {"__init__"}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests/unit/commands").glob("test_*.py")}
    assert modules == tests == {name.replace("-", "_") for name in COMMANDS}
    assert RULES.keys() - WITHOUT_WORK == scripts | modules
    assert scripts & modules == set()


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


@pytest.mark.parametrize("model", ["tiny", "glm5"])
def test_messages_end_with_what_the_plan_says(model: str) -> None:
    config = resolve({"model": model, "site": "local"}, ROOT / "config").config
    for node in rule_chain(config):
        message = re.search(r"^ *message:\n(.*?)^ *shell:$", RULES[node.rule], re.MULTILINE | re.DOTALL)
        assert message, node.rule
        assert re.search(rf"{{NEEDS\.message\('{node.rule}'(, with_nodes=False)?\)}}\"\n$", message[1]), node.rule


def test_no_lint_without_a_reason(tmp_path: Path) -> None:
    for config in ([], ["--config", "model=glm5"]):
        output = run_snakemake(tmp_path, "--lint", *config).stdout
        found = Counter(re.findall(r"^    \* (.*?)(?: in line \d+)?\.?:$", output, re.MULTILINE))
        assert sum(found.values()) >= len(RULES) - 4, "of every rule, but for those that this model has not"
        assert found.keys() == {lint for path in FILES for lint in re.findall(ANSWER, path.read_text())}
