"""Every branch that a dry run is made of, and the compact form in which its jobs are kept."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path

from tests.support.forked_snakemake import forked_snakemake
from tests.support.workflow_runs import ROOT

from posttrain.errors import ConfigError, raise_if_any
from posttrain.plan.problems import find_problems
from posttrain.plan.resolve import resolve

CONFIG_DIR = ROOT / "config"
NODE_COUNTS = (1, 2, 16, 24)


def names_of(kind: str) -> list[str]:
    """Return the names of a kind of configuration file."""
    return sorted(path.stem for path in (CONFIG_DIR / kind).glob("*.yaml"))


def refusal_of(choice: dict[str, object]) -> list[str]:
    """Return the keys for which a choice of model, hardware and nodes is refused; none when it is valid."""
    try:
        raise_if_any(find_problems(resolve({**choice, "site": "local"}, CONFIG_DIR).config))
    except ConfigError as error:
        return sorted({problem.key for problem in error.problems})
    return []


def refused_branches() -> dict[str, list[str]]:
    """Return why every model on every hardware with every node count is refused, where it is: ten seconds' work."""
    choices = product(names_of("models"), names_of("hardware"), NODE_COUNTS)
    found = {
        f"{model}_{hardware}_{nodes}": refusal_of({"model": model, "hardware": hardware, "nodes": nodes})
        for model, hardware, nodes in choices
    }
    return {name: keys for name, keys in found.items() if keys}


def main_branches() -> dict[str, dict[str, object]]:
    """Return what is dry-run: each model where it runs by default, GLM-5 on each hardware, counts without a recipe."""
    defaults = {model: {"model": model} for model in names_of("models")}
    named = [("glm5", hardware, 16) for hardware in names_of("hardware")]
    named += [("tiny", "cpu", 2), ("tiny", "h200", 1), ("glm5", "h200", 24)]
    choices = {f"{m}_{hardware}_{n}": {"model": m, "hardware": hardware, "nodes": n} for m, hardware, n in named}
    return defaults | {name: choice for name, choice in choices.items() if not refusal_of(choice)}


# Settings that change which rules there are, or what they read.
OTHER_BRANCHES: dict[str, dict[str, object]] = {
    "tiny_bf16_rollout": {"set": "rollout.fp8=false"},
    "tiny_deepseek_alias": {"set": "model.patch.target=deepseek_v32"},
    "tiny_four_nodes": {"set": "site.node_names=[a,b,c,d] convert.num_parts=3"},
    "tiny_prompt_template": {"set": "data.prompt_template='Sort {prompt} now' data.seed=7"},
    "tiny_calculator": {"recipe": "calculator"},
    "tiny_suites": {"suites": "gsm8k,math500"},
    "tiny_adopted_torch_dist": {"set": "download.torch_dist_folder=somewhere"},
    "glm5_4layer_kubernetes": {"model": "glm5_4layer", "site": "example_kubernetes"},
    "tiny_from_folder": {"set": "model.source.kind=folder model.source.folder=somewhere"},
    "tiny_from_hub": {
        "set": f"model.source.kind=hub model.source.repo_id=owner/name model.source.revision={'a' * 40}",
        "run": "mine",
    },
}


def dry_run(folder: Path, config: dict[str, object], *options: str) -> tuple[int, str]:
    """Run a plain `snakemake -n` in a folder and return exit code and output."""
    pairs = [f"{key}={value}" for key, value in config.items()]
    return forked_snakemake(folder, "-n", *options, *(["--config", *pairs] if pairs else []))


def job_table(output: str) -> str:
    """Return the jobs of a dry run: rules with counts, then what each job says it does."""
    rows = re.search(r"^job +count\n[- ]+\n(.*?)\n\n", output, re.MULTILINE | re.DOTALL)
    assert rows, output
    counts = sorted(" ".join(line.split()) for line in rows[1].splitlines())
    messages = Counter(re.findall(r"^Job \d+: (.*)$", output, re.MULTILINE))
    return "\n".join([*counts, "", *(f"{count} x {message}" for message, count in sorted(messages.items()))]) + "\n"


def jobs_of(output: str) -> set[str]:
    """Return the rules that a dry run would run; empty when there is nothing to do."""
    if "Nothing to be done" in output:
        return set()
    return {line.split()[0] for line in job_table(output).split("\n\n")[0].splitlines()} - {"all", "total"}
