"""The list of stand-ins for what needs a GPU, with what each hides (`stand_ins` and `script` use it)."""

STAND_INS = {
    "transformer_engine_torch": "Transformer Engine's compiled part: shapes, bytes and operations, no values and no "
    "workspaces but those that its Python allocates",
    "DeepEP": "every rank of a group sends to this one what this one sends to itself; buffers are the plan's term",
    "Triton": "kernels are not started: their outputs exist, without values",
    "TileLang": "kernels of sparse attention are traced from their source, whose checks run, and not compiled: "
    "nothing tells whether registers and shared memory suffice",
    "FlashMLA and cuDNN": "Megatron's code that calls them runs, and their outputs exist",
    "torch.compile": "what is to be compiled is taken for one kernel without temporaries",
    "process groups": "large tensors are not sent; lengths, counts, shapes, objects and small sums are, between the "
    "ranks that are rehearsed, and those that are not say what one that is says",
    "router": "which experts a token goes to is drawn: rank 0 of a stage gets more than its share, one expert of each "
    "other rank nothing",
    "repetitions": "keys are chosen once for each length of sequences, log-probabilities computed for the first chunk "
    "of a row, and both are counted each time",
    "values": "vectors of numbers that nobody knows are 1",
    "devices": "all have the architecture and memory that `hardware` names, and an H200's 132 multiprocessors",
    "pinned memory": "no page of the host is pinned",
    "streams": "all work happens at once and in the order of the calls",
    "random state": "devices have none; dropout is 0",
    "rollouts": "no engine is asked: a step has as many rows as stages, three at least, full ones; the first fewer, "
    "shorter ones",
    "weights": "one layer of each kind is compared, and of every rank one sent from shard to shard, or gathered where "
    "engines get it so: nobody is there to receive, and which part goes to which of an engine's ranks is made up",
    "disks": "tensors are planned, copied to the host and back, and no byte of them is read or written; ranks do not "
    "agree on who writes what, and a checkpoint is written at once, not beside a rollout",
}
