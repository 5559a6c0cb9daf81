import hashlib

import torch

from posttrain.rl.engines.checksums import combined_checksum, tensor_checksum


def test_the_checksum_is_over_dtype_shape_and_bytes():
    expected = hashlib.sha256(b"torch.bfloat16(2,)" + bytes([0x80, 0x3F, 0x00, 0xC0])).hexdigest()
    assert tensor_checksum(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)) == expected


def test_layout_does_not_count_and_everything_else_does():
    values = torch.arange(6.0).reshape(2, 3)
    assert tensor_checksum(values.t().contiguous().t()) == tensor_checksum(values)
    others = [values.reshape(3, 2), values.bfloat16(), values + 1e-7, -0.0 * values]
    assert len({tensor_checksum(other) for other in [values, *others]}) == 5


def test_the_combined_checksum_does_not_depend_on_order():
    assert combined_checksum({"a": "1", "b": "2"}) == combined_checksum({"b": "2", "a": "1"})
    assert combined_checksum({"a": "1", "b": "2"}) != combined_checksum({"a": "2", "b": "1"})
