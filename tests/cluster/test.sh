#!/usr/bin/env bash
# Every test, in stages, from a machine with nothing but Rust, Go, gcc, make and git: checks, then what the tests need,
# then the tests, the real cluster included; ends with what each stage took and with the closing lines of the tests.
# Usage: test.sh [cargo test argument...]   Root on Debian 12 only.
# Promises: the cluster is taken down at the end, whatever happened; what was built stays in the cache.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_root_on_debian
for program in cargo go gcc git; do
  command -v "$program" >/dev/null || die test "$program is not installed"
done
cd "$VCM_CLUSTER_DIR/../.."
# One folder for everything: clippy, tests and the image share what they can, and the checkout stays clean.
use_cargo_target
# The tests know the cluster by VCM_KUBECONFIG; one of the user's own is none of their business.
unset KUBECONFIG

log=$VCM_CACHE/test.log
mkdir -p "$VCM_CACHE"
: >"$log"
stages=()
began=$(now)
failed=

# stage NAME COMMAND...: runs it and notes how long it took. A failure ends the script.
stage() {
  local name=$1 started
  shift
  started=$(now)
  current=$name
  printf '\n== %s\n' "$name"
  "$@"
  current=
  noted "$name" "$started"
}

noted() {
  stages+=("$(printf '%-12s %6d s  %s' "$1" $((($(now) - $2 + 500) / 1000)) "${3:-}")")
  printf -- '-- %s took %d s\n' "$1" $((($(now) - $2 + 500) / 1000))
}

finish() {
  local status=$? started
  trap - EXIT INT TERM
  set +e
  if [ -n "${current:-}" ]; then
    failed=$current
    stages+=("$(printf '%-12s %8s  %s' "$current" "" FAILED)")
    if [ "$current" = tests ] && [ -d "$VCM_STATE/log" ]; then LINES=5 "$VCM_CLUSTER_DIR/logs.sh"; fi
  fi
  started=$(now)
  printf '\n== down\n'
  "$VCM_CLUSTER_DIR/down.sh" || status=1
  noted down "$started"
  printf '\n%-12s %8s\n' STAGE TOOK
  printf '%s\n' "${stages[@]}"
  printf '%-12s %6d s\n\n' total $((($(now) - began + 500) / 1000))
  # What cargo test said at the end of each program.
  grep -E '^ +(Running|Doc-tests) |^test result: |^test .* FAILED$|^error: ' "$log"
  [ -z "$failed" ] || printf '\nfailed: %s\n' "$failed"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

run_tests() { cargo test --locked --no-fail-fast "$@" 2>&1 | tee "$log"; }

stage packages "$VCM_CLUSTER_DIR/packages.sh"
# What fails soonest comes first.
stage lint "$VCM_CLUSTER_DIR/lint.sh"
stage compile cargo test --locked --no-run
stage tools "$VCM_CLUSTER_DIR/build-tools.sh"
stage images "$VCM_CLUSTER_DIR/images.sh"
stage image "$VCM_CLUSTER_DIR/image.sh"
stage fuzz "$VCM_CLUSTER_DIR/fuzz.sh"
stage cluster "$VCM_CLUSTER_DIR/up.sh"
stage tests run_tests "$@"
