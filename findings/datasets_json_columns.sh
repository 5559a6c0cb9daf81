#!/bin/bash
# datasets 5.2.0, pyarrow 26.0.1, Python 3.11.
#
# load_dataset("json") of rows whose dicts have different keys types the column `Json`, and to_parquet writes Arrow's
# extension type arrow.json. pyarrow alone returns the encoded JSON text of each value: a dict comes back as str, and a
# text comes back with quotes around it. One would expect structs with nulls, as before, or values.
# Here: JSON columns are decoded when parquet is read.
#
# Seen on 2026-11-28:
#   type: extension<arrow.json>
#   value: '{"x":1}'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
printf '{"extra": {"x": 1}}\n{"extra": {"y": ["a"]}}\n' > "$folder/rows.jsonl"
cat > "$folder/show.py" <<'PY'
import sys

import pyarrow.parquet as pq
from datasets import load_dataset

folder = sys.argv[1]
load_dataset("json", data_files=f"{folder}/rows.jsonl", split="train", cache_dir=f"{folder}/cache").to_parquet(f"{folder}/rows.parquet")
table = pq.read_table(f"{folder}/rows.parquet")
print(f"type: {table.schema.field('extra').type}")
print(f"value: {table.to_pylist()[0]['extra']!r}")
PY
output=$("$folder/venv/bin/python" "$folder/show.py" "$folder" 2> "$folder/errors") || { cat "$folder/errors"; exit 1; }
echo "$output"
[ "$output" = "type: extension<arrow.json>
value: '{\"x\":1}'" ]
