#!/usr/bin/env bash
# Removes what demo.sh made in the cluster that KUBECONFIG names: its tenants with their namespaces, its
# ClusterVersion, and, if the demo installed them, vc-manager and the definitions. Nothing else.
# Promises: tenants go before their manager does. May be run at any time, also twice.
set -euo pipefail
# shellcheck source=../env.sh
. "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
# shellcheck source=lib.sh
. "$VCM_CLUSTER_DIR/demo/lib.sh"
need_programs clean "$KUBECTL"

end_leftovers
kube --request-timeout=10s get --raw=/readyz >/dev/null || die clean "the cluster that KUBECONFIG names does not answer"
ours=(-l "$DEMO_LABEL=true" --ignore-not-found)

# gone WHAT ARG...: deletes and waits; says what to do if it takes too long.
gone() {
  local what=$1
  shift
  kube delete "$@" --wait --timeout=180s >/dev/null ||
    die clean "$what: not gone after three minutes; see kubectl -n vc-manager logs deployment/vc-manager, then run this again"
}

gone "the webhooks" validatingwebhookconfiguration,mutatingwebhookconfiguration "${ours[@]}"
if kube get crd virtualclusters.tenancy.x-k8s.io >/dev/null 2>&1; then
  gone "the demo's tenants" virtualclusters --all -n "$DEMO_NAMESPACE"
  gone "ClusterVersion $DEMO_CLUSTER_VERSION" clusterversions "${ours[@]}"
  if [ -z "$(kube get virtualclusters,clusterversions -A -o name)" ]; then
    gone "the manager" deployment -n vc-manager "${ours[@]}"
    gone "the definitions" crd "${ours[@]}"
  else
    echo "tenants or ClusterVersions that are not the demo's remain: vc-manager is left installed"
    rm -rf "$DEMO_STATE"
    gone "namespace $DEMO_NAMESPACE" namespace "$DEMO_NAMESPACE" "${ours[@]:2}"
    exit
  fi
fi
gone "namespaces" namespace "${ours[@]}"
gone "rights" clusterrole,clusterrolebinding "${ours[@]}"
rm -rf "$DEMO_STATE"
echo "the demo is gone"
