#!/bin/bash
# math-verify 0.9.0, latex2sympy2_extended 1.11.0, sympy 1.14.0, Python 3.11.
#
# The grammar reads "1,000" as 1000, but the same digits in brackets as two numbers: (1,000) is the tuple (1, 0), so
# math-verify grades the answer (1,000) as right where the label is (1,0). One would expect 1000, or an error.
# It also reads the pair (1,2) as an open interval, and its `verify` is not symmetric: x \in [-2,7] and -2 \le x \le 7
# are the same or not, depending on which of them is the label.
# Here: rl/reward/equality.py reads the structure, and gives the grammar single values alone.
#
# Seen on 2026-11-28:
#   1000 (1, 0) Interval.open(1, 2)
#   (1,000) for (1,0): True
#   set for relation, relation for set: True False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0
output=$("$folder/venv/bin/python" - 2> "$folder/errors" <<'PY'
from latex2sympy2_extended import latex2sympy
from math_verify import parse, verify

print(*(latex2sympy(text, is_real=True) for text in ("1,000", "(1,000)", "(1,2)")))
print("(1,000) for (1,0):", verify(parse("$(1,0)$"), parse("$(1,000)$")))
region, relation = parse(r"$x \in [-2,7]$"), parse(r"$-2 \le x \le 7$")
print("set for relation, relation for set:", verify(relation, region), verify(region, relation))
PY
) || { cat "$folder/errors"; exit 1; }
echo "$output"
[ "$output" = "1000 (1, 0) Interval.open(1, 2)
(1,000) for (1,0): True
set for relation, relation for set: True False" ]
