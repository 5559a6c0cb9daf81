import pytest

from posttrain.planner.engine import engine_memory, kv_bytes_per_token, kv_tokens, weights_bytes_per_gpu
from posttrain.planner.memory import GIB


def test_kv_cache_of_glm5_as_printed_by_a_server(resolved):
    arch = resolved("glm5").config.model.architecture
    assert kv_bytes_per_token(arch) == 78 * ((512 + 64) * 2 + 132) == 100_152
    assert kv_tokens(arch, 64.49 * GIB) == 691_392


def test_kv_cache_comes_in_whole_pages(resolved):
    arch = resolved("tiny").config.model.architecture
    page = 64 * kv_bytes_per_token(arch)
    assert [kv_tokens(arch, size) for size in (-1, 0, page - 1, page, 2.5 * page)] == [0, 0, 0, 64, 128]


def test_fp8_weights_of_glm5_under_tensor_parallelism_8(resolved):
    # 89.43 GiB were printed by a server, which holds some buffers beside the weights; arithmetic gives 88.7.
    arch = resolved("glm5").config.model.architecture
    assert weights_bytes_per_gpu(arch, 8, "fp8", "tensor_parallel") / GIB == pytest.approx(88.69, abs=0.01)


def test_data_parallel_attention_keeps_all_but_the_experts_on_each_gpu(resolved):
    arch = resolved("glm5").config.model.architecture
    experts = 75 * 256 * (3 * 6144 * 2048 + 3 * 48 * 16 * 4)
    one, many = (weights_bytes_per_gpu(arch, count, "fp8", "data_parallel") for count in (1, 64))
    assert one - many == experts - experts // 64


def test_engine_of_the_recipe(resolved):
    config = resolved("glm5").config
    served = engine_memory(config)
    assert served.weights_gib_per_gpu == pytest.approx(30.27, abs=0.01)
    free = 0.7 * 140.4 - served.weights_gib_per_gpu
    assert served.kv_tokens_per_gpu == int(free * GIB // (64 * 100_152)) * 64
    assert served.kv_tokens == 64 * served.kv_tokens_per_gpu


def test_the_embedded_engine_dequantises_and_has_no_pool(resolved):
    served = engine_memory(resolved("tiny").config)
    assert served.weights_gib_per_gpu == 4 * (292_352 + 3 * 8) / GIB
    assert served.kv_tokens is None
