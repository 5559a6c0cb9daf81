"""Weight transfer between a trainer and inference engines: one protocol, spoken by both sides.

The trainer plans which rank sends which slice (`transfer_plan`), and sends (`sender`); an engine rank traces where its
model stores each tensor (`load_tracer`), and receives (`receiver`). `channel` and `transport` carry the bytes, `delta`
shortens them, `digest` proves that both sides hold the same. `sglang_hooks` is SGLang's entry point.

The package needs torch alone, on GPUs Triton as well, and imports nothing of ours: it also runs inside the engines'
environment. What stands here needs not even torch, because plans compute memory with it.
"""

# Times a sender's bytes of a round that a receiver may get, since several may send to it at the same time.
RECEIVED_ROUNDS = 2
# Elements of a part that are compared with the last update together: their places are 64-bit numbers.
COMPARED_AT_ONCE = 1 << 22
