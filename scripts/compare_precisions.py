"""Compare a trained model with what quantising made of it: score, KL, memory and speed, and which one to deploy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from posttrain.artifacts import receipt_of, require_files, suite_folders, write_json
from posttrain.checkpoint.staging.node_local import require_content
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.schema import Config
from posttrain.config.suites import HELD_OUT
from posttrain.evaluation.deployment import ORIGINAL, Measured, lost_points, table_of, verdict
from posttrain.evaluation.divergence import Sample, Spoken, divergence
from posttrain.evaluation.heldout import Answered, Exam, answer_exams, read_exams
from posttrain.planner.sizing.evaluation import serving_config
from posttrain.planner.sizing.memory import GIB

# What an evaluation calls them; the embedded engine reads any other as what it was made of.
ENGINE_PRECISION = {"fp8": "fp8"}


def main() -> None:
    """Let engines answer with each checkpoint, compare all with the first one, print the table and write it."""
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        original=(Path, "the trained model as it is exported"),
        original_receipt=Path,
        precisions={"nargs": "+", "required": True, "help": "what it is compared with"},
        checkpoints={"nargs": "+", "type": Path, "required": True, "help": "a folder of each"},
        dataset=(Path, "folder with heldout.jsonl"),
        output=(Path, "all numbers, as JSON; written last"),
    )
    config: Config = args.resolved.config
    folders = {ORIGINAL: args.original, **dict(zip(args.precisions, args.checkpoints, strict=True))}
    receipts = {name: receipt_of(folder) for name, folder in folders.items()} | {ORIGINAL: args.original_receipt}
    digests = {
        name: require_content(folder, receipts[name], config.stage.workers).digest for name, folder in folders.items()
    }
    suites = suite_folders(config)
    for folder in suites.values():
        require_files(folder, receipt_of(folder))
    engines = {name: engines_of(config, name) for name in folders}
    exams = read_exams(engines[ORIGINAL], {HELD_OUT: args.dataset, **suites})
    answered = {
        name: answer_exams(engines[name], folder, exams, args.output.parent / f"compare_precisions.{name}.engines")
        for name, folder in folders.items()
    }
    measured = compare(config, engines, folders, answered, exams)
    print_table(measured)
    best, sentence = verdict(measured, config.evaluation.deployment)
    print(sentence)
    print("KL is that of weights alone: activations stay in FP32")
    compared = [one.as_dict() | {"checkpoint": digests[one.precision]} for one in measured]
    write_json(args.output, {"deploy": best, "because": sentence, "precisions": compared})


def engines_of(config: Config, precision: str) -> Config:
    """Return the configuration of the engines that serve a precision."""
    asked = dataclasses.replace(config.evaluation, precision=ENGINE_PRECISION.get(precision, "source"))
    return serving_config(dataclasses.replace(config, evaluation=asked))


def compare(
    config: Config,
    engines: Mapping[str, Config],
    folders: Mapping[str, Path],
    answered: Mapping[str, Mapping[str, Answered]],
    exams: Sequence[Exam],
) -> list[Measured]:
    """Return a row for each precision, the original's first."""
    import torch

    samples = samples_of(answered[ORIGINAL][HELD_OUT], config.evaluation.deployment.num_samples)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    original = Spoken(folders[ORIGINAL], samples, device)
    graded = {name: {exam.name: answered[name][exam.name].graded for exam in exams} for name in folders}
    rows = []
    for name, folder in folders.items():
        passed = [response.passes for responses in graded[name].values() for response in responses]
        heldout = answered[name][HELD_OUT]
        far = divergence(original, Spoken(folder, samples, device)) if name != ORIGINAL else None
        lost = lost_points(graded[ORIGINAL], graded[name])
        rate = sum(passed) / len(passed)
        rows.append(Measured(name, rate, *lost, far, engine_gib(engines[name], folder), heldout.tokens_per_second))
    return rows


def samples_of(answered: Answered, most: int) -> list[Sample]:
    """Return the first sample of the first prompts, as the original answered."""
    firsts = [place for place, response in enumerate(answered.graded) if response.sample_index == 0]
    return [
        Sample(
            (*answered.requests[place].input_ids, *answered.results[place].output_ids),
            len(answered.requests[place].input_ids),
        )
        for place in firsts[:most]
    ]


def engine_gib(served: Config, folder: Path) -> float:
    """Return the memory that engines take on all of their GPUs; on a CPU, their weights as they are stored."""
    engine, hardware = served.engine, served.hardware
    if hardware.device == "cuda":
        gpus = engine.num_engines * engine.gpus_per_engine
        return gpus * engine.mem_fraction_static * hardware.memory_gib_per_gpu
    return engine.num_engines * sum(file.stat().st_size for file in folder.glob("*.safetensors")) / GIB


def print_table(measured: Sequence[Measured]) -> None:
    """Print a row for each precision."""
    head, rows = table_of(measured)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    run(main)
