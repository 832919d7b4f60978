#!/usr/bin/env bash
# etcd, kube-apiserver, kube-controller-manager and kube-scheduler, as processes of the host.
# Promises: when it returns, each answers its own readiness check. etcd and the controllers listen on loopback, the
# API server on the bridge's address only. Every write to the API is in $VCM_AUDIT_LOG.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_root_on_debian
need_programs control-plane curl "$VCM_ETCD" "$VCM_KUBE_APISERVER" "$VCM_KUBE_CONTROLLER_MANAGER" "$VCM_KUBE_SCHEDULER" "$VCM_KUBECTL"

pki=$VCM_STATE/pki
umask 077
mkdir -p "$VCM_STATE/config"

started=$(now)
etcd_url=https://127.0.0.1:$ETCD_CLIENT_PORT
# The data does not outlive the cluster, so etcd need not wait for the disk.
start_daemon etcd "$VCM_ETCD" --name=etcd --data-dir="$VCM_STATE/etcd" --unsafe-no-fsync --log-level=warn \
  --listen-client-urls="$etcd_url" --advertise-client-urls="$etcd_url" \
  --listen-peer-urls="https://127.0.0.1:$ETCD_PEER_PORT" --initial-advertise-peer-urls="https://127.0.0.1:$ETCD_PEER_PORT" \
  --initial-cluster="etcd=https://127.0.0.1:$ETCD_PEER_PORT" \
  --cert-file="$pki/etcd.crt" --key-file="$pki/etcd.key" --client-cert-auth --trusted-ca-file="$pki/etcd-ca.crt" \
  --peer-cert-file="$pki/etcd.crt" --peer-key-file="$pki/etcd.key" --peer-client-cert-auth --peer-trusted-ca-file="$pki/etcd-ca.crt"
wait_ready etcd 30 http_ok --cacert "$pki/etcd-ca.crt" --cert "$pki/etcd.crt" --key "$pki/etcd.key" "$etcd_url/readyz"
report etcd "$ETCD_VERSION" "$started"

started=$(now)
render audit-policy.yaml >"$VCM_STATE/config/audit-policy.yaml"
start_daemon kube-apiserver "$VCM_KUBE_APISERVER" \
  --bind-address="$NODE_IP" --advertise-address="$NODE_IP" --secure-port="$APISERVER_PORT" \
  --etcd-servers="$etcd_url" --etcd-cafile="$pki/etcd-ca.crt" \
  --etcd-certfile="$pki/apiserver-etcd-client.crt" --etcd-keyfile="$pki/apiserver-etcd-client.key" \
  --client-ca-file="$pki/ca.crt" --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
  --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP \
  --kubelet-client-certificate="$pki/apiserver-kubelet-client.crt" --kubelet-client-key="$pki/apiserver-kubelet-client.key" \
  --service-account-issuer="https://kubernetes.default.svc.$CLUSTER_DOMAIN" \
  --service-account-signing-key-file="$pki/service-account.key" --service-account-key-file="$pki/service-account.pub" \
  --requestheader-client-ca-file="$pki/front-proxy-ca.crt" --requestheader-allowed-names=front-proxy-client \
  --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
  --requestheader-extra-headers-prefix=X-Remote-Extra- \
  --proxy-client-cert-file="$pki/front-proxy-client.crt" --proxy-client-key-file="$pki/front-proxy-client.key" \
  --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
  --service-cluster-ip-range="$SERVICE_CIDR" --service-node-port-range="$NODE_PORT_RANGE" \
  --audit-policy-file="$VCM_STATE/config/audit-policy.yaml" --audit-log-path="$VCM_AUDIT_LOG" \
  --audit-log-maxsize=4096 --profiling=false
wait_ready kube-apiserver 90 kubectl_admin get --raw=/readyz
report kube-apiserver "v$KUBERNETES_VERSION" "$started"

started=$(now)
controllers=$VCM_STATE/kubeconfig/kube-controller-manager
start_daemon kube-controller-manager "$VCM_KUBE_CONTROLLER_MANAGER" \
  --bind-address=127.0.0.1 --secure-port="$CONTROLLER_MANAGER_PORT" \
  --kubeconfig="$controllers" --authentication-kubeconfig="$controllers" --authorization-kubeconfig="$controllers" \
  --leader-elect=false --use-service-account-credentials=true \
  --root-ca-file="$pki/ca.crt" --service-account-private-key-file="$pki/service-account.key" \
  --cluster-signing-cert-file="$pki/ca.crt" --cluster-signing-key-file="$pki/ca.key" \
  --flex-volume-plugin-dir="$VCM_STATE/kubelet/volume-plugins" \
  --cluster-cidr="$POD_CIDR" --allocate-node-cidrs=false --service-cluster-ip-range="$SERVICE_CIDR" --profiling=false
scheduler=$VCM_STATE/kubeconfig/kube-scheduler
start_daemon kube-scheduler "$VCM_KUBE_SCHEDULER" \
  --bind-address=127.0.0.1 --secure-port="$SCHEDULER_PORT" \
  --kubeconfig="$scheduler" --authentication-kubeconfig="$scheduler" --authorization-kubeconfig="$scheduler" \
  --leader-elect=false --profiling=false

# What the API server's own certificate may do on the kubelet: logs, exec, port-forward.
kubectl_admin create clusterrolebinding vc-manager-cluster:apiserver-kubelet-client \
  --clusterrole=system:kubelet-api-admin --user=kube-apiserver-kubelet-client >/dev/null ||
  fail_with_log kube-apiserver "it refused a role binding" "$(daemon_log kube-apiserver)"

wait_ready kube-controller-manager 60 http_ok -k "https://127.0.0.1:$CONTROLLER_MANAGER_PORT/healthz"
report kube-controller-manager "v$KUBERNETES_VERSION" "$started"
wait_ready kube-scheduler 60 http_ok -k "https://127.0.0.1:$SCHEDULER_PORT/healthz"
report kube-scheduler "v$KUBERNETES_VERSION" "$started"
