"""Rules of the learning rate, the balance of experts, the optimizer's place, and monitoring during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from posttrain.config.derived import lr_decay_steps, warmup_steps
from posttrain.config.families import FAMILIES, family_of
from posttrain.config.schema import Config
from posttrain.errors import Problem

Problems = Iterator[Problem]


def _learning_rate(config: Config) -> Problems:
    # A step may have several updates, which share its learning rate.
    optimizer, num_steps = config.optimizer, config.training.num_steps
    steps, share = optimizer.lr_warmup_steps, optimizer.lr_warmup_share
    left = num_steps - warmup_steps(config)
    if left < 0:
        allowed = f"at most {num_steps}, the steps of the run (training.num_steps)"
        remedy = "shorten the warm-up, or train longer"
        yield Problem("warm-up-too-long", "optimizer.lr_warmup_steps", str(steps), allowed, remedy)
    if steps and share:
        allowed = f"0 with optimizer.lr_warmup_steps={steps}"
        remedy = "give the warm-up in steps or as a share"
        yield Problem("warm-up-given-twice", "optimizer.lr_warmup_share", f"{share:g}", allowed, remedy)
    if optimizer.lr_schedule == "wsd" and lr_decay_steps(config) > left:
        allowed = f"at most {left} of {num_steps} steps, which the warm-up leaves"
        remedy = "shorten the decay or the warm-up"
        yield Problem("decay-too-long", "optimizer.lr_decay_share", f"{optimizer.lr_decay_share:g}", allowed, remedy)


def _profiled_steps(config: Config) -> Problems:
    steps, num_steps = config.logging.profile_steps, config.training.num_steps
    if wrong := [step for step in steps if not (step.isdecimal() and 1 <= int(step) <= num_steps)]:
        remedy = "name steps that the run makes"
        yield Problem(
            "no-such-step", "logging.profile_steps", ", ".join(wrong), f"1 to {num_steps} (training.num_steps)", remedy
        )


def _balance(config: Config) -> Problems:
    arch, optimizer = config.model.architecture, config.optimizer
    if optimizer.moe_aux_loss_coeff and not arch.n_routed_experts:
        remedy = "there is no load to balance"
        allowed = "0: no experts"
        yield Problem(
            "balance-without-experts",
            "optimizer.moe_aux_loss_coeff",
            f"{optimizer.moe_aux_loss_coeff:g}",
            allowed,
            remedy,
        )
    if optimizer.router_bias_update_rate and not (arch.n_routed_experts and FAMILIES[arch.model_type].router_bias):
        allowed = f"0: routers of {arch.model_type} have no bias"
        remedy = "set optimizer.moe_aux_loss_coeff to balance experts"
        yield Problem(
            "router-without-bias",
            "optimizer.router_bias_update_rate",
            f"{optimizer.router_bias_update_rate:g}",
            allowed,
            remedy,
        )


def _offload(config: Config) -> Problems:
    hardware, trainer = config.hardware, config.trainer
    if hardware.device == "cpu" and trainer.optimizer_cpu_offload:
        remedy = "the state is in host memory already"
        yield Problem("offload-on-cpu", "trainer.optimizer_cpu_offload", "true", "false on a CPU", remedy)
    elif trainer.optimizer_cpu_offload and trainer.params_dtype == "fp32":
        # Megatron Core 0.19 gives its offloading optimizer views of FP32 weights, which torch's optimizers refuse.
        remedy = "set trainer.params_dtype=bf16, or trainer.optimizer_cpu_offload=false"
        allowed = "bf16 where the optimizer's state is in host memory"
        yield Problem("fp32-with-offload", "trainer.params_dtype", "fp32", allowed, remedy)
    elif trainer.optimizer_cpu_offload and family_of(config.model.architecture).fp32_names:
        # Nor does it take FP32 weights among BF16 ones: its views of them are no leaves, and a resume has no state.
        value, allowed = f"true with {config.model.architecture.model_type}", "false: some of its weights are FP32"
        remedy = "set trainer.optimizer_cpu_offload=false, or take more nodes"
        yield Problem("fp32-weights-with-offload", "trainer.optimizer_cpu_offload", value, allowed, remedy)


OPTIMIZER_RULES: tuple[Callable[[Config], Problems], ...] = (_learning_rate, _balance, _offload, _profiled_steps)
