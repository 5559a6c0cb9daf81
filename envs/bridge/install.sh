#!/usr/bin/env bash
# Make a virtual environment that holds megatron-bridge, a converter that ours is compared with, in front of all that
# another environment holds.
#
# Usage: install.sh VENV BASE        (BASE: the workflow's own environment, on Python 3.12)
set -euo pipefail

venv=${1:?usage: install.sh VENV BASE}
base=$(cd "${2:?usage: install.sh VENV BASE}" && pwd)
pins=$(dirname "${BASH_SOURCE[0]}")/requirements.txt

cmp --quiet "$pins" "$venv/.ready" && exit
"$base/bin/python" -m venv --clear "$venv"
# No dependency resolution: it asks for CUDA's packages, which nothing here calls.
"$venv/bin/python" -m pip --quiet --no-input install --no-deps --requirement "$pins"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
behind=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$behind')" >"$site/behind.pth"
cp "$pins" "$venv/.ready"
