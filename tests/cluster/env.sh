# shellcheck shell=bash
# Sourced by every script of the cluster: the pinned versions, where things are kept, and where the
# built programs are. Promises to only set variables and define functions: it starts and writes nothing.

VCM_CLUSTER_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export VCM_CLUSTER_DIR

# shellcheck source=versions.env
. "$VCM_CLUSTER_DIR/versions.env"
# shellcheck source=lib.sh
. "$VCM_CLUSTER_DIR/lib.sh"

# Kept between runs: built tools, packed images, cargo's target folder.
export VCM_CACHE=${VCM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vc-manager}
# Gone with `make down`: everything of the running cluster.
export VCM_STATE=${VCM_STATE:-/var/lib/vc-manager-cluster}

VCM_KUBE_DIR=$VCM_CACHE/tools/kubernetes-1.34-$KUBERNETES_VERSION
VCM_KUBE_NEXT_DIR=$VCM_CACHE/tools/kubernetes-1.35-$KUBERNETES_NEXT_VERSION
VCM_ETCD_DIR=$VCM_CACHE/tools/etcd-$ETCD_VERSION
export VCM_KUBE_DIR VCM_KUBE_NEXT_DIR VCM_ETCD_DIR

export VCM_ETCD=$VCM_ETCD_DIR/etcd
export VCM_ETCDCTL=$VCM_ETCD_DIR/etcdctl
export VCM_KUBE_APISERVER=$VCM_KUBE_DIR/kube-apiserver
export VCM_KUBE_CONTROLLER_MANAGER=$VCM_KUBE_DIR/kube-controller-manager
export VCM_KUBE_SCHEDULER=$VCM_KUBE_DIR/kube-scheduler
export VCM_KUBELET=$VCM_KUBE_DIR/kubelet
export VCM_KUBE_PROXY=$VCM_KUBE_DIR/kube-proxy
export VCM_KUBECTL=$VCM_KUBE_DIR/kubectl
export VCM_COREDNS=$VCM_CACHE/tools/coredns-$COREDNS_VERSION/coredns
export VCM_CRANE=$VCM_CACHE/tools/crane-$CRANE_VERSION/crane

# Environment of the manager, set by its image: what is as large as a review goes back to the system at once when it is
# freed. Otherwise it leaves holes that stay, 10 MiB of them after a burst of large ones (make load).
export VCM_IMAGE_ENV=MALLOC_MMAP_THRESHOLD_=65536

# Only for load.sh, and no part of the cluster: another version does not make it another one.
VEGETA_VERSION=12.12.0
CONTROLLER_RUNTIME_VERSION=0.22.5
export VCM_VEGETA=$VCM_CACHE/tools/vegeta-$VEGETA_VERSION/vegeta
export VCM_WEBHOOK_GO=$VCM_CACHE/tools/webhook-go-$CONTROLLER_RUNTIME_VERSION/webhook-go

export VCM_KUBECONFIG=$VCM_STATE/admin.kubeconfig
export VCM_AUDIT_LOG=$VCM_STATE/audit.log
# The registry on loopback that the node pulls registry.k8s.io/... from.
export VCM_REGISTRY=127.0.0.1:$REGISTRY_PORT
# containerd's own socket: never the one of a containerd the machine may run besides.
export VCM_CONTAINERD=$VCM_STATE/run/containerd.sock
