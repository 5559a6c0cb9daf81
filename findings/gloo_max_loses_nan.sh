#!/bin/bash
# torch 2.13.0, gloo, Linux x86-64, Python 3.11.
#
# all_reduce(MAX) over gloo keeps a NaN that rank 0 has and drops a NaN of any other rank, on all ranks alike: its
# maximum compares, and a comparison with NaN is false. One would expect NaN everywhere, as torch.max gives, or at
# least the same answer whichever rank has it. A scale that ranks agree on therefore looks finite.
# Here: reduce a mask of the NaNs together with the values.
#
# Seen on 2026-11-28:
#   NaN on rank 0: [nan, nan]
#   NaN on rank 1: [1.0, 1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/ranks.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank(number, folder, queue):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=2)
    found = []
    for having in (0, 1):
        value = torch.tensor([float("nan") if number == having else 1.0])
        dist.all_reduce(value, dist.ReduceOp.MAX)
        found.append(value.item())
    queue.put((number, found))
    dist.barrier()


if __name__ == "__main__":
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank, (sys.argv[1], queue), nprocs=2)
    told = dict(queue.get() for _ in range(2))
    for having in (0, 1):
        print(f"NaN on rank {having}: {[told[number][having] for number in (0, 1)]}")
PY
output=$("$folder/venv/bin/python" "$folder/ranks.py" "$folder")
echo "$output"
[ "$output" = "NaN on rank 0: [nan, nan]
NaN on rank 1: [1.0, 1.0]" ]
