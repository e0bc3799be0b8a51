# Sourced by .ci/run and .ci/full: named steps with their times, and why a step did not run.
WORK=$(mktemp -d "${TMPDIR:-/tmp}/kvist-ci.XXXXXX")
TIMES=()
AT_END=()

ended() {
  local command
  for command in "${AT_END[@]}"; do $command || printf '=== %s failed at the end\n' "$command"; done
  rm -rf "$WORK"
}
trap ended EXIT

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

# finish [MINUTES WARM COLD]: the budget is what the steps may take with and without cached packages and programs.
finish() {
  printf '=== all steps passed in %s s' "$SECONDS"
  [ $# -eq 0 ] || printf ' (budget: %s min with everything cached, %s min without)' "$1" "$2"
  printf '\n'
  printf '  %s\n' "${TIMES[@]}"
}

# Why this machine can run no Kubernetes; nothing where it can.
no_kubernetes() {
  if [ "$(id -u)" != 0 ]; then echo "it needs root: it makes namespaces, mounts and cgroups"
  elif ! command -v go >/dev/null; then echo "its programs are built with Go, which is not on PATH"
  elif ! command -v apt-get >/dev/null; then echo "it needs packages of Debian, and there is no apt-get"
  elif ! unshare --mount --net --pid --fork true 2>/dev/null; then echo "this machine lets root make no namespaces"
  elif ! apt-get -qq update >/dev/null 2>&1; then echo "Debian's packages cannot be had here (apt-get update)"
  elif [ ! -x "$(e2e/build --path kubelet)" ] && [ "$SECONDS" -gt 2700 ]
  then echo "building it takes half an hour, and $((SECONDS / 60)) min of the budget are spent"
  elif [ ! -x "$(e2e/build --path kubelet)" ] && ! (cd e2e/tools/kubernetes && go mod download >/dev/null 2>&1)
  then echo "Go modules cannot be had here (go mod download)"
  fi
}

# A cluster that runs already is its user's: the gate neither uses nor ends it.
refuse_running_cluster() {
  local status=0
  e2e/cluster status >/dev/null 2>&1 || status=$?
  [ "$status" = 3 ] || [ "$(id -u)" != 0 ] || { echo "an e2e cluster is up on this machine: run make e2e-down first"; exit 1; }
}
