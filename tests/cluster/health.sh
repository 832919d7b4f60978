#!/usr/bin/env bash
# Says whether the cluster is up, whole, and the one these files describe. Exit status 0 if so; otherwise 1, and a
# line with the first thing that is not. Promises to change nothing.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

sick() {
  echo "$*"
  exit 1
}
[ -e "$VCM_STATE/up" ] || sick "the cluster is not up"
[ "$(<"$VCM_STATE/up")" = "$(cluster_identity)" ] || sick "the cluster is of another version"
for name in "${DAEMONS[@]}"; do
  daemon_pid "$name" >/dev/null || sick "$name does not run"
done
http_ok "http://$VCM_REGISTRY/v2/" || sick "the registry does not answer"
kubectl_admin --request-timeout=5s get --raw=/readyz >/dev/null 2>&1 || sick "kube-apiserver is not ready"
[ "$(kubectl_admin --request-timeout=5s get node "$NODE_NAME" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' 2>/dev/null)" = True ] ||
  sick "node $NODE_NAME is not Ready"
ctr -a "$VCM_CONTAINERD" -n k8s.io version >/dev/null 2>&1 || sick "containerd does not answer"
[ "$(dns_address "kubernetes.default.svc.$CLUSTER_DOMAIN" "$SERVICE_IP_DNS")" = "$SERVICE_IP_KUBERNETES" ] || sick "DNS does not answer"
