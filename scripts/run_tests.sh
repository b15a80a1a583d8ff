#!/usr/bin/env bash
# Sets everything up and runs the tests, three at a time: most wait for processes of their own now and then.
#
#   bash scripts/run_tests.sh [PYTEST ARGUMENTS]      paths are relative to the project's folder; default: tests
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh" --dev
cd "$root"
export PATH="$root/.venv/bin:$PATH"
# A file's tests share what is slow to make; files begin in the order of tests/conftest.py.
exec python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "${@:-tests}"
