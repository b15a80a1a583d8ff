#!/usr/bin/env bash
# Makes a wheel that holds the C++ operators, compiled for the processors that people have: nothing is compiled where it
# is installed, and no compiler is needed there.
#
#   bash scripts/wheel.sh [FOLDER]      dist by default
#
# On x86-64 that is AVX2, AVX-512, and AVX-512 with bfloat16 products; on aarch64 any processor. `pip wheel .` makes one
# without them, for any machine. The tag is this machine's (linux_x86_64): a registry wants `auditwheel` to check it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
folder=$(realpath -m "${1:-dist}")
source "$root/scripts/steps.sh"
python=$root/.venv/bin/python

step "environment"
bash "$root/scripts/setup.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step "the package"  # MindSpore brings the program `wheel`
"$python" -m pip --quiet --disable-pip-version-check wheel --no-deps --wheel-dir "$work" "$root"
"$python" -m wheel unpack --dest "$work" "$work"/mindrlhf-*.whl

step "the operators"
"$python" -m mindrlhf.backend.native "$(echo "$work"/mindrlhf-*/)mindrlhf/backend/native/built"

step "the wheel"
rm "$work"/*.whl
"$python" -m wheel pack --dest-dir "$work" "$work"/mindrlhf-*/
platform=linux_$(uname -m)
"$python" -m wheel tags --remove --python-tag py3 --platform-tag "$platform" "$work"/*.whl
mkdir -p "$folder"
mv "$work"/*.whl "$folder"
echo "wheel: $(ls "$folder"/mindrlhf-*"$platform".whl)"
