"""A random checkpoint with tokenizer, a dataset, each with its receipt, and a configuration."""

import json
from pathlib import Path

from tests.support.resolved_words import resolved_words
from tests.support.tiny_checkpoint import TINY, make_random_checkpoint

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.rl.data.sort_digits import generate_prompts
from posttrain.store import Receipt, receipt_of, record_files, write_receipt

ROOT = Path(__file__).parents[2]
NUM_PROMPTS = 20


def make_inputs(folder: Path, overrides: str) -> list[object]:
    """Write everything below `folder`; return the arguments that evaluate and benchmark_serving share."""
    checkpoint, dataset = folder / "hf", folder / "dataset"
    make_random_checkpoint(checkpoint, TINY, seed=0)
    make_tokenizer(TINY.max_position_embeddings).save_pretrained(checkpoint)
    dataset.mkdir()
    _, heldout = generate_prompts(4, 1, NUM_PROMPTS, seed=0)
    (dataset / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in heldout))
    for step, made in (("patch_hf_config", checkpoint), ("download_dataset", dataset)):
        write_receipt(receipt_of(made), Receipt(step, record_files(made), {}, {}))
    return [
        *resolved_words({"model": "tiny", "site": "local", "set": overrides}, folder),
        *("--checkpoint", checkpoint, "--checkpoint-receipt", receipt_of(checkpoint)),
        *("--dataset", dataset),
    ]
