#!/usr/bin/env bash
# Checks form: rustfmt, clippy on everything with warnings as errors, shellcheck. Promises to change nothing.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_programs lint cargo shellcheck
cd "$VCM_CLUSTER_DIR/../.."
use_cargo_target

shellcheck -x --source-path=SCRIPTDIR .ci/run tests/cluster/*.sh tests/cluster/demo/*.sh
cargo fmt --check
cargo fmt --check --manifest-path=fuzz/Cargo.toml
cargo clippy --locked --quiet --all-targets -- -D warnings
echo "lint: nothing to complain about"
