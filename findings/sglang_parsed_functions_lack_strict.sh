#!/bin/bash
# sglang 0.5.23, Linux x86-64, Python 3.11.
#
# POST /parse_function_call with "tool_call_parser": "glm47" answers a valid text and a valid tool with HTTP 500; with
# "qwen25" or "glm45" it works. SGLang has two classes of tools: the one of its OpenAI endpoints has a field `strict`,
# the one of this endpoint has not, and `FunctionCallParser` reads `tool.function.strict` for some parsers only. One
# would expect one class, or that a parser which an endpoint accepts works behind it.
# Seen on a CPU: AttributeError: 'Function' object has no attribute 'strict'.
# Here: our plug-in in SGLang adds the field (`posttrain_weights.sglang_hooks`).
#
# Only the fields are checked here, since a server needs an environment of 5 GB. Seen on 2026-11-30:
#   managers/io_struct.py Function: description name parameters
#   entrypoints/openai/protocol.py Function: defer_loading description key_order name parameters strict
#   function_call/function_call_parser.py reads: tool.function.strict
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps sglang==0.5.23
cat > "$folder/fields.py" <<'PY'
import ast
import sys
from pathlib import Path

(root,) = Path(sys.argv[1]).glob("lib/python3*/site-packages/sglang/srt")
for name in ("managers/io_struct.py", "entrypoints/openai/protocol.py"):
    for node in ast.parse((root / name).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "Function":
            fields = sorted(line.target.id for line in node.body if isinstance(line, ast.AnnAssign))
            print(f"{name} Function:", *fields)
name = "function_call/function_call_parser.py"
read = {ast.unparse(n) for n in ast.walk(ast.parse((root / name).read_text())) if isinstance(n, ast.Attribute)}
print(f"{name} reads:", *sorted(one for one in read if one == "tool.function.strict"))
PY
output=$("$folder/venv/bin/python" "$folder/fields.py" "$folder/venv")
echo "$output"
grep -q '^managers/io_struct.py Function: description name parameters$' <<< "$output"
grep -q '^entrypoints/openai/protocol.py Function: .*strict$' <<< "$output"
grep -q 'reads: tool.function.strict$' <<< "$output"
