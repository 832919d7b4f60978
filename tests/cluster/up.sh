#!/usr/bin/env bash
# Brings up the one-node cluster. Root on Debian 12 only, after packages.sh, build-tools.sh and images.sh.
# Promises: when it returns, the node is Ready, DNS answers, and $VCM_KUBECONFIG is its administrator's. If that is so
# already, it does nothing. What a killed run left behind is cleared first; what is not the cluster's own is never touched.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_root_on_debian
need_programs up ip iptables curl jq openssl conntrack containerd runc "$VCM_CRANE" "$VCM_ETCD" "$VCM_KUBELET"
lock_cluster

started=$(now)
if reason=$("$VCM_CLUSTER_DIR/health.sh"); then
  echo "cluster: already up (KUBECONFIG=$VCM_KUBECONFIG)"
  exit
fi
if [ -e "$VCM_STATE" ] || ip link show "$BRIDGE" >/dev/null 2>&1; then
  echo "cluster: $reason; clearing what is left of it"
  "$VCM_CLUSTER_DIR/down.sh" --locked
fi
[ ${#VCM_STATE} -le 60 ] || die up "VCM_STATE is too long for the sockets below it (60 characters at most): $VCM_STATE"

# Two nodes cannot share a machine's iptables chains, so another one is not joined but left alone.
if iptables -w -t nat -n -L KUBE-SERVICES >/dev/null 2>&1; then
  die up "another Kubernetes node runs on this machine (iptables chain KUBE-SERVICES), or left its chains behind"
fi
for port in "$REGISTRY_PORT" "$ETCD_CLIENT_PORT" "$ETCD_PEER_PORT" "$CONTROLLER_MANAGER_PORT" "$SCHEDULER_PORT" \
  "$KUBELET_HEALTH_PORT" "$KUBE_PROXY_HEALTH_PORT" "$KUBE_PROXY_METRICS_PORT"; do
  if (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    die up "port $port is taken by another program; end it, or choose another port in versions.env"
  fi
done

mkdir -p "$VCM_STATE"
chmod 711 "$VCM_STATE"
"$VCM_CLUSTER_DIR/registry.sh"
"$VCM_CLUSTER_DIR/kernel.sh"
"$VCM_CLUSTER_DIR/network.sh"
"$VCM_CLUSTER_DIR/pki.sh"
"$VCM_CLUSTER_DIR/containerd.sh"
"$VCM_CLUSTER_DIR/control-plane.sh"
"$VCM_CLUSTER_DIR/node.sh"
"$VCM_CLUSTER_DIR/dns.sh"
cluster_identity >"$VCM_STATE/up"
report cluster "is up" "$started"
echo "export KUBECONFIG=$VCM_KUBECONFIG"
