#!/bin/sh
# datasets 5.2.0 types a column of texts and numbers, or of dicts with different keys, as `Json`. Its own parquet reads
# back as the values; pyarrow 26.0.1 gives the JSON texts (the extension type arrow.json), so a label `yes` is `"yes"`,
# with quotation marks. to_csv writes the JSON texts, too, and there nothing says so. Nobody has asked for the type:
# `map` and `load_dataset("json")` choose it by the rows. A table whose labels are all texts is not affected.
#
# Seen on 2026-11-28:
#   features {'label': Json(decode=True), 'extra': Json(decode=True)}
#   datasets {'label': 'yes', 'extra': {'a': 1}}
#   pyarrow  {'label': '"yes"', 'extra': '{"a":1}'}
#   csv      """yes""","{""a"":1}"
# Exits with 1 when any of these lines differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" "$folder/venv/bin/python" - <<'PYTHON'
import sys

import datasets
import pyarrow.parquet

datasets.disable_progress_bars()
ROWS = [{"label": "yes", "extra": {"a": 1}}, {"label": 3, "extra": {"b": 2}}]
numbers = datasets.Dataset.from_dict({"number": [0, 1]})
made = numbers.map(lambda row: ROWS[row["number"]], remove_columns=["number"])
made.to_parquet("a.parquet")
made.to_csv("a.csv")
seen = {
    "features": str(dict(made.features)),
    "datasets": str(datasets.Dataset.from_parquet("a.parquet")[0]),
    "pyarrow": str(pyarrow.parquet.read_table("a.parquet").to_pylist()[0]),
    "csv": open("a.csv").read().splitlines()[1],
}
expected = {
    "features": "{'label': Json(decode=True), 'extra': Json(decode=True)}",
    "datasets": "{'label': 'yes', 'extra': {'a': 1}}",
    "pyarrow": """{'label': '"yes"', 'extra': '{"a":1}'}""",
    "csv": '"""yes""","{""a"":1}"',
}
for name, line in seen.items():
    print(f"{name:8} {line}")
sys.exit(seen != expected)
PYTHON
