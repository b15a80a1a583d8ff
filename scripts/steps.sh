# Title lines of a script's steps, and the step at which it stopped; sourced by the scripts that have several.
# shellcheck shell=bash

title="the start"
trap 'echo "$(basename "$0"): stopped at: $title" >&2' ERR
step() {
    title=$1
    printf '\n[%d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$title"
}
