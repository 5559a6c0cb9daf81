"""Check prompts, labels, tokenizer and graders together, and show some training prompts."""

from __future__ import annotations

from posttrain.errors import Problem, raise_if_any
from posttrain.rl.data.dataset import load_prompts
from posttrain.rl.data.dataset_files import HELDOUT, TRAIN
from posttrain.rl.evaluation.data_check import check_data, print_check
from posttrain.rl.evaluation.environment_check import check_environment, print_environment_check
from posttrain.rl.evaluation.heldout import read_suites
from posttrain.store import Paths, receipt_of, suite_folders


def main(paths: Paths) -> None:
    """Show the findings, and fail with the problems that would reject a run."""
    config, suites = paths.resolved.config, suite_folders(paths.resolved.config)
    raise_if_any(
        [
            Problem(
                "not-made-yet",
                str(folder),
                "not made yet",
                "dataset and tokenizer",
                "`snakemake --cores 2 check_data` makes them",
            )
            for folder in (paths.dataset, *suites.values(), paths.hf_patched)
            if not receipt_of(folder).exists()
        ]
    )
    train, heldout = (load_prompts(paths.dataset / name) for name in (TRAIN, HELDOUT))
    found = check_data(config, paths.hf_patched, train, heldout, read_suites(config, suites))
    print_check(found)
    problems = [*found.problems]
    if config.data.environment:
        played = check_environment(config, paths.hf_patched, train)
        print_environment_check(played)
        problems += played.problems
    raise_if_any(problems)
