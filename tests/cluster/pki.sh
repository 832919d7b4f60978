#!/usr/bin/env bash
# The cluster's keys and certificates: three authorities (cluster, etcd, front proxy), one certificate for each
# component, and the kubeconfigs made of them. Written anew for each cluster, below $VCM_STATE/pki.
# Promises: keys are readable by root only and never leave the state folder.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_programs pki openssl

started=$(now)
pki=$VCM_STATE/pki
log=$VCM_STATE/log/pki.log
days=365
umask 077
mkdir -p "$pki" "$VCM_STATE/kubeconfig" "$VCM_STATE/log"
: >"$log"

# key FILE
key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>>"$log"; }

# authority NAME COMMON-NAME
authority() {
  key "$pki/$1.key"
  openssl req -x509 -new -sha256 -key "$pki/$1.key" -days "$days" -subj "/CN=$2" -out "$pki/$1.crt" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature 2>>"$log"
}

# certificate AUTHORITY NAME SUBJECT USAGE [ALTERNATIVE-NAMES]
certificate() {
  key "$pki/$2.key"
  {
    echo 'basicConstraints=critical,CA:FALSE'
    echo 'keyUsage=critical,digitalSignature,keyEncipherment'
    echo "extendedKeyUsage=$4"
    echo 'authorityKeyIdentifier=keyid'
    [ -z "${5:-}" ] || echo "subjectAltName=$5"
  } >"$pki/$2.ext"
  openssl req -new -sha256 -key "$pki/$2.key" -subj "$3" 2>>"$log" |
    openssl x509 -req -sha256 -CA "$pki/$1.crt" -CAkey "$pki/$1.key" -set_serial "0x$(openssl rand -hex 16 | sed 's/^./4/')" \
      -days "$days" -extfile "$pki/$2.ext" -out "$pki/$2.crt" 2>>"$log"
  rm "$pki/$2.ext"
}

# kubeconfig FILE NAME: for the certificate NAME.
kubeconfig() {
  local file=$1 name=$2 ca certificate key
  ca=$(base64 -w0 "$pki/ca.crt")
  certificate=$(base64 -w0 "$pki/$name.crt")
  key=$(base64 -w0 "$pki/$name.key")
  cat >"$file.new" <<EOF
apiVersion: v1
kind: Config
clusters:
- name: vc-manager-cluster
  cluster:
    server: https://$NODE_IP:$APISERVER_PORT
    certificate-authority-data: $ca
users:
- name: $name
  user:
    client-certificate-data: $certificate
    client-key-data: $key
contexts:
- name: $name@vc-manager-cluster
  context:
    cluster: vc-manager-cluster
    user: $name
current-context: $name@vc-manager-cluster
EOF
  mv "$file.new" "$file"
}

authority ca vc-manager-cluster-ca
authority etcd-ca vc-manager-cluster-etcd-ca
authority front-proxy-ca vc-manager-cluster-front-proxy-ca

certificate etcd-ca etcd /CN=etcd serverAuth,clientAuth "DNS:localhost,IP:127.0.0.1"
certificate etcd-ca apiserver-etcd-client /CN=kube-apiserver clientAuth
certificate front-proxy-ca front-proxy-client /CN=front-proxy-client clientAuth
certificate ca apiserver /CN=kube-apiserver serverAuth \
  "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.$CLUSTER_DOMAIN,DNS:localhost,IP:127.0.0.1,IP:$NODE_IP,IP:$SERVICE_IP_KUBERNETES"
certificate ca apiserver-kubelet-client /CN=kube-apiserver-kubelet-client clientAuth
certificate ca kubelet-server "/O=system:nodes/CN=system:node:$NODE_NAME" serverAuth "DNS:$NODE_NAME,IP:$NODE_IP"

certificate ca kubelet "/O=system:nodes/CN=system:node:$NODE_NAME" clientAuth
certificate ca kube-controller-manager /CN=system:kube-controller-manager clientAuth
certificate ca kube-scheduler /CN=system:kube-scheduler clientAuth
certificate ca kube-proxy /CN=system:kube-proxy clientAuth
certificate ca admin /O=system:masters/CN=vc-manager-cluster-admin clientAuth
for name in kubelet kube-controller-manager kube-scheduler kube-proxy; do
  kubeconfig "$VCM_STATE/kubeconfig/$name" "$name"
done
kubeconfig "$VCM_KUBECONFIG" admin

key "$pki/service-account.key"
openssl pkey -in "$pki/service-account.key" -pubout -out "$pki/service-account.pub" 2>>"$log"
openssl verify -CAfile "$pki/ca.crt" "$pki/apiserver.crt" >>"$log" 2>&1 || fail_with_log pki "the certificates do not verify" "$log"
report pki "3 authorities" "$started"
