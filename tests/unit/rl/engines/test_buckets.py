import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiny_checkpoint import TINY, random_tensors

from posttrain.checkpoint.quantization.fp8 import quantize_named
from posttrain.rl.engines.buckets import make_buckets

LAYER = "model.layers.0.self_attn."


def names(buckets):
    return [[name for name, _ in bucket] for bucket in buckets]


def tensor(num_bytes):
    return torch.zeros(num_bytes // 4)


def test_buckets_are_filled_in_order_up_to_the_limit():
    stream = [("a.bias", tensor(40)), ("b.bias", tensor(60)), ("c.bias", tensor(4)), ("d.bias", tensor(100))]
    assert names(make_buckets(stream, 100)) == [["a.bias", "b.bias"], ["c.bias"], ["d.bias"]]


def test_a_tensor_larger_than_a_bucket_is_sent_alone_and_said_so(caplog):
    stream = [("a.bias", tensor(40)), ("b.bias", tensor(400)), ("c.bias", tensor(40))]
    with caplog.at_level("INFO"):
        assert names(make_buckets(stream, 100)) == [["a.bias"], ["b.bias"], ["c.bias"]]
    assert "b.bias and what belongs to it take 400 bytes" in caplog.text


def test_projections_that_sglang_fuses_wait_for_each_other():
    query, key = f"{LAYER}q_a_proj.weight", f"{LAYER}kv_a_proj_with_mqa.weight"
    stream = [("a.bias", tensor(80)), (query, tensor(40)), ("b.bias", tensor(80)), (key, tensor(40))]
    assert names(make_buckets(stream, 100)) == [["a.bias"], ["b.bias"], [query, key]]


def test_without_a_latent_of_queries_keys_wait_for_nobody():
    stream = [(f"{LAYER}q_proj.weight", tensor(40)), (f"{LAYER}kv_a_proj_with_mqa.weight", tensor(40))]
    assert names(make_buckets(stream, 100, has_query_latent=False)) == [[name for name, _ in stream]]


def test_a_quantised_weight_travels_with_its_scales():
    codes = torch.zeros(60, 1).to(torch.float8_e4m3fn)
    stream = [("a.weight", codes), ("b.bias", tensor(60)), ("a.weight_scale_inv", tensor(4))]
    assert names(make_buckets(stream, 64)) == [["b.bias"], ["a.weight", "a.weight_scale_inv"]]


@pytest.mark.parametrize(
    ("left", "missing"),
    [
        ((f"{LAYER}q_a_proj.weight", torch.zeros(1)), "kv_a_proj_with_mqa.weight"),
        ((f"{LAYER}kv_a_proj_with_mqa.weight", torch.zeros(1)), "q_a_proj.weight"),
        (("a.weight", torch.zeros(1, 1).to(torch.float8_e4m3fn)), "a.weight_scale_inv"),
        (("a.weight_scale_inv", torch.zeros(1)), "a.weight"),
    ],
)
def test_a_tensor_left_without_its_partner_is_named(left, missing):
    with pytest.raises(ValueError, match=f"ends without .*{missing}"):
        list(make_buckets([left], 100))


@settings(max_examples=30, deadline=None)
@given(limit=st.integers(500, 60000), seed=st.integers(0, 99), quantised=st.booleans())
def test_a_whole_model_in_any_order(limit, seed, quantised):
    tensors = list(MODEL[quantised].items())
    order = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(seed)).tolist()
    buckets = list(make_buckets((tensors[place] for place in order), limit))
    assert sorted(name for bucket in buckets for name, _ in bucket) == sorted(MODEL[quantised])
    for bucket in buckets:
        inside = {name for name, _ in bucket}
        alone = {name.replace("kv_a_proj_with_mqa", "q_a_proj").removesuffix("_scale_inv") for name in inside}
        assert sum(t.nbytes for _, t in bucket) <= limit or len(alone) == 1
        for name in inside:
            assert not name.endswith("_scale_inv") or name.removesuffix("_scale_inv") in inside
            assert ".q_a_proj." not in name or name.replace("q_a_proj", "kv_a_proj_with_mqa") in inside


PLAIN = random_tensors(TINY, seed=0)
MODEL = {
    False: PLAIN,
    True: dict(pair for name, value in PLAIN.items() for pair in quantize_named(name, value)),
}
