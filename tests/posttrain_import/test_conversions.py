"""What values of slime's and miles' flags become in our keys, one conversion at a time."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain_import import conversions as to
from posttrain_import.row import Convert, NotHere

ENGINE, PD = "engine.", "engine.pd."


def given(text: str) -> dict[str, tuple[str, ...]]:
    """Return flags as a script gives them: each with the words behind it."""
    values: dict[str, tuple[str, ...]] = {}
    for word in text.split():
        if word.startswith("--"):
            values[name := word] = ()
        else:
            values[name] += (word,)
    return values


def converted(convert: Convert, text: str) -> Any:
    """Return what a conversion makes of the first flag, beside the others; the reason where it makes nothing."""
    values = given(text)
    try:
        return convert(next(iter(values.values()), ()), values)
    except NotHere as error:
        return str(error)


@pytest.mark.parametrize(
    ("convert", "text", "expected"),
    [
        (to.clip, "--eps-clip 0.1 --eps-clip-high 0.3", (0.1, 0.3)),
        (to.clip, "--eps-clip 0.1", (0.1, 0.1)),
        (to.clip, "--other", (0.2, 0.2)),
        (to.dual_clip, "--eps-clip-c 3", ("dual", 3)),
        (to.truncation, "--use-tis", ("truncate", "token", 2.0)),
        (to.truncation, "--use-tis --tis-clip 5 --tis-clip-low 0", ("truncate", "token", 5)),
        (to.truncation, "--use-tis --tis-level token --tis-mode truncate", ("truncate", "token", 2.0)),
        (to.no_reference, "--use-kl-loss", ()),
        (to.no_reference, "--use-kl-loss --kl-loss-coef 0.0", ()),
        # 8 GPUs of one node unless told.
        (to.engines, "--rollout-num-gpus-per-engine 2", (2, 4)),
        (to.engines, "--x", (1, 8)),
        (to.engines, "--rollout-num-gpus-per-engine 8", (8, 1)),
        (to.engines, "--rollout-num-gpus-per-engine 3 --actor-num-gpus-per-node 4 --actor-num-nodes 4", (3, 5)),
        (to.engines, "--rollout-num-gpus-per-engine 2 --prefill-num-servers 3", (2, 1)),
        (to.prefill_engines, "--prefill-num-servers 0", (0,)),
        (to.prefill_engines, "--prefill-num-servers 2", (2, 1)),
        (to.prefill_engines, "--prefill-num-servers 1 --rollout-num-gpus-per-engine 4", (1, 4)),
        (to.running_requests, "--sglang-max-running-requests 64", (64,)),
        (to.running_requests, "--sglang-max-running-requests 64 --prefill-num-servers 0", (64,)),
        (to.running_requests, "--sglang-max-running-requests 64 --prefill-num-servers 1", (64, 64)),
        (to.updates_per_rollout, "--num-steps-per-rollout 4 --rollout-batch-size 6 --n-samples-per-prompt 2", (3,)),
        (to.updates_per_rollout, "--num-steps-per-rollout 2 --rollout-batch-size 6", (3,)),
        # 6 x 4 samples in batches of 8 are three updates of each rollout.
        (to.warmup, "--lr-warmup-iters 9 --rollout-batch-size 6 --n-samples-per-prompt 4 --global-batch-size 8", (3,)),
        (to.warmup, "--lr-warmup-iters 9 --rollout-batch-size 6 --n-samples-per-prompt 4", (9,)),
        (to.warmup, "--lr-warmup-iters 9 --rollout-batch-size 6 --global-batch-size 2", (3,)),
        (to.lr_floor, "--min-lr 1e-7", (0.1,)),
        (to.lr_floor, "--min-lr 1e-7 --lr 4e-7", (0.25,)),
        (to.lr_floor, "--min-lr 1e-7 --lr-decay-style constant", ()),
        (to.head_width, "--kv-channels 192", (192,)),
        (to.head_width, "--kv-channels 192 --multi-latent-attention", ()),
        (to.head_width, "--kv-channels 192 --kv-lora-rank 512", ()),
        (to.balancing, "--moe-router-load-balancing-type seq_aux_loss", ()),
        (to.balancing, "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1", ()),
        (to.megabytes, "--update-weight-buffer-size 2097152", (2,)),
        (to.prompts, "--prompt-data a.jsonl", ("files", "a.jsonl", "")),
        (to.heldout, "--eval-prompt-data math b.jsonl", ("b.jsonl",)),
        (to.longest_prompt, "--rollout-max-prompt-len 512", (512, "drop")),
        (to.template_variables, '--kwargs {"a":false,"b":"c"}', (["a=false", "b=c"],)),
        (to.objective, "--loss-type policy_loss", ("rl",)),
        (to.wandb_mode, "--wandb-mode disabled", (False,)),
        (to.wandb_mode, "--wandb-mode offline", ("offline",)),
        (to.follows, "--x 1", ()),
    ],
)
def test_values_in_our_keys(convert: Convert, text: str, expected: tuple[Any, ...]) -> None:
    assert tuple(converted(convert, text).values()) == expected


@pytest.mark.parametrize(
    ("convert", "text", "reason"),
    [
        (to.clip, "--eps-clip a", "it depends on --eps-clip, which is not a known number"),
        (to.clip, "--eps-clip 1 2", "it depends on --eps-clip"),
        (to.clip, "--eps-clip", "it depends on --eps-clip"),
        (to.clip, "--eps-clip [1]", "it depends on --eps-clip"),
        (to.dual_clip, "--x", "it depends on --eps-clip-c"),
        (to.no_reference, "--use-kl-loss --kl-loss-coef 0.5", "no reference model"),
        (to.truncation, "--use-tis --tis-clip-low 0.1", "a lower bound of the factor other than 0"),
        (to.truncation, "--use-tis --tis-level sequence", "--tis-level changes what it means"),
        (to.engines, "--rollout-num-gpus-per-engine 9", "8 GPUs have no room for engines of 9"),
        (to.engines, "--rollout-num-gpus-per-engine 0", "8 GPUs have no room for engines of 0"),
        (to.engines, "--rollout-num-gpus-per-engine 4 --prefill-num-servers 2", "8 GPUs have no room for engines of 4"),
        (to.updates_per_rollout, "--num-steps-per-rollout 5 --rollout-batch-size 6", "6 samples are not cut into 5"),
        (to.warmup, "--lr-warmup-iters 7 --rollout-batch-size 6 --global-batch-size 2", "no whole number of rollouts"),
        (to.balancing, "--type seq_aux_loss --moe-aux-loss-coeff 0.1", "with a coefficient it is aux_loss here"),
        (to.megabytes, "--update-weight-buffer-size 2097153", "not a whole number of MiB"),
        (to.prompts, "--prompt-data", "one file without a slice of it"),
        (to.prompts, "--prompt-data a b", "one file without a slice of it"),
        (to.prompts, "--prompt-data a@[1]", "one file without a slice of it"),
        (to.heldout, "--eval-prompt-data b", "one name and one file"),
        (to.heldout, "--eval-prompt-data math b@[1]", "one name and one file"),
        (to.template_variables, "--kwargs [1]", "not a JSON object"),
        (to.template_variables, "--kwargs {", "not a JSON object"),
        (to.template_variables, "--kwargs", "not a JSON object"),
        (to.objective, "--loss-type sft_loss", "known here: policy_loss"),
        (to.estimator, "--advantage-estimator grpo gspo", "known here: grpo, gspo"),
        (to.estimator, "--advantage-estimator", "known here: grpo, gspo"),
        (to.always(a__b=1), "--switch true true", "a switch that has a value"),
        (to.always(a__b=1), "--switch 2", "a switch that has a value"),
        (to.checkpoint, "--hf-checkpoint /x/Model-4bit", "not 4BIT"),
    ],
)
def test_what_has_no_equal_here_is_told(convert: Convert, text: str, reason: str) -> None:
    assert reason in converted(convert, text)


def test_words_and_switches_become_values() -> None:
    assert converted(to.reward, "--rm-type gpqa") == {"data.reward": "choice"}
    assert converted(to.dispatcher, "--moe-token-dispatcher-type alltoall") == {"trainer.deepep": False}
    assert converted(to.dispatcher, "--moe-token-dispatcher-type flex") == {"trainer.deepep": True}
    assert converted(to.all_to_all, "--sglang-moe-a2a-backend none") == {"engine.deepep": False}
    assert converted(to.all_to_all, "--sglang-moe-a2a-backend deepep") == {"engine.deepep": True}
    switch = to.always(a__b=7)
    assert [converted(switch, f"--switch {word}") for word in ("", "true", "1", "True")] == [{"a.b": 7}] * 4
    assert [converted(switch, f"--switch {word}") for word in ("false", "0")] == [{}, {}]


@pytest.mark.parametrize(
    ("folder", "is_fp8"),
    [("/x/Qwen3-4B", False), ("/x/Qwen3-4B-FP8/", True), ("/fp8/Qwen3-4B", False), ("", False), ("GLM-5_fp8", True)],
)
def test_the_folders_name_tells_the_precision(folder: str, is_fp8: bool) -> None:
    text = f"--hf-checkpoint {folder}"
    assert converted(to.checkpoint, text) == {"rollout.fp8": is_fp8}
    runner = "fp8" if is_fp8 else "bf16"
    values = given(text)
    assert to.moe_runner(("triton",), values) == {f"hardware.kernels.moe_runner_{runner}": "triton"}
