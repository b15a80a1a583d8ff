#!/usr/bin/env bash
# Runs a command with the project in a Debian for aarch64, whose processor is emulated. On x86-64 with Debian or Ubuntu, as root.
#
#   bash scripts/emulated_aarch64.sh SYSTEM COMMAND [ARGUMENT...]
#   bash scripts/emulated_aarch64.sh /var/tmp/aarch64 python -m pytest tests/models/test_halves.py
#
# SYSTEM is a folder, made at first use from Debian's packages and the wheels of constraints.txt: 5 GB, half an hour.
# The project's files are copied into it before each command, and commands begin in their folder there, /opt/mindrlhf.
# Emulation shows results, not speed.
set -euo pipefail

if (($# < 2)); then
    echo "emulated_aarch64.sh: give a folder and a command" >&2
    exit 2
fi
for program in mmdebstrap arch-test qemu-aarch64-static update-binfmts; do
    if ! type -P "$program" >/dev/null; then
        echo "emulated_aarch64.sh: $program is missing; install it with" \
            "apt install mmdebstrap arch-test qemu-user-static binfmt-support" >&2
        exit 2
    fi
done
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
system=$1
shift

if [[ ! -e "$system/usr/bin/g++" ]]; then
    mmdebstrap --arch=arm64 --variant=minbase --include=python3,python3-venv,g++,iproute2,procps,ca-certificates \
        bookworm "$system"
fi
mkdir -p "$system/opt/mindrlhf"
tar -C "$project" --exclude=./.git --exclude=./.venv --exclude=./out --exclude=__pycache__ -c . |
    tar -C "$system/opt/mindrlhf" --no-same-owner -x
cp /etc/resolv.conf "$system/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$system/etc/ssl/certs/"  # with what this machine trusts in addition

# Mounts end with the command, because they are in a namespace of their own.
inside='
    mount -t proc proc "$0/proc"
    mount --rbind /dev "$0/dev"
    exec chroot "$0" env -i PATH=/opt/mindrlhf/.venv/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root LANG=C.UTF-8 GLOG_v=3 \
        PIP_CERT=/etc/ssl/certs/ca-certificates.crt sh -euc "
            cd /opt/mindrlhf
            bash scripts/setup.sh
            python -c \"import hypothesis, pytest, pytest_timeout\" 2>/dev/null ||
                pip install --quiet --constraint constraints.txt hypothesis pytest pytest-timeout
            exec \"\$@\"" sh "$@"'
unshare --mount bash -euc "$inside" "$system" "$@"
