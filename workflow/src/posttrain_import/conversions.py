"""Conversions of slime's and miles' flags to our keys, for values that differ.

Defaults are those of slime's and miles' `arguments.py` and of Megatron-LM's parser (docs/coming-from.md has the
commits).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from posttrain_import.expression import literal
from posttrain_import.row import Convert, NotHere, Values

MIB = 2**20
_REWARDS = {"deepscaler": "math_deepscaler", "dapo": "math_dapo", "math": "math", "f1": "f1", "gpqa": "choice"}
# Their estimators that are presets in config/algorithms.yaml.
_PRESETS = {name: name for name in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")}
_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
# Parts of a folder's name for weights that are neither BF16 nor FP8.
_OTHER_FORMATS = re.compile(
    r"[-_.]((?:nv|mx)?fp4|mxfp[68]|w\d+a\d+\w*|int[48]|[48]-?bits?|awq|gptq|gguf|bnb)(?![a-z0-9])"
)
_ON = {"true": True, "1": True, "false": False, "0": False}


def number(values: Values, name: str, default: float | None = None) -> float:
    """Return a flag's number, or the default.

    Raises:
        NotHere: The flag has no known number, and there is no default.
    """
    given = values.get(name, ())
    found = literal(given[0]) if len(given) == 1 else None
    if isinstance(found, (int, float)):
        return found
    if name in values or default is None:
        raise NotHere(f"it depends on {name}, which is not a known number")
    return default


def choice(key: str, names: Mapping[str, Any]) -> Convert:
    """Return a conversion of their words to values of one key."""

    def convert(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
        if len(given) != 1 or given[0] not in names:
            raise NotHere(f"known here: {', '.join(names)}")
        return {key: names[given[0]]}

    return convert


def always(**settings: Any) -> Convert:
    """Return a conversion of a switch to values of keys; `__` in a name stands for a dot."""
    named = {name.replace("__", "."): value for name, value in settings.items()}

    def convert(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
        if given and (len(given) > 1 or given[0].lower() not in _ON):
            raise NotHere("a switch that has a value")
        return {} if given and not _ON[given[0].lower()] else named

    return convert


def follows(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set nothing: the keys follow from other flags."""
    return {}


def clip(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set both bounds of the ratio; their upper bound defaults to the lower one."""
    low = number(values, "--eps-clip", 0.2)
    return {"algorithm.clip_ratio_low": low, "algorithm.clip_ratio_high": number(values, "--eps-clip-high", low)}


def no_reference(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Accept the flag only if the KL coefficient is 0."""
    if number(values, "--kl-loss-coef", 0):
        raise NotHere("there is no reference model here")
    return {}


def dual_clip(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set the third bound, for negative advantages."""
    return {"algorithm.clip": "dual", "algorithm.clip_ratio_dual": number(values, "--eps-clip-c")}


def truncation(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set truncated importance sampling between trainer and engine."""
    ours = {"--tis-level": "token", "--tis-mode": "truncate"}
    for name in sorted(name for name in values if name.startswith(("--tis-", "--custom-tis-"))):
        if name not in _TRUNCATION and values[name] != (ours.get(name),):
            raise NotHere(f"{name} changes what it means; only each token's factor is truncated here")
    if number(values, "--tis-clip-low", 0):
        raise NotHere("a lower bound of the factor other than 0")
    return {
        "algorithm.correction": "truncate",
        "algorithm.correction_level": "token",
        "algorithm.correction_high": number(values, "--tis-clip", 2.0),
    }


_TRUNCATION = ("--tis-clip", "--tis-clip-low")


def engines(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set the engines, which share all GPUs of the trainer; prefill engines are counted separately."""
    size = int(number(values, "--rollout-num-gpus-per-engine", 1))
    gpus = number(values, "--actor-num-nodes", 1) * number(values, "--actor-num-gpus-per-node", 8)
    prefill = int(number(values, "--prefill-num-servers", 0))
    count = int(gpus) // size - prefill if size > 0 else 0
    if count < 1:
        raise NotHere(f"{int(gpus)} GPUs have no room for engines of {size}")
    return {"engine.gpus_per_engine": size, "engine.num_engines": count}


def prefill_engines(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set prefill engines, which are as large as the others."""
    count = int(number(values, "--prefill-num-servers"))
    if not count:
        return {"engine.pd.num_prefill_engines": 0}
    size = int(number(values, "--rollout-num-gpus-per-engine", 1))
    return {"engine.pd.num_prefill_engines": count, "engine.pd.gpus_per_prefill_engine": size}


def running_requests(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set the same limit for both kinds of engine."""
    most = int(number(values, "--sglang-max-running-requests"))
    prefill = {"engine.pd.max_running_requests": most} if values.get("--prefill-num-servers", ("0",)) != ("0",) else {}
    return {"engine.max_running_requests": most, **prefill}


def moe_runner(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set one of our two keys, depending on the weights' precision."""
    kind = "fp8" if serves_fp8(values) else "bf16"
    return {f"hardware.kernels.moe_runner_{kind}": given[0]}


def serves_fp8(values: Values) -> bool:
    """Return whether the name of the engines' folder contains FP8.

    Raises:
        NotHere: The name contains another quantisation format.
    """
    name = "".join(values.get("--hf-checkpoint", ())[:1]).rstrip("/").rpartition("/")[2].lower()
    if match := _OTHER_FORMATS.search(name):
        raise NotHere(f"engines of a training serve BF16 or FP8 here, not {match[1].upper()}")
    return "fp8" in name


def checkpoint(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set FP8 rollouts: their engines serve a quantised folder, ours quantise the weights."""
    return {"rollout.fp8": serves_fp8(values)}


def updates_per_rollout(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set the batch size: a rollout's samples, divided by the number of updates."""
    samples = number(values, "--rollout-batch-size") * number(values, "--n-samples-per-prompt", 1)
    updates = number(values, "--num-steps-per-rollout")
    if samples % updates:
        raise NotHere(f"{samples:g} samples are not cut into {updates:g} equal parts")
    return {"training.global_batch_size": int(samples // updates)}


def warmup(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Convert warm-up from updates to rollouts."""
    samples = number(values, "--rollout-batch-size") * number(values, "--n-samples-per-prompt", 1)
    updates = number(values, "--num-steps-per-rollout", samples / number(values, "--global-batch-size", samples))
    iterations = number(values, "--lr-warmup-iters")
    if iterations % updates:
        raise NotHere(f"{iterations:g} updates are no whole number of rollouts with {updates:g} updates each")
    return {"optimizer.lr_warmup_steps": int(iterations // updates)}


def lr_floor(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Convert the minimum to a fraction of the learning rate; a constant schedule has none."""
    if values.get("--lr-decay-style", ("linear",)) == ("constant",):
        return {}
    return {"optimizer.lr_floor": number(values, "--min-lr") / number(values, "--lr", 1e-6)}


def head_width(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set the head width, which MLA derives from other widths."""
    is_mla = "--multi-latent-attention" in values or "--kv-lora-rank" in values
    return {} if is_mla else {"model.architecture.head_dim": int(number(values, "--kv-channels"))}


def balancing(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Accept only aux_loss if the loss has a coefficient."""
    if number(values, "--moe-aux-loss-coeff", 0) and given != ("aux_loss",):
        raise NotHere("with a coefficient it is aux_loss here")
    return {}


def megabytes(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Convert the bucket size from bytes to MiB."""
    size = number(values, "--update-weight-buffer-size")
    if size % MIB:
        raise NotHere("not a whole number of MiB")
    return {"engine.weight_bucket_mib": int(size // MIB)}


def prompts(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set the user's file instead of the model's dataset; its last rows become the held-out prompts."""
    (path,) = given if len(given) == 1 else ("",)
    if not path or "@" in path:
        raise NotHere("one file without a slice of it; `data.sources` has several")
    return {"data.kind": "files", "data.train_file": path, "data.heldout_file": ""}


def heldout(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set the held-out file from the first pair of name and file."""
    if len(given) != 2 or "@" in given[1]:
        raise NotHere("one name and one file: the others are suites here, evaluation.suites.NAME.file")
    return {"data.heldout_file": given[1]}


def longest_prompt(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Set the limit of prompts; longer ones are dropped, as there."""
    most = int(number(values, "--rollout-max-prompt-len"))
    return {"rollout.max_prompt_tokens": most, "rollout.overlong_prompts": "drop"}


def template_variables(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Convert their JSON to NAME=VALUE."""
    try:
        pairs = dict(json.loads(given[0])).items()
    except (ValueError, TypeError, IndexError) as error:
        raise NotHere("not a JSON object") from error
    texts = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in pairs]
    return {"data.chat_template_kwargs": texts}


estimator = choice("algorithm.preset", _PRESETS)
reward = choice("data.reward", _REWARDS)
schedule = choice("optimizer.lr_schedule", _SCHEDULES)
recompute = choice("trainer.recompute_granularity", {"full": "full", "none": "none"})
dispatcher = choice("trainer.deepep", {"flex": True, "alltoall": False})
all_to_all = choice("engine.deepep", {"deepep": True, "none": False})


def objective(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Accept only RL's loss, because other flags of fine-tuning have another meaning."""
    if given != ("policy_loss",):
        raise NotHere("known here: policy_loss")
    return {"training.objective": "rl"}


def wandb_mode(given: tuple[str, ...], values: Values) -> Mapping[str, Any]:
    """Convert the mode; "disabled" has its own key."""
    return {"logging.wandb": False} if given == ("disabled",) else {"logging.wandb_mode": "".join(given)}
