#!/usr/bin/env bash
# Checks the crates the binary is made of against deny.toml: bans, licences, sources. Installs cargo-deny, pinned and
# locked, into the cache if it is not there.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
command -v cargo >/dev/null || die audit "Rust is not installed"

# Here, not in versions.env: another one does not make the cluster another one.
CARGO_DENY_VERSION=0.20.2
tool=$VCM_CACHE/tools/cargo-deny-$CARGO_DENY_VERSION
if [ ! -x "$tool/bin/cargo-deny" ]; then
  started=$(now)
  log=$VCM_CACHE/tools/cargo-deny.log
  mkdir -p "$VCM_CACHE/tools"
  CARGO_TARGET_DIR=$VCM_CACHE/tools/.cargo-deny-build \
    cargo install cargo-deny --version "=$CARGO_DENY_VERSION" --locked --root "$tool" >"$log" 2>&1 </dev/null ||
    fail_with_log audit "cargo-deny could not be installed" "$log"
  rm -rf "$VCM_CACHE/tools/.cargo-deny-build"
  report cargo-deny "$CARGO_DENY_VERSION built" "$started"
fi
cd "$VCM_CLUSTER_DIR/../.."
"$tool/bin/cargo-deny" --locked check bans licenses sources
