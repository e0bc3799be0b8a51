# Sourced by .ci/run and .ci/full: named steps with their times, and why a step did not run.
WORK=$(mktemp -d "${TMPDIR:-/tmp}/kvist-ci.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
TIMES=()

step() {
  local name=$1 began=$SECONDS
  shift
  printf '=== %s: %s\n' "$name" "$*"
  "$@" || { local status=$?; printf '=== %s FAILED (exit %s) after %s s\n' "$name" "$status" "$((SECONDS - began))"; exit "$status"; }
  TIMES+=("$name $((SECONDS - began)) s")
  printf '=== %s: %s s\n' "$name" "$((SECONDS - began))"
}

skipped() {
  printf '=== %s SKIPPED: %s\n' "$1" "$2"
  TIMES+=("$1 skipped")
}

finish() {
  printf '=== all steps passed in %s s\n' "$SECONDS"
  printf '  %s\n' "${TIMES[@]}"
}
