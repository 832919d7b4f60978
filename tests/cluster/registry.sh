#!/usr/bin/env bash
# Starts the registry on loopback that the node pulls from, and fills it with every packed image.
# Promises: when it returns, each image under $VCM_CACHE/images can be pulled. The registry keeps names in memory
# only, so each start pushes all images; their blobs are in its store already.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=oci.sh
. "$VCM_CLUSTER_DIR/oci.sh"
need_programs registry "$VCM_CRANE" curl

started=$(now)
if ! daemon_pid registry >/dev/null; then
  if http_ok "http://$VCM_REGISTRY/v2/"; then
    die registry "another program answers on $VCM_REGISTRY: end it, or change REGISTRY_PORT in versions.env"
  fi
  # Its store is begun anew with links to the packed layers, so that nothing is copied and nothing old stays.
  rm -rf "$VCM_CACHE/registry"
  mkdir -p "$VCM_CACHE/registry/sha256"
  for layout in "$VCM_CACHE"/images/*/; do
    [ ! -d "$layout/blobs/sha256" ] || ln -f "$layout"/blobs/sha256/* "$VCM_CACHE/registry/sha256/"
  done
  start_daemon registry "$VCM_CRANE" registry serve --address "$VCM_REGISTRY" --disk "$VCM_CACHE/registry"
fi
wait_ready registry 20 http_ok "http://$VCM_REGISTRY/v2/"

count=0
for reference in "$VCM_CACHE"/images/*.reference; do
  [ -e "$reference" ] || continue
  push_image "${reference%.reference}"
  count=$((count + 1))
done
report registry "$count images" "$started"
