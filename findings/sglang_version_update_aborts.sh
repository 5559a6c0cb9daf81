#!/bin/bash
# sglang 0.5.23, Linux x86-64, Python 3.11.
#
# POST /update_weight_version only renames the weights that an engine has, but it aborts every running request, unless it
# is asked not to: of the five requests that have `abort_all_requests` it is the only one whose default is True. One
# would expect the label to be the harmless one, and updates of the weights themselves to abort.
# A server on a CPU that was paused in place, got new weights and then their version answered each running request with
# finish reason "abort" one token after it went on; with "abort_all_requests": false they went on.
# Here: the client sends false.
#
# Only the default is checked here, since a server needs an environment of 5 GB. Seen on 2026-11-30:
#   UpdateWeightFromDiskReqInput False
#   UpdateWeightVersionReqInput True
#   UpdateWeightsFromDistributedReqInput False
#   UpdateWeightsFromIPCReqInput False
#   UpdateWeightsFromTensorReqInput False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps sglang==0.5.23
cat > "$folder/defaults.py" <<'PY'
import ast
import sys
from pathlib import Path

(path,) = Path(sys.argv[1]).glob("lib/python3*/site-packages/sglang/srt/managers/io_struct.py")
for kind in sorted((node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)), key=lambda k: k.name):
    for line in kind.body:
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "abort_all_requests":
            print(kind.name, ast.unparse(line.value))
PY
output=$("$folder/venv/bin/python" "$folder/defaults.py" "$folder/venv")
echo "$output"
[ "$(grep -c 'True$' <<< "$output")" = 1 ] && grep -q '^UpdateWeightVersionReqInput True$' <<< "$output"
