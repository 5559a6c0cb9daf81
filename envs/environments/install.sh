#!/usr/bin/env bash
# Make virtual environments with what our environments are tested against: servers of OpenEnv and NeMo Gym, and verifiers.
# Their requirements exclude each other, and ours.
#
# Usage: install.sh FOLDER PYTHON        (PYTHON: 3.12; makes FOLDER/openenv, FOLDER/nemo-gym and FOLDER/verifiers)
set -euo pipefail

folder=${1:?usage: install.sh FOLDER PYTHON}
python=${2:?usage: install.sh FOLDER PYTHON}

for kind in openenv nemo-gym verifiers; do
    pins=$(dirname "${BASH_SOURCE[0]}")/$kind.txt
    cmp --quiet "$pins" "$folder/$kind/.ready" && continue
    "$python" -m venv --clear "$folder/$kind"
    # Everything is pinned, so nothing has to be resolved.
    "$folder/$kind/bin/python" -m pip --quiet --no-input install --no-deps --requirement "$pins"
    # Written last, so that a half-made environment is made again.
    cp "$pins" "$folder/$kind/.ready"
done
