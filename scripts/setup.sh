#!/usr/bin/env bash
# Makes .venv in the project's folder and installs the project there; done once, it returns at once.
#
#   bash scripts/setup.sh [--dev] [--mindspore VERSION]
#
# --dev        also what the tests and the documentation need (pytest, ruff, MindFormers, MkDocs)
# --mindspore  in place of constraints.txt's version, from now on; without MindFormers, which installs alongside that one only
#
# All other versions are those of constraints.txt.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv

dev="" mindspore=$(cat "$venv/mindspore" 2>/dev/null || true)
while (($#)); do
    case "$1=${2-}" in
        --dev=*) dev=dev ;;
        --mindspore=[1-9]*) mindspore=$2; shift ;;
        *) echo "setup.sh: $1 ${2-} is not understood; give --dev or --mindspore VERSION" >&2; exit 2 ;;
    esac
    shift
done
extra=${dev:+${mindspore:+tests}}
extra=${extra:-$dev}

# What an installation was made from. The folder counts too: the commands in .venv hold its path.
source="$root $mindspore $(cat "$root/setup.py" "$root/constraints.txt" | cksum)"

# installed NAME: whether .venv runs, and holds what is asked for, from today's files.
installed() {
    "$venv/bin/python" -c "" 2>/dev/null && [[ "$(cat "$venv/installed-$1" 2>/dev/null)" == "$source" ]]
}

# Ends with 0 in a Python that MindSpore has wheels for.
fits='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'

find_python() {
    local candidate
    while read -r candidate; do
        if "$candidate" -c "import ensurepip, venv; $fits" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done < <(type -ap python3.11 python3.12 python3.10 python3 python)
    echo "setup.sh: no Python 3.10, 3.11 or 3.12 with its venv module is on the PATH; install one (Ubuntu and Debian:" \
        "apt install python3 python3-venv) and run this again" >&2
    return 1
}

if installed "${extra:-base}" || installed dev || installed tests; then
    exit 0
fi

# An environment that was moved with its folder, or made by other means, is not one to build on.
if ! { "$venv/bin/python" -c "import pip; $fits" &&
    grep -qF " $venv" "$venv/pyvenv.cfg"; } 2>/dev/null; then
    if [[ -L "$venv" ]]; then
        echo "setup.sh: $venv is a link to another environment, which would be emptied; remove the link and run this again" >&2
        exit 2
    fi
    python=$(find_python)
    echo "setup: new environment $venv from $python ($("$python" --version)); it will hold 3 GB," \
        "the largest part to fetch is MindSpore with 800 MB"
    "$python" -m venv --clear "$venv"
fi

echo "setup: installing the project${extra:+ and what its tests need}"
cd "$root"
constraints=constraints.txt
if [[ -n "$mindspore" ]]; then
    constraints=$venv/constraints.txt
    sed "s/^mindspore==.*/mindspore==$mindspore/; /^mindformers==/d" constraints.txt >"$constraints"
fi
# Without byte code, which takes a third of the time: Python makes it for what it imports, a small part. Here for what
# every run imports, because containers often tell Python to write none: each start would be seconds longer.
"$venv/bin/python" -m pip --disable-pip-version-check install --no-compile \
    --constraint "$constraints" --editable ".${extra:+[$extra]}"
PYTHONDONTWRITEBYTECODE="" "$venv/bin/python" -c "import mindrlhf.cli, mindrlhf.trainer.build"
echo "$mindspore" >"$venv/mindspore"
echo "$source" >"$venv/installed-${extra:-base}"
echo "setup: done in $SECONDS s"
