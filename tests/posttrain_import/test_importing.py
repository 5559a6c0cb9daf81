"""What flags mean in our keys, and what they mean when they are not given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain_import.importing import Imported, import_flags, text_of
from posttrain_import.script import Given, Script, Word, flags_of

CONFIG_DIR = Path(__file__).parents[2] / "config"
# What leaves the recipe of a dense model as it is.
PLAIN = (
    "--eps-clip 0.2 --eps-clip-high 0.28 --weight-decay 0.1 --adam-beta2 0.98 --lr-decay-style constant "
    "--n-samples-per-prompt 8 --tensor-model-parallel-size 2 --recompute-granularity full --attention-dropout 0 "
    "--hf-checkpoint /x/Qwen3-4B-FP8 --rollout-batch-size 8 --global-batch-size 64 "
)


def script_of(text: str) -> Script:
    return flags_of(Word(word, "run.sh:1", "not known" if word == "?" else "") for word in text.split())


def imported(text: str, model: str = "qwen3_4b", **names: Any) -> Imported:
    return import_flags(script_of(text), {"model": model, **names}, CONFIG_DIR)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("--lr 2e-6", {"optimizer.lr": 2e-6}),
        ("--lr 1e-6", {}),
        ("--advantage-estimator cispo", {"algorithm.preset": "cispo"}),
        ("--eps-clip-c 3", {"algorithm.clip": "dual"}),
        ("--use-tis", {"algorithm.correction": "truncate"}),
        ("--calculate-per-token-loss", {"algorithm.loss_aggregation": "token_mean"}),
        ("--disable-grpo-std-normalization", {"algorithm.normalize_by_std": False}),
        ("--use-rollout-logprobs", {"algorithm.old_logprobs": "engine"}),
        ("--lr-decay-style WSD --min-lr 1e-7", {"optimizer.lr_schedule": "wsd", "optimizer.lr_floor": 0.1}),
        ("--min-lr 1e-7", {}),
        ("--rollout-batch-size 32 --lr-warmup-iters 40",
         {"rollout.rollout_batch_size": 32, "optimizer.lr_warmup_steps": 10}),
        ("--num-steps-per-rollout 2", {"training.global_batch_size": 32}),
        ("--rollout-max-prompt-len 512", {"rollout.max_prompt_tokens": 512, "rollout.overlong_prompts": "drop"}),
        ("--rm-type gpqa", {"data.reward": "choice"}),
        ("--update-weight-buffer-size 536870912", {"engine.weight_bucket_mib": 512}),
        ("--wandb-mode disabled", {"logging.wandb": False}),
        ("--optimizer-cpu-offload", {"trainer.optimizer_cpu_offload": True}),
        ("--hf-checkpoint /x/Qwen3-4B", {"rollout.fp8": False}),
        ("--rollout-num-gpus-per-engine 4", {"engine.gpus_per_engine": 4, "engine.num_engines": 2}),
        ("--sglang-watchdog-timeout 60", {"hardware.kernels.watchdog_seconds": 60}),
        ("--sglang-watchdog-timeout 3600", {}),
        ("--sglang-chunked-prefill-size 2048", {}),
        ("--sglang-enable-deterministic-inference", {"engine.deterministic": True}),
        ("--eval-temperature 0.6", {"evaluation.temperature": 0.6}),
        ('--apply-chat-template-kwargs {"enable_thinking":false}',
         {"data.chat_template_kwargs": ["enable_thinking=false"]}),
    ],
)  # fmt: skip
def test_values_in_our_keys(text: str, values: dict[str, Any]) -> None:
    found = imported(PLAIN + text)
    assert found.problems == ()
    written = dict(found.values)
    # The parts and numbers of a preset stand beside it where the script's other flags say otherwise.
    for key in ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"):
        assert written.pop(key, None) is None or "preset" in str(values)
    if "num_engines" not in str(values):
        assert (written.pop("engine.gpus_per_engine", 1), written.pop("engine.num_engines", 8)) == (1, 8)
    assert written == values
    assert found.missed == []


def test_a_flag_that_is_not_given_means_something_too() -> None:
    found = imported("--hf-checkpoint /x/Qwen3-4B-FP8 --eps-clip 0.1 --n-samples-per-prompt 8")
    assert found.problems == ()
    assert found.values == {
        "algorithm.clip_ratio_low": 0.1,
        "algorithm.clip_ratio_high": 0.1,
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.01,
        "optimizer.lr_schedule": "linear",
        "parallel.tensor_model_parallel_size": 1,
        "trainer.recompute_granularity": "none",
    }
    assert found.sources["optimizer.beta2"] == ["--adam-beta2 0.999, as without the flag"]
    assert ("--colocate", "not given") in [(told.flag, told.value) for told in found.otherwise]


@pytest.mark.parametrize(
    ("text", "flag", "about"),
    [
        ("--lr ?", "--lr", "not known; stays optimizer.lr=1e-06"),
        ("--lr many", "--lr", "not a value of optimizer.lr; stays optimizer.lr=1e-06"),
        ("--lr 7", "--lr", "optimizer.lr has to be more than 0 and at most 1"),
        ("--adam-beta3 1", "--adam-beta3", "did you mean '--adam-beta"),
        ("--advantage-estimator ppo", "--advantage-estimator", "known here: grpo, gspo, cispo"),
        ("--kl-loss-coef 0.001", "--kl-loss-coef", "only 0 can be left out"),
        ("--rollout-top-p 0.9", "--rollout-top-p", "only 1 can be left out"),
        ("--partial-rollout", "--partial-rollout", "rollouts are synchronous"),
        ("--loss-type sft_loss", "--loss-type", "known here: policy_loss; stays training.objective=rl"),
        ("--use-tis --tis-level geometric", "--use-tis", "--tis-level changes what it means"),
        ("--use-tis --tis-level sequence", "--use-tis", "--tis-level changes what it means"),
        ("--use-tis --tis-mode clip", "--use-tis", "--tis-mode changes what it means"),
        ("--use-tis --tis-clip-low 0.5", "--use-tis", "a lower bound of the factor other than 0"),
        ("--use-tis --custom-tis-function-path a.b", "--use-tis", "--custom-tis-function-path changes what it means"),
        ("--use-kl-loss --kl-loss-coef 0.1", "--use-kl-loss", "there is no reference model here"),
        ("--position-embedding-type learned_absolute", "--position-embedding-type", "only rope can be left out"),
        ("--hf-checkpoint /x/Qwen3-4B-INT4", "--hf-checkpoint", "serve BF16 or FP8 here, not INT4"),
        ("--hf-checkpoint /x/Qwen3-4B-NVFP4/", "--hf-checkpoint", "not NVFP4"),
        ("--hf-checkpoint /x/Qwen3-4B-AWQ", "--hf-checkpoint", "not AWQ"),
        ("--hf-checkpoint /x/Qwen3-4B-w4a16", "--hf-checkpoint", "not W4A16"),
        ("--optimizer sgd", "--optimizer", "optimizer is adam here"),
        ("--sglang-kv-cache-dtype fp8_e4m3", "--sglang-kv-cache-dtype", "--kv-cache-dtype is"),
        ("--calculate-per-token-loss maybe", "--calculate-per-token-loss", "a switch that has a value"),
        ("--custom-rm-path a.b", "--custom-rm-path", "path.py:function"),
        ("--num-layers 40", "--num-layers", "num_hidden_layers is 36 here"),
        ("--sequence-parallel --tensor-model-parallel-size 1", "--sequence-parallel", "parallel is False here"),
        ("--attention-dropout 0.1", "--attention-dropout", "attention_dropout is 0.0 here"),
        ("--prompt-data a.jsonl@[0:10]", "--prompt-data", "one file without a slice"),
        ("--eval-prompt-data a x b y", "--eval-prompt-data", "one name and one file"),
        ("--num-steps-per-rollout 3", "--num-steps-per-rollout", "64 samples are not cut into 3 equal parts"),
        ("--rollout-num-gpus-per-engine 64", "--rollout-num-gpus-per-engine", "8 GPUs have no room"),
        ("--eps-clip-high ?", "--eps-clip", "it depends on --eps-clip-high"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_over_is_told_with_the_reason(text: str, flag: str, about: str) -> None:
    told = {item.flag: item.about for item in imported(PLAIN + text).missed}
    assert about in told[flag]


REJECTED = "--tensor-model-parallel-size 3 "


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("--sglang-kv-cache-dtype fp8_e4m3", "--kv-cache-dtype is"),
        ("--optimizer sgd", "optimizer is adam here"),
        ("--hidden-dropout 0.1", "hidden_dropout is 0.0 here"),
        ("--sequence-parallel", "not checked, because the configuration is rejected"),
        ("--swiglu", "not checked, because the configuration is rejected"),
    ],
)
def test_nothing_is_called_our_default_that_was_not_checked(text: str, about: str) -> None:
    found = imported(PLAIN.replace("--tensor-model-parallel-size 2 ", REJECTED) + text)
    assert found.problems
    name = text.split()[0]
    assert name not in [told.flag for told in (*found.same, *found.taken)]
    assert any(about in told.about for told in found.missed if told.flag == name)


def test_warmup_counts_the_updates_that_the_script_asks_for() -> None:
    text = PLAIN.replace("--global-batch-size 64 ", "") + "--num-steps-per-rollout 4 --lr-warmup-iters 40"
    assert imported(text).values["optimizer.lr_warmup_steps"] == 10


def test_layouts_and_engines_of_the_recipe_are_found_again() -> None:
    """Of what the recipe of 16 nodes says in their flags only what ours does otherwise is written."""
    text = (
        "--hf-checkpoint GLM-5_fp8 --actor-num-nodes 16 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 4 "
        "--decoder-last-pipeline-num-layers 18 --context-parallel-size 2 --expert-model-parallel-size 32 "
        "--max-tokens-per-gpu 16384 "
        "--recompute-granularity full --prefill-num-servers 1 --rollout-num-gpus-per-engine 64 "
        "--sglang-enable-dp-attention --sglang-dp-size 64 --sglang-ep-size 64 --sglang-cuda-graph-max-bs 8 "
        "--sglang-moe-a2a-backend deepep --moe-token-dispatcher-type flex --sglang-attention-backend nsa "
        "--eps-clip 0.2 --eps-clip-high 0.28 --weight-decay 0.1 --adam-beta2 0.98 --lr-decay-style constant "
        "--n-samples-per-prompt 8 --attention-dropout 0 --moe-layer-freq [0]*3+[1]*75"
    )
    found = imported(text, model="glm5")
    # With this cut of rows the planner computes all layers again, as they do.
    assert found.values == {"parallel.context_parallel_size": 2, "trainer.max_tokens_per_gpu": 16384}
    assert found.missed == []


def test_flags_that_may_stand_in_an_unknown_list_are_not_taken_for_left_out() -> None:
    """bash expands what is not set to nothing; what a script sources, or a launcher computes, may be anything."""
    known = script_of("--hf-checkpoint /x/Qwen3-4B-FP8")
    for unread, is_whole in (
        ([("${PERF_ARGS[@]}", "the script does not set PERF_ARGS")], True),
        ([("${PERF_ARGS[@]}", "the script does not set PERF_ARGS"), ("source perf.sh", "not there")], False),
        ([("${MODEL_ARGS[@]}", "the script does not set MODEL_ARGS"), ("source model.sh", "not there")], True),
        ([("{perf_args(args)}", "it is computed when the launcher runs")], False),
        ([("{tools.wandb_args(args)}", "it is computed when the launcher runs")], True),
    ):
        script = Script(known.flags, tuple(Given(name, (), "run.sh:1", why) for name, why in unread))
        found = import_flags(script, {"model": "qwen3_4b"}, CONFIG_DIR)
        assert (found.values != {}) is is_whole
        assert any("they stay as our defaults" in told.about for told in found.missed) is not is_whole


def test_the_user_is_asked_before_the_script() -> None:
    found = imported(PLAIN + "--actor-num-nodes 1", nodes=2, hardware="h200")
    assert (found.names["nodes"], found.names["hardware"]) == (2, "h200")
    assert imported(PLAIN + "--actor-num-nodes 2").names["nodes"] == 2


def test_a_row_says_what_is_given_where_and_what_it_means() -> None:
    """Of a flag whose value does not matter, of one that sets a key by being left out, and of each only once."""
    found = imported(PLAIN + "--colocate ?", model="glm5")
    told = {row.flag: row for row in [*found.taken, *found.otherwise]}
    assert len(told) == len(found.taken) + len(found.otherwise)
    assert (told["--colocate"].value, told["--colocate"].place) == ("?", "run.sh:1")
    absent = told["--sglang-enable-dp-attention"]
    assert (absent.value, absent.place, absent.about) == ("not given: false", "", "engine.dp_attention=False")
    assert "--eps-clip" not in told, "it is given"


def test_a_key_for_wandb_is_not_shown() -> None:
    assert text_of(Given("--wandb-key", ("abcdef",), "")) == "(not shown)"
