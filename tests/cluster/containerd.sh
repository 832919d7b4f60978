#!/usr/bin/env bash
# A containerd of our own: its configuration, root, state and socket are below $VCM_STATE.
# Promises: when it returns, its CRI service answers and the images of the first pods are there.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=oci.sh
. "$VCM_CLUSTER_DIR/oci.sh"
need_root_on_debian
need_programs containerd containerd containerd-shim-runc-v2 ctr runc
[ -x /usr/lib/cni/bridge ] || die containerd "/usr/lib/cni/bridge is missing: run 'make packages' first"

started=$(now)
mkdir -p "$VCM_STATE/config/certs.d/registry.k8s.io" "$VCM_STATE/run" "$VCM_STATE/log"
render containerd.toml >"$VCM_STATE/config/containerd.toml"
render hosts.toml >"$VCM_STATE/config/certs.d/registry.k8s.io/hosts.toml"
# Where containerd and the CNI library put things whatever they are told.
own_folder /run/containerd /var/lib/cni
start_daemon containerd containerd --config "$VCM_STATE/config/containerd.toml"
wait_ready containerd 30 ctr -a "$VCM_CONTAINERD" -n k8s.io plugins ls 'id==cri,status==ok'
report containerd "$(containerd --version | cut -d' ' -f3)" "$started"

started=$(now)
log=$VCM_STATE/log/import.log
for layout in pause coredns; do
  import_image "$VCM_CACHE/images/$layout" >>"$log" 2>&1 || fail_with_log containerd "it refused the image $layout" "$log"
done
# The others are needed only by the first tenant.
(
  for reference in "$VCM_CACHE"/images/*.reference; do
    layout=${reference%.reference}
    case $layout in */pause | */coredns) continue ;; esac
    import_image "$layout" || true
  done
) </dev/null >>"$log" 2>&1 9>&- &
disown
report images "imported" "$started"
