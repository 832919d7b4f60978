#!/usr/bin/env bash
# Packs the images the cluster and its tenants run, from the binaries of build-tools.sh, without a container engine.
# Promises: an OCI layout per image under $VCM_CACHE/images, packed anew only if its binaries changed; if the
# cluster's registry runs, they are in it too.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=oci.sh
. "$VCM_CLUSTER_DIR/oci.sh"
need_programs images jq gcc tar "$VCM_CRANE"

path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$VCM_CACHE/images"
exec 8>"$VCM_CACHE/images/.lock"
flock 8

# image NAME REFERENCE BINARY...: a file system of /usr/local/bin/BINARY... and an empty /tmp; the first
# binary is the entrypoint.
image() {
  local name=$1 reference=$2 layout=$VCM_CACHE/images/$1 key started root=$work/root config
  shift 2
  started=$(now)
  key="$reference $({ cat "$@" "$VCM_CLUSTER_DIR/oci.sh" "$VCM_CLUSTER_DIR/images.sh"; } | sha256sum)"
  if [ "$(cat "$layout/.key" 2>/dev/null)" = "$key" ]; then
    kept=$((kept + 1))
    return
  fi
  mkdir -p "$root/usr/local/bin" "$root/tmp"
  chmod 755 "$root" "$root/usr" "$root/usr/local" "$root/usr/local/bin"
  chmod 1777 "$root/tmp"
  install -m 755 "$@" "$root/usr/local/bin/"
  config=$(jq -cn --arg path "PATH=$path" --arg binary "/usr/local/bin/$(basename "$1")" \
    '{Env: [$path], Entrypoint: [$binary], WorkingDir: "/"}')
  pack_image "$layout" "$reference" "$root" "$config"
  echo "$key" >"$layout/.key"
  rm -rf "$root"
  if daemon_pid registry >/dev/null; then push_image "$layout"; fi
  report "image $name" "${reference##*:}" "$started"
}

kept=0
gcc -Os -static -s -Wall -Wextra -Werror -ffile-prefix-map="$VCM_CLUSTER_DIR"=. -Wl,--build-id=none \
  -o "$work/pause" "$VCM_CLUSTER_DIR/images/pause.c"
need_programs images "$VCM_ETCD" "$VCM_ETCDCTL" "$VCM_COREDNS" "$VCM_KUBE_APISERVER" "$VCM_KUBE_NEXT_DIR/kube-apiserver"

image pause "$IMAGE_PAUSE" "$work/pause"
image coredns "$IMAGE_COREDNS" "$VCM_COREDNS"
image etcd "$IMAGE_ETCD" "$VCM_ETCD" "$VCM_ETCDCTL"
image kubectl "$IMAGE_KUBECTL" "$VCM_KUBECTL"
image kube-apiserver "$IMAGE_KUBE_APISERVER" "$VCM_KUBE_APISERVER"
image kube-controller-manager "$IMAGE_KUBE_CONTROLLER_MANAGER" "$VCM_KUBE_CONTROLLER_MANAGER"
image kube-apiserver-next "$IMAGE_KUBE_APISERVER_NEXT" "$VCM_KUBE_NEXT_DIR/kube-apiserver"
image kube-controller-manager-next "$IMAGE_KUBE_CONTROLLER_MANAGER_NEXT" "$VCM_KUBE_NEXT_DIR/kube-controller-manager"
[ "$kept" = 0 ] || echo "images: $kept kept"
