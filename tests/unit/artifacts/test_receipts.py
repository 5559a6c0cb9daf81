import json

import pytest

from posttrain.artifacts import Receipt, read_receipt, write_receipt
from posttrain.errors import CheckpointError


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("finalize_torch_dist", "finalize_torch_d!st", "of a step 'finalize_torch_d!st', which does not exist"),
        ('"num": 3', '"num": 2', "changed by hand"),
        ('"inputs"', '"imputs"', "not a receipt"),
    ],
)
def test_a_receipt_that_was_changed_is_refused(tmp_path, old, new, message):
    path = tmp_path / "x.receipt.json"
    write_receipt(path, Receipt("finalize_torch_dist", (), {}, {"num": 3}), started=0.0)
    assert read_receipt(path).settings == {"num": 3}
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        read_receipt(path)


@pytest.mark.parametrize("field", ["step", "files", "inputs", "settings", "digest", "format_version"])
@pytest.mark.parametrize("value", [None, 7, [7], "text", {"a": {}}])
def test_fields_of_other_types_are_refused(tmp_path, field, value):
    path = tmp_path / "a.receipt.json"
    write_receipt(path, Receipt("patch_hf_config", (), {}, {}))
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=r"a\.receipt\.json: "):
        read_receipt(path)
