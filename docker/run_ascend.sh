#!/usr/bin/env bash
# Runs a command in a container that has this host's Ascend devices and its driver.
#
#   bash docker/run_ascend.sh [--dry-run] [COMMAND...]
#
# --dry-run prints the command and starts nothing. The working folder is /work in the container. Variables: IMAGE
# (mindrlhf:ascend), DEVICES (0,1,2,3,4,5,6,7), SHM_SIZE (64g, of the memory that ranks share), ENGINE (docker), and
# DATA, a folder with models and data that has the same path in the container.
set -euo pipefail

start=(exec)
if [[ ${1:-} == --dry-run ]]; then
    start=(printf '%q ')
    trap echo EXIT # ends the line
    shift
fi

options=(--rm --interactive --network=host --ipc=private --shm-size="${SHM_SIZE:-64g}")
[[ -t 0 ]] && options+=(--tty)
IFS=, read -ra devices <<<"${DEVICES:-0,1,2,3,4,5,6,7}"
for device in "${devices[@]}"; do
    options+=(--device="/dev/davinci$device")
done
for device in davinci_manager devmm_svm hisi_hdc; do
    options+=(--device="/dev/$device")
done
# The driver with its program and settings; read-only, and at the places where CANN looks.
for path in /usr/local/Ascend/driver /usr/local/dcmi /usr/local/bin/npu-smi /usr/local/sbin/npu-smi \
    /etc/ascend_install.info /etc/hccn.conf; do
    [[ ! -e ${HOST_ROOT:-}$path ]] || options+=(--volume="$path:$path:ro")
done
options+=(--volume="$PWD:/work")
[[ -z ${DATA:-} ]] || options+=(--volume="$(realpath "$DATA"):$(realpath "$DATA")")

"${start[@]}" "${ENGINE:-docker}" run "${options[@]}" "${IMAGE:-mindrlhf:ascend}" "$@"
