#!/usr/bin/env bash
# Builds vc-manager as one static binary and packs it, alone, into a container image.
# Promises: $VCM_CACHE/images/vc-manager.tar is an OCI archive (also fit for `docker load`) named IMAGE_VC_MANAGER;
# if the test cluster runs, its registry and its node have this very image. No root and no container engine needed.
# VCM_BINARY names a ready static binary to pack instead of building one.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=oci.sh
. "$VCM_CLUSTER_DIR/oci.sh"
need_programs image jq tar gzip readelf

target=x86_64-unknown-linux-gnu
binary=${VCM_BINARY:-$VCM_CACHE/target/$target/release/vc-manager}
started=$(now)
if [ -z "${VCM_BINARY:-}" ]; then
  command -v cargo >/dev/null || die image "Rust is not installed"
  use_cargo_target
  (cd "$VCM_CLUSTER_DIR/../.." &&
    RUSTFLAGS='-C target-feature=+crt-static' \
      cargo build --release --locked --target "$target" --bin vc-manager)
  report vc-manager "built" "$started"
fi

[ -x "$binary" ] || die image "$binary is not there"
if readelf -lW "$binary" | grep -q INTERP; then
  die image "$binary is not static: alone in an image it could not start"
fi

started=$(now)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$VCM_CACHE/images" "$work/root"
exec 8>"$VCM_CACHE/images/.lock"
flock 8

layout=$VCM_CACHE/images/vc-manager
install -m 755 "$binary" "$work/root/vc-manager"
chmod 755 "$work/root"
pack_image "$layout" "$IMAGE_VC_MANAGER" "$work/root" \
  '{"Entrypoint":["/vc-manager"],"Env":["'"$VCM_IMAGE_ENV"'"],"User":"65532:65532","WorkingDir":"/"}' gzip
tar -C "$layout" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf "$layout.tar.new" \
  blobs index.json manifest.json oci-layout
mv "$layout.tar.new" "$layout.tar"

where=packed
if daemon_pid registry >/dev/null; then
  push_image "$layout"
  where="packed and pushed"
fi
if [ "$(id -u)" = 0 ] && daemon_pid containerd >/dev/null; then
  import_image "$layout" >"$VCM_STATE/log/import.log" 2>&1 ||
    fail_with_log image "containerd refused it" "$VCM_STATE/log/import.log"
fi
report "image vc-manager" "$where" "$started"
