"""Format versions of the steps' outputs."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.config.schema import Architecture

# Rules that had another name in version 0.2. Receipts and JobSets keep the old name, so that runs of 0.2 resume;
# `scripts/` has the old program for JobSets of 0.2.
CURRENT_RULES: Mapping[str, str] = {"train_grpo": "train"}
# Increased when a step writes a different output for the same input, so that its receipts are remade.
FORMAT_VERSIONS: Mapping[str, int] = {
    "make_tiny_model": 1,
    "download_hf_checkpoint": 1,
    "finalize_hf_checkpoint": 1,
    "approve_data": 1,
    "approve_environment": 1,
    "download_dataset": 3,
    "download_suite": 2,
    "download_pass": 2,
    "calibrate": 1,
    "patch_hf_config": 1,
    "convert_hf_to_torch_dist": 1,
    "finalize_torch_dist": 2,
    "adopt_torch_dist": 1,
    "quantize_rollout_fp8": 2,
    "finalize_rollout_fp8": 2,
    "quantize_rollout_start": 1,
    "finalize_rollout_start": 1,
    "quantize_export_fp8": 1,
    "finalize_export_fp8": 1,
    "quantize_serving": 1,
    "finalize_serving": 1,
    "quantize_export_serving": 1,
    "finalize_export_serving": 1,
    "cast_to_bf16": 1,
    "finalize_bf16": 1,
    "stage_to_node_local": 1,
    "fork_checkpoint": 1,
    "train_grpo": 1,
    "export_hf": 3,
    "finalize_export_hf": 1,
    "check_export": 1,
    "evaluate": 1,
    "ask_precision": 1,
    "lm_eval": 1,
    "render_report": 1,
}


def patch_version(architecture: Architecture) -> int:
    """Return the version of a patched copy; copies with a vision tower have had one more, which added keys."""
    return FORMAT_VERSIONS["patch_hf_config"] + (architecture.vision.depth > 0)
