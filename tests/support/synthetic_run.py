"""A finished run folder with made-up numbers and real receipts, for tests of what reads runs.

The files are small and their hashes true; curves have the shape of a run that learns. Everything follows from
the seed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.synthetic_rows import episode_row, episode_summary, queue_row

from posttrain.config.load import dump_resolved, dump_yaml
from posttrain.plan.resolve import resolve
from posttrain.report.provenance import record_run
from posttrain.report.report_data import ReportInputs
from posttrain.rl.algorithm.statistics import RATIO_HISTOGRAM
from posttrain.store import (
    Paths,
    Receipt,
    part_receipt_of,
    read_receipt,
    receipt_of,
    record_files,
    records_of,
    write_json,
    write_receipt,
    write_text,
)

REPOSITORY = Path(__file__).resolve().parents[2]
RULE_SECONDS = {
    "make_tiny_model": 14.2,
    "download_hf_checkpoint": 0.9,
    "download_dataset": 0.6,
    "patch_hf_config": 0.7,
    "finalize_torch_dist": 1.9,
    "finalize_quantized": 1.4,
    "train": 151.3,
    "export_hf": 3.2,
    "finalize_export_hf": 0.6,
}

OF_THE_RUN = ("train", "export_hf", "finalize_export_hf")
RULE_ORDER = (
    "make_tiny_model",
    "download_hf_checkpoint",
    "download_dataset",
    "patch_hf_config",
    "convert_hf_to_torch_dist",
    "finalize_torch_dist",
    "quantize",
    "finalize_quantized",
    "stage_to_node_local",
    "evaluate",
    "train",
    "export_hf",
    "finalize_export_hf",
)


@dataclass(frozen=True)
class SyntheticRun:
    """Where the made-up run lies."""

    inputs: ReportInputs
    paths: Paths
    workflow: dict[str, str]


def workflow_of(root: Path, num_steps: int, more: str = "") -> dict[str, str]:
    """Return the workflow configuration of a run below `root`."""
    roots = f"site.store={root}/store site.results={root}/results site.node_local={root}/node_local"
    return {"model": "tiny", "site": "local", "set": f"training.num_steps={num_steps} {roots} {more}"}


def make_run(
    root: Path, num_steps: int = 80, seed: int = 0, reward: float | None = None, more: str = "", **choice: str
) -> SyntheticRun:
    """Write a finished run below `root`.

    Args:
        root: Empty folder; gets `store`, `results` and `logs`.
        num_steps: Steps of training.
        seed: Of all numbers.
        reward: Of every sample, also of both evaluations; None: the run learns.
        more: Further settings.
        choice: Of model, hardware and so on.
    """
    workflow = workflow_of(root, num_steps, more) | choice
    resolved = resolve(workflow, REPOSITORY / "config")
    paths, rng = Paths(resolved), random.Random(seed)
    write_text(paths.experiment, dump_yaml(resolved.experiment))
    write_text(paths.config, dump_resolved(resolved))
    digests = _write_store(paths, rng)
    _write_training(paths, rng, num_steps, digests, reward)
    _write_export(paths, rng, digests)
    _write_evaluations(paths, rng, digests, (0.264, 0.931) if reward is None else (reward, reward))
    logs = root / "logs"
    _write_benchmarks(paths, logs, rng)
    inputs = ReportInputs(
        config=paths.config,
        run_folder=paths.run,
        before=paths.evaluation("before"),
        after=paths.evaluation("after"),
        export_receipt=receipt_of(paths.hf_export),
        logs=logs,
    )
    return SyntheticRun(inputs, paths, workflow)


def _write_store(paths: Paths, rng: random.Random) -> dict[str, str]:
    made = _write_artefact(paths.made_model, "make_tiny_model", {}, rng)
    hf = _write_artefact(paths.hf, "finalize_hf_checkpoint", {"source": made}, rng)
    patched = _write_artefact(paths.hf_patched, "patch_hf_config", {"hf": hf}, rng)
    dataset = _write_artefact(paths.dataset, "download_dataset", {}, rng, ("train.jsonl", "heldout.jsonl"))
    finished = {}
    for folder, part_step, step in (
        (paths.torch_dist, "convert_hf_to_torch_dist", "finalize_torch_dist"),
        (paths.rollout_fp8, "quantize_rollout_fp8", "finalize_rollout_fp8"),
    ):
        for part in range(2):
            name = f"__{part}_0.bin"
            _write_files(folder, (name,), rng)
            receipt = Receipt(part_step, record_files(folder, [name]), {"hf_patched": patched}, {"part": part})
            write_receipt(part_receipt_of(folder, part), receipt)
        finished[folder.name] = _write_artefact(folder, step, {"hf_patched": patched}, rng, ("metadata.json",))
    for node in paths.resolved.config.site.node_names:
        _write_node_copy(paths, node)
    return {
        "hf": hf,
        "hf_patched": patched,
        "torch_dist": finished[paths.torch_dist.name],
        "dataset": dataset,
    }


def _write_node_copy(paths: Paths, node: str) -> None:
    copies = []
    for origin in (paths.torch_dist, paths.rollout_fp8):
        folder = paths.node_local(node) / origin.name
        shutil.copytree(origin, folder)
        receipt = read_receipt(receipt_of(origin))
        copies.append({"folder": str(folder), "receipt_digest": receipt.digest, "files": []})
    record = {"node": node, "folder": str(paths.node_local(node)), "boot_id": "0", "copies": copies}
    write_json(paths.node_record(node), record)


def _write_artefact(
    folder: Path,
    step: str,
    inputs: dict[str, str],
    rng: random.Random,
    names: tuple[str, ...] = ("config.json", "model.bin"),
) -> str:
    _write_files(folder, names, rng)
    receipt = Receipt(step, record_files(folder), inputs, {})
    write_receipt(receipt_of(folder), receipt)
    return receipt.digest


def _write_files(folder: Path, names: tuple[str, ...], rng: random.Random) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(rng.randbytes(rng.randrange(2_000, 60_000)))


def _write_training(
    paths: Paths, rng: random.Random, num_steps: int, digests: dict[str, str], reward: float | None
) -> None:
    config = paths.resolved.config
    rows = [_metric_row(step, num_steps, rng) for step in range(1, num_steps + 1)]
    if config.rollout.max_staleness:
        rows = [row | queue_row(row["step"], config.rollout.max_staleness, rng) for row in rows]
    if config.data.environment:
        rows = [row | episode_row(row["step"] / num_steps, rng) for row in rows]
    if reward is not None:
        rows = [row | _without_a_lesson(reward) for row in rows]
    write_text(paths.train / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    begin = 1_795_000_000.0
    attempts = [
        {
            "attempt": 1,
            "epoch": 1,
            "nodes": ["node0"],
            "started_unix": begin,
            "ended_unix": begin + 71.4,
            "reason": "trainer rank 0 was ended by SIGKILL",
        },
        {
            "attempt": 2,
            "epoch": 2,
            "nodes": ["node0"],
            "started_unix": begin + 75,
            "ended_unix": begin + 154.9,
            "reason": "done",
            "first_step_seconds": 8.5,
        },
    ]
    write_text(paths.train / "attempts.jsonl", "".join(json.dumps(row) + "\n" for row in attempts))
    for name in ("run-1.wandb", "files/config.yaml", "logs/debug.log"):
        write_text(paths.train / "wandb/offline-run-1" / name, f"W&B's own {name}")
    (paths.train / "wandb/latest-run").symlink_to("offline-run-1")
    for step in (num_steps - 1, num_steps):
        folder = paths.checkpoints / f"step_{step:06d}"
        _write_files(folder, ("common.pt", "__0_0.distcp"), rng)
        write_json(folder / "manifest.json", [dataclasses.asdict(record) for record in record_files(folder)])
    final = f"checkpoints/step_{num_steps:06d}"
    files = record_files(paths.train, [f"{final}/{name}" for name in ("common.pt", "__0_0.distcp", "manifest.json")])
    settings = {"experiment": paths.experiment.read_text(), "num_steps": num_steps, "final_checkpoint": final}
    inputs = {"torch_dist": digests["torch_dist"], "dataset": digests["dataset"]}
    write_json(paths.begun_from, inputs)
    trained = Receipt("train_grpo", files, inputs, settings)
    write_receipt(records_of(paths.run), Receipt("train_grpo", record_run(paths.run), {"train": trained.digest}, {}))
    write_receipt(paths.train_done, trained)


def _without_a_lesson(reward: float) -> dict[str, float]:
    """Return the metrics of a step in which every sample has the same reward: no advantage, no gradient, no drift."""
    return {
        "rollout/reward_mean": reward,
        "rollout/pass_rate": reward,
        "rollout/reward_std_zero_fraction": 1.0,
        "train/loss": 0.0,
        "train/grad_norm": 0.0,
        "train/importance_ratio_mean": 1.0,
        "train/clip_fraction": 0.0,
        "train/approx_kl": 0.0,
    }


def _metric_row(step: int, num_steps: int, rng: random.Random) -> dict[str, Any]:
    progress = step / num_steps
    reward = 0.24 + 0.7 / (1 + math.exp(-9 * (progress - 0.42))) + rng.gauss(0, 0.028)
    reward = min(1.0, max(0.0, reward))
    seconds = {
        "perf/rollout_seconds": 0.62 + abs(rng.gauss(0, 0.06)),
        "perf/old_logprobs_seconds": 0.21 + abs(rng.gauss(0, 0.02)),
        "perf/train_seconds": 0.66 + abs(rng.gauss(0, 0.05)),
        "perf/weight_sync_seconds": 0.08 + abs(rng.gauss(0, 0.01)),
        "perf/mismatch_seconds": 0.18 + abs(rng.gauss(0, 0.02)),
    }
    if step % 20 == 1 and step > 1:
        seconds["perf/save_seconds"] = 0.4
    num_tokens = 256 * 37 + rng.randrange(-120, 120)
    total = math.fsum(seconds.values()) + 0.05
    return {
        "step": step,
        "rollout/reward_mean": reward,
        "rollout/pass_rate": reward,
        "rollout/reward_std_zero_fraction": min(
            1.0, max(0.0, 0.05 + 0.8 * (reward - 0.5) ** 2 * 3 + rng.gauss(0, 0.04))
        ),
        "rollout/response_tokens_mean": 5.0 + rng.gauss(0, 0.05),
        "rollout/response_tokens_max": 8 if rng.random() < 0.6 else 6,
        "rollout/truncated_fraction": max(0.0, 0.05 * (1 - progress) + rng.gauss(0, 0.006)),
        "rollout/grader_failures": 0,
        "rollout/ungraded_samples": 0,
        "train/loss": rng.gauss(-0.002, 0.004),
        "train/grad_norm": 0.25 + 0.5 * math.exp(-3 * progress) + abs(rng.gauss(0, 0.06)),
        "train/lr": 2e-4,
        "train/importance_ratio_mean": 1.0 + rng.gauss(0, 1e-4),
        "train/first_update_ratio_max_abs_deviation": 0.0,
        "train/clip_fraction": max(0.0, 0.004 + rng.gauss(0, 0.002)),
        "train/importance_ratio_square_mean": 1.0 + abs(rng.gauss(0, 1e-3)),
        "train/effective_sample_size": 1.0 - abs(rng.gauss(0, 1e-3)),
        "train/entropy": 0.9 * math.exp(-3 * progress) + abs(rng.gauss(0, 0.01)),
        **{f"train/{name}": 0.05 for name in RATIO_HISTOGRAM.values()},
        "train/approx_kl": abs(rng.gauss(0.0004, 0.0002)),
        "train/num_tokens": num_tokens,
        "train/num_response_tokens": 256 * 5,
        "train/num_micro_batches": 5,
        "train/padding_fraction": 0.013 + abs(rng.gauss(0, 0.002)),
        "train/non_finite_steps": 0,
        "mismatch/abs_diff_mean": 3e-7 * math.exp(rng.gauss(0, 0.1)),
        "mismatch/abs_diff_max": 6e-6 * math.exp(rng.gauss(0, 0.3)),
        "mismatch/quantised_abs_diff_mean": 0.011 * math.exp(rng.gauss(0, 0.1)),
        "mismatch/kl_k3": 3e-3 * math.exp(rng.gauss(0, 0.4)),
        "mismatch/effective_sample_size": 1.0 - 1e-2 * rng.random(),
        "mismatch/share_of_limit": 0.11,
        "perf/step_seconds": total,
        **seconds,
        "perf/tokens_per_second": num_tokens / total,
        "perf/response_tokens_per_second": 256 * 5 / total,
    }


def _write_export(paths: Paths, rng: random.Random, digests: dict[str, str]) -> None:
    _write_files(paths.hf_export, ("config.json", "model-00001-of-00001.safetensors"), rng)
    settings = {"final_weights_sha256": f"{rng.getrandbits(256):064x}"}
    inputs = {"hf_patched": digests["hf_patched"], "train": read_receipt(paths.train_done).digest}
    write_receipt(
        receipt_of(paths.hf_export), Receipt("finalize_export_hf", record_files(paths.hf_export), inputs, settings)
    )


def _write_evaluations(paths: Paths, rng: random.Random, digests: dict[str, str], rates: tuple[float, float]) -> None:
    exported = read_receipt(receipt_of(paths.hf_export)).digest
    checkpoints = {"before": digests["hf_patched"], "after": exported}
    prompts = ["".join(rng.choices("0123456789", k=4)) for _ in range(24)]
    for when, rate in zip(("before", "after"), rates, strict=True):
        examples = [_example(digits, rng.random() < rate, rng) for digits in prompts]
        result = {
            "pass_rate": rate,
            "pass_at_k": min(1.0, rate * 1.3),
            "num_prompts": 512,
            "num_samples": 4,
            "response_tokens_mean": 5.01,
            "truncated_fraction": 0.01,
            "examples": examples,
            "inputs": {"checkpoint": checkpoints[when], "dataset": digests["dataset"]},
        }
        if paths.resolved.config.data.environment:
            result["episodes"] = episode_summary(rate, rng)
        write_json(paths.evaluation(when), result)
        files = record_files(paths.evaluation(when).parent, [paths.evaluation(when).name])
        write_receipt(receipt_of(paths.evaluation(when)), Receipt("evaluate", files, result["inputs"], {"when": when}))


def _example(digits: str, passes: bool, rng: random.Random) -> dict[str, Any]:
    label = "".join(sorted(digits))
    wrong = "".join(rng.sample(digits, len(digits)))
    response = label if passes else wrong if wrong != label else label[::-1] + "?"
    prompt = f"system: sort the digits.\nuser: {digits}"
    return {"prompt": prompt, "response": response, "label": label, "reward": 1.0 if passes else 0.0}


def _write_benchmarks(paths: Paths, logs: Path, rng: random.Random) -> None:
    config = paths.resolved.config
    store, run = f"{config.model.name}-{paths.revision12}", paths.resolved.run
    jobs = {(rule, store if rule not in OF_THE_RUN else run): s for rule, s in RULE_SECONDS.items()}
    for part in range(config.convert.num_parts):
        jobs["convert_hf_to_torch_dist", f"{store}.{part}"] = 1.6 + 0.1 * part
        jobs["quantize", f"{store}.{part}"] = 1.2 + 0.1 * part
    for node in config.site.node_names:
        jobs["stage_to_node_local", f"{run}.{node}"] = 0.4
    for when in ("before", "after"):
        jobs["evaluate", f"{run}.{when}"] = 11.5
    finished = 1_795_000_000.0
    for (rule, job), seconds in sorted(jobs.items(), key=lambda item: RULE_ORDER.index(item[0][0])):
        header = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time\n"
        row = f"{seconds}\t0:00:01\t{rng.uniform(90, 900):.2f}\t0\t0\t0\t0\t0\t95.0\t{seconds}\n"
        path = logs / rule / f"{job}.benchmark.tsv"
        write_text(path, header + row)
        # One job after the other, with a pause of a second.
        finished += seconds + 1.0
        os.utime(path, (finished, finished))


def remake_receipt(folder: Path, **changes: Any) -> None:
    """Replace fields of a folder's receipt by others, with a digest that fits: a step that ran again."""
    write_receipt(receipt_of(folder), dataclasses.replace(read_receipt(receipt_of(folder)), **changes))
