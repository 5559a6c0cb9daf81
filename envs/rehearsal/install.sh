#!/usr/bin/env bash
# Make a virtual environment in which code for GPUs runs without one: a CUDA build of torch and Transformer Engine's
# Python, in front of all that another environment holds, and the two libraries that say that devices are there.
#
# Usage: install.sh VENV BASE        (BASE: the workflow's own environment; gcc is needed)
set -euo pipefail

venv=${1:?usage: install.sh VENV BASE}
base=$(cd "${2:?usage: install.sh VENV BASE}" && pwd)
recipe=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
wanted='^(torch|triton|nvidia-|cuda-|transformer-engine|einops|nvdlfw-inspect|onnx|ml-dtypes|tilelang|fla-core|apache-tvm|cloudpickle|z3)'

pins=$(grep -E "$wanted" "$recipe/../gpu/trainer.txt")
# Other pins than those that it was made of make it anew.
[[ -f $venv/.ready && $(<"$venv/.ready") == "$pins" ]] && exit
"$base/bin/python" -m venv --clear "$venv"
# The versions are those of the GPU image. No dependency resolution: they are the whole set.
"$venv/bin/python" -m pip --quiet --no-input install --no-deps --requirement \
    <(printf '%s\n' "$pins")
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
behind=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$behind')" >"$site/behind.pth"
mkdir -p "$venv/fake"
# Triton brings the headers of CUDA's runtime.
gcc -shared -fPIC -I "$site/triton/backends/nvidia/include" -o "$venv/fake/libfakecuda.so" "$recipe/runtime.c"
gcc -shared -fPIC -o "$venv/fake/libcuda.so.1" "$recipe/driver.c"
printf '%s\n' "$pins" >"$venv/.ready"
