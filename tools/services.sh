#!/usr/bin/env bash
# Real servers that tests and benches of shared tiers use: redis-server (Debian package) and versitygw (an S3 server,
# built from its pinned Go module into the cache of tools). Does nothing where they are; what cannot be had here is
# named, and the tests that need it are skipped with that reason.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3

redis() {
  if command -v redis-server >/dev/null; then
    echo "services: redis-server is $(command -v redis-server)"
  elif [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "services: redis-server is missing: install it (Debian: apt-get install redis-server)"
  else
    echo "services: installing redis-server"
    # The package starts a server of its own; a policy that forbids it holds for this installation only.
    local policy=/usr/sbin/policy-rc.d made=
    if [ ! -e "$policy" ]; then
      printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy" && made=yes
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -q redis-server >/dev/null || { apt-get update -q >/dev/null && apt-get install -y -q redis-server >/dev/null; } ||
      echo "services: redis-server could not be installed: tests with a real Redis are skipped"
    [ -z "$made" ] || rm -f "$policy"
  fi
}

s3() {
  local path
  path=$("$python" e2e/build --path versitygw) || return 0
  if [ -x "$path" ]; then
    echo "services: versitygw is $path"
  elif ! command -v go >/dev/null; then
    echo "services: versitygw is missing and there is no Go to build it: tests with a real S3 server are skipped"
  else
    echo "services: building versitygw (about a minute)"
    "$python" e2e/build versitygw ||
      echo "services: versitygw could not be built: tests with a real S3 server are skipped"
  fi
}

redis
s3
