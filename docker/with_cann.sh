#!/usr/bin/env bash
# Runs a command with CANN's libraries: the entry of the image of Dockerfile.ascend.
root=${ASCEND_ROOT:-/usr/local/Ascend}
found=""
for file in "$root"/ascend-toolkit/set_env.sh "$root"/cann/set_env.sh; do
    if [[ -f $file ]]; then
        found=$file
        break
    fi
done
if [[ -z $found ]]; then
    echo "with_cann.sh: $root has no ascend-toolkit/set_env.sh or cann/set_env.sh; build the image from one with CANN" >&2
    exit 2
fi
# shellcheck disable=SC1090
source "$found"
export LD_LIBRARY_PATH=$root/driver/lib64/driver:$root/driver/lib64/common:${LD_LIBRARY_PATH:-}
exec "$@"
