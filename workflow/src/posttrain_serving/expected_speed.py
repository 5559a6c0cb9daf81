"""How fast a launch is expected to serve, by the planner's roofline."""

from __future__ import annotations

from posttrain.config.schema import Config
from posttrain.plan.sizing.engine import GIB, kv_tokens, weights_bytes_per_gpu
from posttrain.plan.timing.decoding import DecodingGpus
from posttrain.plan.timing.serving_load import SHOWN_CONCURRENCIES, ServedRow, is_predicted, predict_serving
from posttrain_serving.fit import Size
from posttrain_serving.serve_request import ServeRequest


def expected_speed(serve_request: ServeRequest, precision: str, config: Config, size: Size) -> tuple[ServedRow, ...]:
    """Return a row for some numbers of clients, each request of 2,048 and 512 tokens, the cache in BF16, no drafts.

    Nothing for the embedded engine, engines that prefill apart, and what `is_predicted` says: they are not predicted.

    Args:
        serve_request: What is asked for.
        precision: Of the weights.
        config: With the engine as it is started.
        size: Of one engine.
    """
    arch, apart = config.model.architecture, size.attention == "data_parallel"
    weights = weights_bytes_per_gpu(arch, size.num_gpus, precision, size.attention)
    free = config.engine.mem_fraction_static * config.hardware.memory_gib_per_gpu * GIB - weights
    tokens = kv_tokens(arch, free, 1 if apart else size.num_gpus) * (size.num_gpus if apart else 1)
    if (
        serve_request.engine == "embedded"
        or serve_request.prefill_apart
        or not is_predicted(arch, config.hardware, tokens)
    ):
        return ()
    engine = DecodingGpus(arch, config.hardware, size.num_gpus, precision, dp_attention=apart)
    return tuple(predict_serving(engine, tokens, SHOWN_CONCURRENCIES))
