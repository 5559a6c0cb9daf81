import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.config.load import resolve
from posttrain.observability.rule_chain import rule_chain

REPOSITORY = Path(__file__).resolve().parents[3]


def chain_of(model, overrides="", **more):
    config = resolve({"model": model, "site": "local", "set": overrides}, REPOSITORY / "config").config
    return rule_chain(config, **more)


@pytest.mark.parametrize(
    "overrides", ["", "rollout.fp8=false", "site.node_names=[]", "rollout.fp8=false site.node_names=[]"]
)
@pytest.mark.parametrize("model", ["tiny", "glm5"])
def test_every_rule_waits_for_rules_before_it(model, overrides):
    seen = set()
    for rule in chain_of(model, overrides):
        assert set(rule.after) <= seen, rule
        assert rule.name not in seen
        seen.add(rule.name)


def test_what_the_configuration_leaves_out_is_not_in_the_chain():
    names = {rule.name for rule in chain_of("glm5", "rollout.fp8=false site.node_names=[]")}
    assert not names & {
        "make_tiny_model",
        "quantize",
        "finalize_quantized",
        "stage_to_node_local",
    }
    assert {"make_tiny_model", "quantize", "stage_to_node_local"} <= {rule.name for rule in chain_of("tiny")}


def test_a_fork_trains_from_another_runs_state():
    config = resolve({"model": "tiny", "site": "local"}, REPOSITORY / "config").config
    rules = {rule.name: rule for rule in rule_chain(config, is_fork=True)}
    assert "fork_checkpoint" in rules["train_grpo"].after
    assert rules.keys() - {rule.name for rule in rule_chain(config)} == {"fork_checkpoint"}


def test_jobs_nodes_and_gpus_of_the_recipe():
    rules = {rule.name: rule for rule in chain_of("glm5", evaluation_nodes=3)}
    assert rules["convert_hf_to_torch_dist"].num_jobs == 16
    assert (rules["train_grpo"].nodes, rules["train_grpo"].gpus) == (16, 128)
    assert (rules["evaluate after"].nodes, rules["evaluate after"].gpus, rules["evaluate after"].rule) == (
        3,
        24,
        "evaluate",
    )
    assert all(rule.gpus == 0 for rule in chain_of("tiny"))


def test_each_rule_has_a_script_of_its_name():
    scripts = {path.stem for path in (REPOSITORY / "scripts").glob("*.py")}
    missing = {rule.rule for rule in chain_of("tiny")} - scripts
    assert not missing


# The picture leaves out the target, the configuration's own files, and the file that joins the nodes' copies.
NOT_DRAWN = {"all", "resolve_config", "stage_all_nodes"}


@pytest.mark.parametrize("overrides", ["", "site.node_names=[]"])
def test_the_picture_agrees_with_the_snakefile(tmp_path, overrides):
    drawn = {rule.name: set(rule.after) for rule in chain_of("tiny", overrides)}
    # In the Snakefile both evaluations are one rule.
    merged = {}
    for name, after in drawn.items():
        merged.setdefault(name.split(" ")[0], set()).update(other.split(" ")[0] for other in after)
    assert everything_before(merged) == everything_before(read_rulegraph(tmp_path, overrides))


def read_rulegraph(folder, overrides):
    """Return rule -> the rules it waits for, as Snakemake sees them."""
    shutil.copytree(REPOSITORY / "config", folder / "config")
    command = [sys.executable, "-m", "snakemake", "-s", str(REPOSITORY / "Snakefile")]
    command += ["-n", "--nolock", "--rulegraph"]
    command += ["--config", f"set={overrides}"] if overrides else []
    # It runs in another folder, where a relative entry would name nothing.
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in inherited if entry)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = dict(re.findall(r'(\d+)\[label = "(\w+)"', done.stdout))
    inputs = {name: set() for name in names.values()}
    for before, after in re.findall(r"(\d+) -> (\d+)", done.stdout):
        inputs[names[after]].add(names[before])
    return inputs


def everything_before(inputs):
    """Return rule -> all rules that must have ended before it."""
    found = {}

    def ancestors(name):
        if name not in found:
            found[name] = inputs[name].union(*(ancestors(other) for other in inputs[name])) - NOT_DRAWN
        return found[name]

    return {name: ancestors(name) for name in inputs if name not in NOT_DRAWN}
