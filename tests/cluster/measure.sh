#!/usr/bin/env bash
# Measures the manager on the test cluster: API writes, times, downtime, memory. Ends with one table.
# Usage: measure.sh [N]      N tenants at once in the last part (8)
#   CLUSTER_VERSION=file     the template (charts/samples/clusterversion-1.34.yaml)
#   MANAGER=path             the program (the one of `make image`); any that takes the same flags, such as the Go one
#   MANAGER_FLAGS="..."      further flags for it (--https-addr=0, which the Go one does not know, if MANAGER is not set)
#   IDLE=seconds             how long to listen for requests of an idle manager (60)
#   CRDS=file                the definitions (this checkout's)
#   NEXT_CLUSTER_VERSION=f   what the upgrade goes to (default: the same with one flag more, --v=1, for the apiserver)
# Promises: works in namespaces of its own and removes them; nothing else may run a manager on the cluster meanwhile.
# The manager runs outside the cluster under an account of its own, by which the audit log tells its requests from
# all others.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
unset KUBECONFIG
# shellcheck source=demo/lib.sh
. "$VCM_CLUSTER_DIR/demo/lib.sh"

count=${1:-8}
idle=${IDLE:-60}
template=${CLUSTER_VERSION:-$REPOSITORY/charts/samples/clusterversion-1.34.yaml}
flags=${MANAGER_FLAGS-}
[ -n "${MANAGER:-}" ] || flags="--https-addr=0 $flags"
manager=${MANAGER:-$VCM_CACHE/target/x86_64-unknown-linux-gnu/release/vc-manager}
namespace=vc-manager-measure
account=system:serviceaccount:$namespace:manager
version=measure
patience=${MEASURE_TIMEOUT:-900}
reason_done=TenantControlPlaneUpgradeCompleted

need_programs measure jq curl "$manager" "$KUBECTL"
reason=$("$VCM_CLUSTER_DIR/health.sh") || die measure "$reason: run 'make cluster' first"
if kube -n vc-manager get deployment vc-manager >/dev/null 2>&1; then
  die measure "vc-manager runs as a pod on this cluster (make demo); 'make down cluster' gives a fresh one"
fi
work=$VCM_STATE/measure
DEMO_STATE=$work
mkdir -p "$work"
chmod 700 "$work"
exec 9>"$work/.lock"
flock -n 9 || die measure "another measurement runs"

# --- The manager ----------------------------------------------------------------------

# tidy: tenants first, as long as a manager runs that takes their finalizers away.
tidy() {
  kube -n "$namespace" delete virtualclusters --all --wait --timeout=180s >/dev/null 2>&1 || true
  kube delete clusterversion "$version" --ignore-not-found --wait --timeout=60s >/dev/null 2>&1 || true
}

cleanup() {
  local status=$?
  trap - EXIT INT TERM
  if daemon_pid measured-manager >/dev/null; then tidy; fi
  stop_daemon measured-manager TERM 10
  end_background "${background_pids[@]}"
  end_leftovers
  kube delete clusterrolebinding "$namespace" --ignore-not-found >/dev/null 2>&1 || true
  kube delete namespace "$namespace" --ignore-not-found --wait=false >/dev/null 2>&1 || true
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
end_leftovers
stop_daemon measured-manager TERM 10

kube apply --server-side --force-conflicts -f "${CRDS:-$REPOSITORY/charts/vc-manager/crds/tenancy.x-k8s.io.yaml}" >/dev/null
kube wait --for=condition=Established crd/virtualclusters.tenancy.x-k8s.io --timeout=60s >/dev/null
kube create namespace "$namespace" --dry-run=client -o yaml | kube apply --server-side -f - >/dev/null
kube create namespace vc-manager --dry-run=client -o yaml | kube apply --server-side -f - >/dev/null
kube -n "$namespace" create serviceaccount manager --dry-run=client -o yaml | kube apply --server-side -f - >/dev/null
kube create clusterrolebinding "$namespace" --clusterrole=cluster-admin --serviceaccount="$namespace:manager" \
  --dry-run=client -o yaml | kube apply --server-side -f - >/dev/null
(
  umask 077
  token=$(kube -n "$namespace" create token manager --duration=4h)
  kube config view --raw -o json | jq --arg token "$token" '.users[0].user = {token: $token}' >"$work/manager.kubeconfig"
)
: >"$(daemon_log measured-manager)"
# shellcheck disable=SC2086  # flags, split on purpose
start_daemon measured-manager "$manager" --kubeconfig="$work/manager.kubeconfig" --leader-election=false \
  --feature-gates=ClusterVersionPartialUpgrade=true --metrics-addr=127.0.0.1:9111 --health-addr=127.0.0.1:9112 $flags
wait_ready measured-manager 30 http_ok http://127.0.0.1:9112/healthz
pid=$(daemon_pid measured-manager)
tidy

# --- What the audit log says -------------------------------------------------------------

# here: the end of the audit log, from which on requests are counted.
here() { stat -c %s "$VCM_AUDIT_LOG"; }

# requests FROM: those of the manager since then, one JSON object each.
requests() {
  # The log is written before the answer is sent, but not the last line of a request under way.
  sleep 1
  tail -c "+$(($1 + 1))" "$VCM_AUDIT_LOG" | grep -F "\"$account\"" | jq -c --arg user "$account" 'select(.user.username == $user)' || true
}

# writes FROM ROOT...: "ROOT-NAMESPACE VIRTUALCLUSTER CLUSTERVERSION ALL EVENTS", Leases and dry runs apart.
writes() {
  local from=$1 roots
  shift
  roots=$(printf '%s\n' "$@" | jq -Rnc '[inputs]')
  requests "$from" | jq -rs --argjson roots "$roots" '
    [.[] | select(.verb | IN("create", "update", "patch", "delete", "deletecollection"))
         | select(.objectRef.resource | IN("leases", "tokenreviews", "subjectaccessreviews") | not)
         | select(.requestURI | contains("dryRun=") | not)] as $all
    | [$all[] | select(.objectRef.resource == "events")] as $events
    | ($all - $events) as $writes
    | [$writes[] | .objectRef as $o | select(any($roots[]; . == $o.namespace or ($o.resource == "namespaces" and . == $o.name)))] as $root
    | [$writes[] | select(.objectRef.resource == "virtualclusters")] as $vc
    | [$root, $vc, $writes - $root - $vc, $writes, $events] | map(length) | @tsv'
}

# idle_requests FROM: those that are neither watches nor about the Lease.
idle_requests() {
  requests "$1" | jq -s '[.[] | select(.verb != "watch" and .objectRef.resource != "leases")] | length'
}

# --- Tenants -----------------------------------------------------------------------------

# under_our_name FILE: the ClusterVersion in it, as JSON.
under_our_name() { kube create --dry-run=client -o json -f "$1" | jq --arg name "$version" '.metadata = {name: $name}'; }

tenant() {
  jq -n --arg name "$1" --arg version "$version" '{apiVersion: "tenancy.x-k8s.io/v1alpha1", kind: "VirtualCluster",
    metadata: {name: $name}, spec: {clusterVersionName: $version}}' | kube -n "$namespace" create -f - >/dev/null
}

# running SECONDS NAME...: waits, by a watch, until each is Running.
running() {
  local limit=$1
  shift
  kube -n "$namespace" wait --for='jsonpath={.status.phase}=Running' "${@/#/virtualcluster/}" --timeout="${limit}s" >/dev/null
}

# said_done NAME: waits until the manager says so and the consent is used up.
said_done() {
  local deadline=$((SECONDS + patience)) state
  while :; do
    state=$(kube -n "$namespace" get virtualcluster "$1" -o json |
      jq -r '"\(.metadata.labels["tenancy.x-k8s.io/ready-for-upgrade"] // "-") \(.status.reason)"')
    case $state in
      "- TenantControlPlaneUpgradeFailed") die measure "the upgrade of $1 failed: $(kube -n "$namespace" get virtualcluster "$1" -o 'jsonpath={.status.message}')" ;;
      "- $reason_done") return ;;
    esac
    [ "$SECONDS" -lt "$deadline" ] || die measure "the upgrade of $1 does not end ($state)"
    sleep 0.2
  done
}

# really_done ROOT ARGS: waits until the apiserver has the arguments asked for and all sets have rolled out. To be
# asked after said_done: only then the controller-manager's set is known to be the new one.
really_done() {
  local deadline=$((SECONDS + patience))
  until kube -n "$1" get statefulsets -o json | jq -e --argjson args "$2" '
      (.items | map(select(.metadata.name == "apiserver"))[0].spec.template.spec.containers[0].args == $args) and
      all(.items[]; .status.observedGeneration == .metadata.generation and .status.updatedReplicas == .spec.replicas
        and .status.readyReplicas == .spec.replicas and .status.currentRevision == .status.updateRevision)' >/dev/null; do
    [ "$SECONDS" -lt "$deadline" ] || die measure "the components in $1 do not become ready"
    sleep 0.2
  done
}

seconds_since() { awk -v ms=$(($(now) - $1)) 'BEGIN { printf "%.1f", ms / 1000 }'; }

# edit_to FILE: makes the ClusterVersion say what the file says.
edit_to() {
  jq '{spec}' "$1" >"$work/patch.json"
  kube patch clusterversion "$version" --type=merge --patch-file="$work/patch.json" >/dev/null
  sleep 2
}

agree() { kube -n "$namespace" label virtualcluster "$@" tenancy.x-k8s.io/ready-for-upgrade=true >/dev/null; }

rows=()
# row FIGURE VALUE [GOAL]
row() {
  rows+=("$(printf '%-62s %-22s %s' "$1" "$2" "${3:-}")")
  printf '  %s: %s\n' "$1" "$2"
}
cpu_seconds() { awk -v hz="$(getconf CLK_TCK)" '{ sub(/.*\) /, ""); printf "%.1f", ($12 + $13) / hz }' "/proc/$pid/stat"; }

# --- One tenant --------------------------------------------------------------------------

echo "measuring $manager with $template"
under_our_name "$template" >"$work/version.json"
if [ -n "${NEXT_CLUSTER_VERSION:-}" ]; then
  under_our_name "$NEXT_CLUSTER_VERSION" >"$work/next.json"
else
  jq '.spec.apiServer.statefulset.spec.template.spec.containers[0].args += ["--v=1"]' "$work/version.json" >"$work/next.json"
fi
args_of() { jq -c '.spec.apiServer.statefulset.spec.template.spec.containers[0].args' "$1"; }
next_args=$(args_of "$work/next.json")
from=$(here)
kube create -f "$work/version.json" >/dev/null
sleep 3
read -r _ _ _ version_writes _ <<<"$(writes "$from")"

from=$(here)
since=$(now)
tenant one
running "$patience" one || die measure "the tenant is not Running after $patience s"
row "one tenant: until Running" "$(seconds_since "$since") s" "13"
sleep 5
root=$(root_of "$namespace" one)
read -r in_root of_vc of_version all events <<<"$(writes "$from" "$root")"
row "provision: API writes" "$all ($in_root + $of_vc + $of_version)" "17   (root namespace + VirtualCluster + other)"
row "provision: Events" "$events"
row "per ClusterVersion: API writes" "$version_writes"

from=$(here)
sleep "$idle"
row "idle, $idle s: requests but watches and Lease" "$(idle_requests "$from")" "0"

from=$(here)
kube annotate clusterversion "$version" measured=yes --overwrite >/dev/null
sleep 2
before=$(kube -n "$root" get pods -o json | jq -c '[.items[].metadata.uid] | sort')
agree one
said_done one
sleep 2
read -r in_root of_vc of_version all _ <<<"$(writes "$from" "$root")"
row "metadata-only edit, then opt-in: API writes" "$all ($in_root + $of_vc + $of_version)" "2"
after=$(kube -n "$root" get pods -o json | jq -c '[.items[].metadata.uid] | sort')
row "metadata-only edit, then opt-in: pods replaced" "$(jq -n --argjson a "$before" --argjson b "$after" '$b - $a | length')" "0"

write_kubeconfig "$namespace" one "$work/one.kubeconfig"
split_kubeconfig "$work/one.kubeconfig" "$work/one"
start_probe "$work/one.probe" --cacert "$work/one/ca.crt" --cert "$work/one/client.crt" --key "$work/one/client.key" \
  "$(<"$work/one/server")/api/v1/namespaces/default"
probe=$!
sleep 2
from=$(here)
edit_to "$work/next.json"
read -r _ _ _ version_writes _ <<<"$(writes "$from" "$root")"
from=$(here)
since=$(now)
agree one
said_done one
row "one tenant: upgrade until said to be done" "$(seconds_since "$since") s"
really_done "$root" "$next_args"
row "one tenant: upgrade until really done" "$(seconds_since "$since") s" "18"
sleep 3
end_background "$probe"
row "upgrade: tenant's API down" "$(downtime "$work/one.probe") s" "11.0"
read -r in_root of_vc of_version all events <<<"$(writes "$from" "$root")"
row "upgrade: API writes" "$all ($in_root + $of_vc + $of_version)" "12   of them 7 in the root namespace"
row "upgrade: Events" "$events"
row "per edit of the ClusterVersion: API writes" "$version_writes"
row "one tenant: restarts of containers" "$(restarts_in "$root")" "0"
row "manager: peak RSS, CPU so far" "$(awk '/VmHWM/ { printf "%.1f MiB", $2 / 1024 }' "/proc/$pid/status"), $(cpu_seconds) s"
kube -n "$namespace" delete virtualcluster one --wait --timeout=120s >/dev/null
kube wait --for=delete "namespace/$root" --timeout=120s >/dev/null 2>&1 || true

# --- N at once -----------------------------------------------------------------------------

if [ "$count" -gt 0 ]; then
  names=()
  for ((i = 1; i <= count; i++)); do names+=("many-$i"); done
  cpu=$(cpu_seconds)
  from=$(here)
  since=$(now)
  for name in "${names[@]}"; do tenant "$name"; done
  took="none in $patience s"
  if running "$patience" "${names[@]}"; then took="$(seconds_since "$since") s"; fi
  row "$count tenants at once: until all are Running" "$took" "150"
  up=$(kube -n "$namespace" get virtualclusters -o json | jq '[.items[] | select(.status.phase == "Running")] | length')
  row "$count tenants at once: Running" "$up of $count" "all"
  roots=()
  restarts=0
  for name in "${names[@]}"; do
    roots+=("$(root_of "$namespace" "$name")")
    restarts=$((restarts + $(restarts_in "${roots[-1]}")))
  done
  row "$count tenants at once: restarts of containers" "$restarts" "0"
  read -r _ _ _ all _ <<<"$(writes "$from" "${roots[@]}")"
  row "$count tenants at once: API writes" "$all"
  row "manager with $count tenants: RSS now, peak" \
    "$(awk '/VmRSS/ { now = $2 } /VmHWM/ { top = $2 } END { printf "%.1f, %.1f MiB", now / 1024, top / 1024 }' "/proc/$pid/status")" "30"
  row "manager with $count tenants: CPU to provision" "$(awk -v a="$cpu" -v b="$(cpu_seconds)" 'BEGIN { printf "%.1f s", b - a }')"

  # And back to what the ClusterVersion said first.
  edit_to "$work/version.json"
  cpu=$(cpu_seconds)
  from=$(here)
  since=$(now)
  agree "${names[@]}"
  for name in "${names[@]}"; do said_done "$name"; done
  row "$count tenants at once: upgrade until all are said to be done" "$(seconds_since "$since") s"
  for name in "${roots[@]}"; do really_done "$name" "$(args_of "$work/version.json")"; done
  row "$count tenants at once: upgrade until all are really done" "$(seconds_since "$since") s"
  restarts=0
  for name in "${roots[@]}"; do restarts=$((restarts + $(restarts_in "$name"))); done
  row "$count tenants at once: restarts of containers after it" "$restarts" "0"
  read -r _ _ _ all _ <<<"$(writes "$from" "${roots[@]}")"
  row "$count tenants at once: API writes to upgrade" "$all"
  row "manager with $count tenants: RSS now, peak" \
    "$(awk '/VmRSS/ { now = $2 } /VmHWM/ { top = $2 } END { printf "%.1f, %.1f MiB", now / 1024, top / 1024 }' "/proc/$pid/status")" "30"
  row "manager with $count tenants: CPU to upgrade" "$(awk -v a="$cpu" -v b="$(cpu_seconds)" 'BEGIN { printf "%.1f s", b - a }')"
fi

printf '\n%-62s %-22s %s\n' "$(basename "$manager")" MEASURED "AT MOST"
printf '%s\n' "${rows[@]}"
