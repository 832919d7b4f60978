#!/usr/bin/env bash
# CoreDNS as the cluster's DNS, in a pod behind SERVICE_IP_DNS.
# Promises: when it returns, it has answered for a Service, through its ClusterIP.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_programs dns "$VCM_KUBECTL" od timeout

started=$(now)
log=$VCM_STATE/log/coredns.log
# Names outside the cluster go to the machine's resolver, unless that listens on loopback, which a pod does not reach.
DNS_FORWARD='# The machine has no resolver that a pod could reach.'
if awk '$1 == "nameserver" && $2 !~ /^(127\.|::1)/ { found = 1 } END { exit !found }' /etc/resolv.conf 2>/dev/null; then
  # shellcheck disable=SC2034  # for render
  DNS_FORWARD='forward . /etc/resolv.conf'
fi
render coredns.yaml >"$VCM_STATE/config/coredns.yaml"
kubectl_admin apply --server-side -f "$VCM_STATE/config/coredns.yaml" >"$log" 2>&1 || fail_with_log coredns "its manifest was refused" "$log"

answers() { [ "$(dns_address "kubernetes.default.svc.$CLUSTER_DOMAIN" "$SERVICE_IP_DNS")" = "$SERVICE_IP_KUBERNETES" ]; }
deadline=$((SECONDS + 90))
until answers; do
  if [ "$SECONDS" -ge "$deadline" ]; then
    {
      kubectl_admin -n kube-system get pods,endpointslices -o wide
      kubectl_admin -n kube-system describe pods -l k8s-app=kube-dns
      kubectl_admin -n kube-system logs -l k8s-app=kube-dns --tail=20
    } >>"$log" 2>&1 || true
    fail_with_log coredns "no answer from $SERVICE_IP_DNS after 90 s" "$log"
  fi
  sleep 0.1
done
report coredns "v$COREDNS_VERSION answers" "$started"
