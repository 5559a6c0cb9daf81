#!/usr/bin/env bash
# Make a virtual environment that holds lm-eval, which asks engines over HTTP: no torch, and nothing of this package.
#
# Usage: install.sh VENV        (PYTHON=... chooses the interpreter, 3.11 or 3.12; default python3)
set -euo pipefail

venv=${1:?usage: install.sh VENV}
pins=$(dirname "${BASH_SOURCE[0]}")/constraints.txt

cmp --quiet "$pins" "$venv/.ready" && exit
"${PYTHON:-python3}" -m venv --clear "$venv"
# transformers reads the checkpoint's tokenizer; without torch it does nothing else.
"$venv/bin/python" -m pip --quiet --no-input install --constraint "$pins" 'lm-eval[api]' transformers
# Written last, so that a half-made environment is made again.
cp "$pins" "$venv/.ready"
