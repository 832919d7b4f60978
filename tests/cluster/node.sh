#!/usr/bin/env bash
# The kubelet and kube-proxy: one node that runs pods.
# Promises: when it returns, the node is Ready and kube-proxy has written its rules. Both keep what they store below
# $VCM_STATE; all pods' cgroups are below /$CGROUP.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_root_on_debian
need_programs node iptables conntrack mount "$VCM_KUBELET" "$VCM_KUBE_PROXY" "$VCM_KUBECTL"

# make_cgroup: the root of the pods' cgroups, in every hierarchy (version 1) or in the one (version 2).
make_cgroup() {
  local hierarchy controllers
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p "/sys/fs/cgroup/$CGROUP"
    for hierarchy in /sys/fs/cgroup "/sys/fs/cgroup/$CGROUP"; do
      controllers=$(sed 's/\(^\| \)/\1+/g' "$hierarchy/cgroup.controllers")
      [ "$controllers" = + ] || echo "$controllers" >"$hierarchy/cgroup.subtree_control"
    done
    return
  fi
  for hierarchy in /sys/fs/cgroup/*/; do
    [ ! -e "$hierarchy/cgroup.procs" ] || mkdir -p "$hierarchy/$CGROUP"
    if [ -e "$hierarchy/$CGROUP/cpuset.cpus" ]; then
      cat "$hierarchy/cpuset.cpus" >"$hierarchy/$CGROUP/cpuset.cpus"
      cat "$hierarchy/cpuset.mems" >"$hierarchy/$CGROUP/cpuset.mems"
    fi
  done
}

started=$(now)
make_cgroup
mkdir -p "$VCM_STATE/config"
render kubelet.yaml >"$VCM_STATE/config/kubelet.yaml"
render kube-proxy.yaml >"$VCM_STATE/config/kube-proxy.yaml"
# The kubelet has these two wherever its root folder is.
own_folder /var/lib/kubelet /var/log/containers
start_daemon kubelet "$VCM_KUBELET" --config="$VCM_STATE/config/kubelet.yaml" \
  --kubeconfig="$VCM_STATE/kubeconfig/kubelet" --root-dir="$VCM_STATE/kubelet" --cert-dir="$VCM_STATE/kubelet/pki" \
  --hostname-override="$NODE_NAME" --node-ip="$NODE_IP"
start_daemon kube-proxy "$VCM_KUBE_PROXY" --config="$VCM_STATE/config/kube-proxy.yaml"

node_ready() {
  [ "$(kubectl_admin get node "$NODE_NAME" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status} {.spec.taints}')" = "True " ]
}
wait_ready kube-proxy 60 http_ok "http://127.0.0.1:$KUBE_PROXY_HEALTH_PORT/healthz"
wait_ready kube-proxy 60 iptables -w -t nat -n -L KUBE-SERVICES
report kube-proxy "v$KUBERNETES_VERSION" "$started"
wait_ready kubelet 60 http_ok "http://127.0.0.1:$KUBELET_HEALTH_PORT/healthz"
wait_ready kubelet 90 node_ready
report kubelet "$NODE_NAME is Ready" "$started"
