"""The sides of `benchmarks.trainer`: each makes a rollout into the same updated weights, in a process of its own.

A side prepares itself, then waits for a line on its standard input, makes one update, and prints its seconds, as often
as it is asked. The first update's gradient norm shows that the sides do the same work.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.support.hub_tensors import fill
from tests.support.megatron_single import CONFIG_DIR, initialize_single_rank, test_config
from tests.support.tiny_checkpoint import TINY, TINY_QWEN3, make_random_checkpoint

from posttrain.config.schema import Architecture
from posttrain.plan.resolve import resolve
from posttrain.types import Prompt, Trajectory, TrajectoryGroup

GROUP, LONGEST = 8, 1536
LR, CLIP = 1e-5, 1.0
# Keys of `trainer_loops.BATCHINGS`, which this module must not import before the memory of imports is known.
LOOPS = ("padded", "single", "packed")
_EXPERTS = dataclasses.replace(
    TINY,
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=6,
    intermediate_size=1024,
    moe_intermediate_size=512,
    n_routed_experts=8,
    num_attention_heads=8,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    index_head_dim=32,
    index_topk=256,
    num_nextn_predict_layers=0,
    max_position_embeddings=2048,
)
_DENSE = dataclasses.replace(
    TINY_QWEN3,
    vocab_size=8192,
    hidden_size=448,
    num_hidden_layers=8,
    intermediate_size=1536,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
)
# "tiny" is for the quick form, "demo" what `make demo` trains; the others have 24, 31, 26 and 35 million parameters.
MODELS: dict[str, Architecture] = {
    "tiny": TINY_QWEN3,
    "demo": resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config.model.architecture,
    "moe": _EXPERTS,
    "moe16": dataclasses.replace(
        _EXPERTS, vocab_size=16384, moe_intermediate_size=288, n_routed_experts=16, num_experts_per_tok=4
    ),
    "dense": _DENSE,
    "dense_wide": dataclasses.replace(_DENSE, vocab_size=16384, num_hidden_layers=10),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What is measured.

    Args:
        side: "ours", "plain" or "trl".
        model: Key of `MODELS`.
        lengths: Tokens of each response.
        micro_batch: Samples of a micro-batch (TRL), or tokens (ours, plain), padding included.
        checkpointing: Activations are computed again in the backward pass.
    """

    side: str
    model: str
    lengths: tuple[int, ...]
    micro_batch: int
    checkpointing: bool = False
    prompt_tokens: int = 83
    experts: str = "grouped_mm"


def rollout(task: Task) -> list[TrajectoryGroup]:
    """Return groups of random tokens; rewards differ within each."""
    source, vocab = random.Random(5), MODELS[task.model].vocab_size
    draw = lambda count: tuple(source.randrange(2, vocab) for _ in range(count))  # noqa: E731
    groups = []
    for place in range(0, len(task.lengths), GROUP):
        prompt = draw(task.prompt_tokens)
        samples = [
            Trajectory.of_response(
                prompt,
                draw(length),
                (-9.0,) * length,
                0,
                prompt_id=place,
                sample_index=i,
                reward=float(source.random() < 0.5),
            )
            for i, length in enumerate(task.lengths[place : place + GROUP])
        ]
        groups.append(TrajectoryGroup(Prompt(place, (), ""), tuple(samples)))
    return groups


def main() -> None:
    """Serve updates until the standard input ends."""
    task = Task(**json.loads(sys.argv[1]))
    task = dataclasses.replace(task, lengths=tuple(task.lengths))
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "hf"
        tensors = make_random_checkpoint(source, MODELS[task.model])
        SIDES[task.side](task, source, tensors, serve)


Update = Callable[[], float | None]


def serve(update: Update) -> None:
    """Make an update for every line of the standard input."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        clock = Clock()
        norm = update()
        clock.tell(norm)


class Clock:
    """Seconds of the wall and of the cores since it was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def tell(self, norm: float | None) -> None:
        """Print them, with the gradient norm of what was done meanwhile and the peak memory so far."""
        wall, cpu = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
        peak = resident_mib("VmHWM") - imported_mib
        print(json.dumps({"seconds": wall, "cpu": cpu, "norm": norm, "peak_mib": peak}), flush=True)


# Memory after imports; peaks are counted from here.
imported_mib = 0.0


def note_imports() -> None:
    """Note the memory at the end of a side's imports."""
    global imported_mib
    imported_mib = resident_mib("VmRSS")


def resident_mib(field: str) -> float:
    """Return this process's memory: "VmRSS" now, "VmHWM" at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


# ---- ours ----


def serve_ours(task: Task, source: Path, tensors: dict[str, torch.Tensor], answer: Callable[[Update], None]) -> None:
    """The trainer's own first update on a rollout, which gives the log-probabilities before it, too."""
    from posttrain.rl.algorithm.policy_gradient import PolicyGradient
    from posttrain.rl.megatron_backend import train_step
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.weights import HubWeights
    from posttrain.rl.training.batch import make_updates

    note_imports()
    config = test_config(MODELS[task.model])
    changes: dict[str, dict[str, Any]] = {
        "trainer": {
            "max_tokens_per_gpu": task.micro_batch,
            "recompute_granularity": "full" if task.checkpointing else "none",
            "num_threads": torch.get_num_threads(),
        },
        "training": {"global_batch_size": len(task.lengths)},
        "algorithm": {"loss_aggregation": "token_mean"},
        "rollout": {"temperature": 1.0},
        "optimizer": {"lr_warmup_steps": 0, "clip_grad": CLIP, "weight_decay": 0.0},
    }
    config = dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items()}
    )
    initialize_single_rank(config)
    torch.set_num_threads(config.trainer.num_threads)
    policy = build_policy(config)
    fill(HubWeights(policy.chunks, config.model.architecture), tensors)
    assert policy.optimizer is not None
    policy.optimizer.reload_model_params()
    objective, groups = PolicyGradient(config.algorithm, LONGEST), rollout(task)

    def update() -> float:
        (planned,) = make_updates(config, objective, groups, dp_rank=0)
        batches = planned.micro_batches(objective.needs)
        return train_step.update(policy, objective, batches, LR, look=lambda _: None).grad_norm

    answer(update)


# ---- loops over transformers' model ----


def reference_model(task: Task, source: Path) -> torch.nn.Module:
    """Return the same weights in transformers."""
    from transformers import AutoModelForCausalLM

    options = {"experts_implementation": task.experts} if MODELS[task.model].n_routed_experts else {}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    if task.checkpointing:
        model.gradient_checkpointing_enable()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name)
    return model.train()


def serve_loop(task: Task, source: Path, _: dict[str, torch.Tensor], answer: Callable[[Update], None]) -> None:
    """What one writes in an afternoon: micro-batches as the side is named, AdamW."""
    from benchmarks.trainer_loops import make_update

    note_imports()
    answer(make_update(reference_model(task, source), rollout(task), task.side, task.micro_batch, LR, CLIP))


# ---- TRL ----


def serve_trl(task: Task, source: Path, _: dict[str, torch.Tensor], answer: Callable[[Update], None]) -> None:
    """TRL's own loop, its generation replaced by the rollout."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from posttrain.checkpoint.tiny.tokenizer import make_tokenizer

    note_imports()
    model, groups = reference_model(task, source), rollout(task)
    samples = [sample for group in groups for sample in group.trajectories]

    class Served(TrainerCallback):
        """A step begins when it is asked for."""

        clock = Clock()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not sys.stdin.readline():
                os._exit(0)
            self.clock = Clock()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.clock.tell(None)  # TRL logs the norm after this

    is_served = answer is serve
    arguments = GRPOConfig(
        output_dir=str(source.with_name("trl")),
        per_device_train_batch_size=task.micro_batch,
        gradient_accumulation_steps=math.ceil(len(samples) / task.micro_batch),
        num_generations=GROUP,
        max_completion_length=LONGEST,
        max_steps=10_000 if is_served else 1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=CLIP,
        beta=0.0,
        loss_type="dapo",
        temperature=1.0,
        gradient_checkpointing=task.checkpointing,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [sample.reward for sample in samples],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(groups))]}),
        processing_class=make_tokenizer(64),
        callbacks=[Served()] if is_served else [],
    )
    prompts, responses = [list(s.prompt_tokens) for s in samples], [list(s.sampled_tokens) for s in samples]
    generated: Any = prompts, responses, None, [""] * len(responses), None, {}, None, list[Any]()
    trainer._generate = lambda _: generated  # type: ignore[method-assign, assignment]
    if is_served:
        # Each further step is one of the same training, in which optimizer and loaders exist already.
        print(json.dumps("ready"), flush=True)
        trainer.train()
    else:
        answer(lambda: trainer.train() and None)


SIDES = {"ours": serve_ours, "trl": serve_trl, **dict.fromkeys(LOOPS, serve_loop)}

if __name__ == "__main__":
    main()
