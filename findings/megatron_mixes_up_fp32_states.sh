#!/bin/bash
# megatron-core 0.19.2, torch 2.13.0, Linux x86-64, Python 3.11.
#
# A BF16 model keeps some weights in FP32, in one parameter group with others. Megatron's distributed optimizer trains
# it correctly, and writes a checkpoint in which `optimizer.state.*.NAME` holds the master weight and moments of another
# weight. It puts a group's FP32 weights first (`_build_model_and_main_param_groups`), but finds a weight's state by
# counting in the order of its buffers (`model_param_group_index_map`), where the BF16 ones come first if the model's
# first weight is BF16, as embeddings are. One would expect each state under its weight's name, or an error.
# What a user sees: nothing, if sizes are equal. A model with the same order exchanges them back when it loads; one with
# the FP32 weight first, or a tool that reads master weights by name, gets the wrong ones. If sizes differ, the save
# fails with a shape error.
# Here: weights that stay in FP32 have a parameter group of their own (`rl/megatron_backend/model.py`).
#
# One process with gloo, after one step with a learning rate of 0; the BF16 weight and its gradient are 1, the FP32
# ones 2, so the first moments are 0.1 and 0.2. Seen on 2026-12-01:
#   FP32 weight first: {'bf16.exp_avg': 0.1, 'bf16.param': 1.0, 'fp32.exp_avg': 0.2, 'fp32.param': 2.0}
#   BF16 weight first: {'bf16.exp_avg': 0.2, 'bf16.param': 2.0, 'fp32.exp_avg': 0.1, 'fp32.param': 1.0}
#   BF16 weight first, of another size: RuntimeError: The size of tensor a (4) must match the size of tensor b (2) at
#   non-singleton dimension 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 numpy packaging psutil
# Its metadata ask for Python 3.12; it has a wheel for 3.11.
"$folder/venv/bin/pip" install --quiet --no-deps --ignore-requires-python megatron-core==0.19.2
cat > "$folder/states.py" <<'PY'
import logging
import sys
import tempfile

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch.overrides import TorchFunctionMode

IN_BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": True}
RIGHT = {"bf16.exp_avg": 0.1, "bf16.param": 1.0, "fp32.exp_avg": 0.2, "fp32.param": 2.0}
EXCHANGED = {"bf16.exp_avg": 0.2, "bf16.param": 2.0, "fp32.exp_avg": 0.1, "fp32.param": 1.0}


class HostMemory(TorchFunctionMode):
    """Megatron's optimizer accepts weights of CUDA types only, and allocates on the GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        answer = function(*args, **kwargs)
        is_name = function is torch.Tensor.type and isinstance(answer, str)
        return answer.replace("torch.", "torch.cuda.", 1) if is_name else answer


def saved(**weights):
    """Train one step, save, and return the first number of each state in the checkpoint."""
    model = MegatronModule(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **IN_BF16))
    for name, weight in weights.items():
        model.register_parameter(name, torch.nn.Parameter(weight))
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
    settings = OptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=True, **IN_BF16)
    optimizer = get_megatron_optimizer(settings, [DistributedDataParallel(model.config, sharded, model)])
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    for weight in model.parameters():
        weight.main_grad.copy_(weight.detach())
    optimizer.step()
    assert all(torch.equal(model.get_parameter(name), weight) for name, weight in weights.items())
    names = {name: ShardedTensor.from_rank_offsets(name, weight) for name, weight in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        dist_checkpointing.save(optimizer.sharded_state_dict(names, metadata=FORMAT), folder)
        tensors = dist_checkpointing.load_plain_tensors(folder)
    keys = [(name, kind) for name in ("bf16", "fp32") for kind in ("exp_avg", "param")]
    return {f"{name}.{kind}": round(tensors[f"optimizer.state.{kind}.{name}"][0].item(), 6) for name, kind in keys}


def main():
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    bf16, fp32 = torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 2.0)
    with HostMemory():
        control, mixed = saved(fp32=fp32, bf16=bf16), saved(bf16=bf16, fp32=fp32)
        print("FP32 weight first:", control)
        print("BF16 weight first:", mixed)
        try:
            saved(bf16=bf16, fp32=fp32[:2])
            fails = False
        except RuntimeError as error:
            print(f"BF16 weight first, of another size: RuntimeError: {error}")
            fails = "must match the size" in str(error)
    torch.distributed.destroy_process_group()
    sys.exit(0 if (control, mixed, fails) == (RIGHT, EXCHANGED, True) else 1)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
PY
CUDA_VISIBLE_DEVICES="" "$folder/venv/bin/python" -W ignore "$folder/states.py"
