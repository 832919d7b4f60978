#!/usr/bin/env bash
# Fuzzes the decoder of reviews and all rules that are pure functions, with libFuzzer, for a while.
# Usage: fuzz.sh [libFuzzer argument...]
#   SECONDS_=n    how long (60)
#   MEMORY=n      the most it may take, in MiB (512)
# Promises: an input that makes it panic, take too long or too much memory ends it with an error, and is left in
# $VCM_CACHE/fuzz/crashes. To try one again: fuzz.sh FILE. Inputs found on the way are kept for the next run.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
for program in cargo g++; do
  command -v "$program" >/dev/null || die fuzz "$program is missing: run 'make packages' first"
done
folder=$(cd "$VCM_CLUSTER_DIR/../../fuzz" && pwd)

target=review
triple=x86_64-unknown-linux-gnu
seconds=${SECONDS_:-60}
corpus=$VCM_CACHE/fuzz/$target
crashes=$VCM_CACHE/fuzz/crashes
log=$VCM_CACHE/fuzz/$target.log
mkdir -p "$corpus" "$crashes"

# What cargo-fuzz passes, as far as a stable compiler knows it: coverage, but no address sanitizer. There is no unsafe
# code to sanitize.
flags=(
  --cfg fuzzing -Ccodegen-units=1 -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
  -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-simplifycfg-branch-fold-threshold=0
)
started=$(now)
# With --target the flags are not those of build scripts and macros. A folder apart: they are those of no other build.
export CARGO_TARGET_DIR=$VCM_CACHE/fuzz-target
RUSTFLAGS="${flags[*]}" cargo build --locked --quiet --manifest-path="$folder/Cargo.toml" --target "$triple" --bin "$target" ||
  die fuzz "it could not be built; if fuzz/Cargo.lock is out of date: (cd fuzz && cp ../Cargo.lock . && cargo update --workspace)"
report fuzz built "$started"

started=$(now)
arguments=("$@")
[ $# -gt 0 ] || arguments=("-max_total_time=$seconds" "$corpus" "$folder/seeds/$target")
if ! "$CARGO_TARGET_DIR/$triple/debug/$target" -rss_limit_mb="${MEMORY:-512}" -timeout=10 -max_len=65536 -print_final_stats=1 \
  -artifact_prefix="$crashes/" "${arguments[@]}" >"$log" 2>&1; then
  grep -E 'panicked at|ERROR: libFuzzer|Test unit written' "$log" >&2 || true
  fail_with_log fuzz "an input fails, see $crashes" "$log"
fi
report fuzz "$(awk '/number_of_executed_units/ { print $2 " inputs" }' "$log")" "$started"
awk '/peak_rss_mb/ { print "fuzz: at most " $2 " MiB" }' "$log"
