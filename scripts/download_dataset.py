"""Make a run's dataset: checked prompts for training and held-out prompts."""

from __future__ import annotations

from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.parts.steps import FOLDER, make_folder
from posttrain.cli import RESOLVED, command_line, run
from posttrain.rl.data.dataset_files import make_dataset
from posttrain.rl.data.raw_rows import local_files
from posttrain.store import Receipt, manifest_of


def main() -> None:
    """Generate, read or fetch the rows, write both files and the receipt."""
    args = command_line(
        __doc__,
        **FOLDER,
        resolved=RESOLVED,
        num_retries={"type": int, "default": RetryRule.num_retries, "help": "failed attempts in a row"},
    )
    data = args.resolved.config.data
    # As in the folder's name: keys at older versions' values do not change the dataset's identity.
    wanted, kept = Receipt("download_dataset", (), {}, args.resolved.experiment["data"]), manifest_of(args.folder)
    make_folder(
        args, wanted, lambda partial: make_dataset(data, partial, kept, RetryRule(args.num_retries)), local_files(data)
    )


if __name__ == "__main__":
    run(main)
