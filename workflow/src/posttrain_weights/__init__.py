"""Weight transfer between a trainer and inference engines: one protocol, spoken by both sides.

The trainer plans which rank sends which slice (`transfer_plan`), and sends (`sender`); an engine rank traces where its
model stores each tensor (`load_tracer`), and receives (`receiver`). `channel` and `transport` carry the bytes, `delta`
shortens them, `digest` proves that both sides hold the same. `sglang_hooks` is SGLang's entry point;
`finished_batches` keeps the versions of its tokens exact.

The package needs only torch (and Triton on GPUs) and imports nothing else of ours, because it also runs in the engines'
environment. This module needs not even torch, because memory plans use it.
"""

# A receiver's bytes per round as a multiple of a sender's, since several may send to it at the same time.
RECEIVED_ROUNDS = 2
# Elements compared with the last update at a time, because their indices take 64 bits each.
COMPARED_AT_ONCE = 1 << 22
