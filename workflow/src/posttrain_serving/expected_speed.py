"""Predicts the serving speed of a launch with the planner's roofline."""

from __future__ import annotations

from posttrain.config.schema import Config
from posttrain.plan.sizing.engine import GIB, kv_tokens, weights_bytes_per_gpu
from posttrain.plan.timing.decoding import DecodingGpus
from posttrain.plan.timing.serving_load import SHOWN_CONCURRENCIES, ServedRow, is_predicted, predict_serving
from posttrain_serving.fit import Size
from posttrain_serving.serve_request import ServeRequest


def expected_speed(serve_request: ServeRequest, precision: str, config: Config, size: Size) -> tuple[ServedRow, ...]:
    """Return one row per number of clients, for requests of 2,048 input and 512 output tokens, BF16 cache, no drafts.

    Empty for the embedded engine, separate prefill engines, and other cases that `is_predicted` excludes.

    Args:
        serve_request: The request.
        precision: Precision of the weights.
        config: Its engine is configured as it will be started.
        size: Size of one engine.
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
