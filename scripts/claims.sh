#!/usr/bin/env bash
# Tries what papers and suites claim about GRPO and its relatives on a practice task: a table with a verdict for each claim.
#
#   bash scripts/claims.sh [CLAIM...] [--seeds N] [--steps N] [--processes N] [--out DIR] [--list]
#
# CLAIM         names of claims, as --list shows them (default: all)
# --seeds       of everything drawn (default 5: 0 to 4)
# --steps       of each run, for a trial (default: as benchmarks/claims/claims.yaml says)
# --processes   arms that run at once (default 1); the table does not depend on it
# --out         folder of all that is written (default out/claims in the project's folder)
#
# The claims are in benchmarks/claims/claims.yaml, the program is benchmarks/claims/run.py. A run that is finished is not
# made again; after Ctrl-C the same command goes on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$(command -v mindrlhf) || {
    bash "$root/scripts/setup.sh"
    python=$root/.venv/bin/mindrlhf
}
exec "$(dirname "$python")/python" "$root/benchmarks/claims/run.py" "$@"
