import base64
import pickle

import pytest
import torch

from posttrain.rl.engines.tensor_payload import PayloadError, deserialize_bucket, serialize_bucket


def test_every_bit_of_every_dtype_comes_back():
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(7, 5, generator=generator)
    bucket = [
        ("float32", floats),
        ("bfloat16", floats.bfloat16()),
        ("float8", floats.to(torch.float8_e4m3fn)),
        ("transposed", floats.t()),
        ("slice", floats[1:3, ::2]),
        ("scalar", torch.tensor(-0.0)),
        ("empty", torch.empty(0, 4)),
        ("nan", torch.tensor([float("nan"), float("inf")])),
    ]
    back = deserialize_bucket(serialize_bucket(bucket))
    assert [name for name, _ in back] == [name for name, _ in bucket]
    for (name, sent), (_, received) in zip(bucket, back, strict=True):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape), name
        sent_bytes, received_bytes = (t.contiguous().reshape(-1).view(torch.uint8) for t in (sent, received))
        assert torch.equal(sent_bytes, received_bytes), name


def test_torch_reads_the_same_tensors():
    """Its own functions, which SGLang calls, are an independent reader of the payload."""
    bucket = [("matrix", torch.randn(7, 5)), ("stack", torch.randn(2, 3, 5)[:, 1:]), ("scalar", torch.tensor(3.0))]
    payload = serialize_bucket(bucket)
    theirs, ours = pickle.loads(base64.b64decode(payload)), deserialize_bucket(payload)
    for (_, sent), (_, expected), (_, found) in zip(bucket, theirs, ours, strict=True):
        assert torch.equal(expected, sent)
        assert torch.equal(found, sent)
        assert found.stride() == expected.stride() == sent.contiguous().stride()


def test_a_buckets_bytes_stand_once_in_the_payload():
    bucket = [(str(index), torch.zeros(1000)) for index in range(50)]
    assert len(serialize_bucket(bucket)) < 1.1 * 50 * 4000 * 4 / 3


class RunsACommand:
    def __reduce__(self):
        return eval, ("__import__('os').environ.setdefault('HACKED', '1')",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([("x", RunsACommand())], "builtins.eval is not allowed"),
        ([("x", torch.float64)], "torch.float64 is not allowed"),
        ({"x": 1}, "expected a list"),
        ([("x", 3)], "expected a list"),
    ],
)
def test_only_named_tensors_get_through(content, said):
    payload = base64.b64encode(pickle.dumps(content)).decode()
    with pytest.raises(PayloadError, match=said):
        deserialize_bucket(payload)


@pytest.mark.parametrize("payload", ["", "not base64!", base64.b64encode(b"not a pickle").decode()])
def test_damaged_payloads_are_refused(payload):
    with pytest.raises(PayloadError, match="not a payload"):
        deserialize_bucket(payload)


def test_a_cut_payload_is_refused():
    payload = serialize_bucket([("x", torch.zeros(100))])
    with pytest.raises(PayloadError):
        deserialize_bucket(payload[: len(payload) // 2 // 4 * 4])
