#!/usr/bin/env bash
# The main job, shown on a real cluster: three tenants from one ClusterVersion at Kubernetes 1.34; the ClusterVersion is
# edited to 1.35; two tenants agree and move, the third stays. Ends with a table, and fails if a line of it is not as
# promised.
#
# Without KUBECONFIG it builds what it needs and brings up the one-node cluster of `make cluster` (root on Debian 12).
# With KUBECONFIG it uses the cluster named there and builds nothing; VC_MANAGER_IMAGE says where that cluster finds
# the image (`make image` packs one), DEMO_ETCD_IMAGE an etcd if that of the samples is not to be had.
# Needs there: the rights of an administrator, and kubectl, curl and jq here.
# Promises: may be run again at any time, also after a run that was killed; removes its own earlier tenants first.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# shellcheck source=demo/lib.sh
. "$VCM_CLUSTER_DIR/demo/lib.sh"

tenants=(alpha beta gamma)
movers=(alpha beta)
patience=${DEMO_TIMEOUT:-600}
samples=$REPOSITORY/charts/samples
began=$(now)

# --- Small things -----------------------------------------------------------------

demo_kube() { kube -n "$DEMO_NAMESPACE" "$@"; }

# tenant_kube TENANT ARG...: kubectl for a tenant, as its administrator.
tenant_kube() {
  local tenant=$1
  shift
  "$KUBECTL" --kubeconfig "$DEMO_STATE/$tenant.kubeconfig" --request-timeout=15s "$@"
}

# try COMMAND...: again for ten seconds, for what goes over a forwarded port that may just be set up anew.
try() {
  local deadline=$((SECONDS + 10))
  until "$@"; do
    [ "$SECONDS" -lt "$deadline" ] || return 1
    sleep 0.5
  done
}

# tenant_states: "NAME PHASE ROOT-NAMESPACE CURRENT-REVISION CONSENT RESULT" of each tenant.
tenant_states() {
  demo_kube get virtualclusters -o json | jq -r '.items[] | [.metadata.name, .status.phase // "-",
    .status.clusterNamespace // "-", .status.revision.current // "-",
    .metadata.labels["tenancy.x-k8s.io/ready-for-upgrade"] // "-", .status.reason // "-"] | @tsv'
}

# pods_of ROOT: "POD UID" of each pod that is not on its way out.
pods_of() {
  kube -n "$1" get pods -o json | jq -r '[.items[] | select(.metadata.deletionTimestamp | not)] | sort_by(.metadata.name)[] |
    "\(.metadata.name) \(.metadata.uid)"'
}

# sets_of ROOT: how far a tenant's components are, in a few words.
sets_of() {
  kube -n "$1" get statefulsets -o json 2>/dev/null | jq -r '[.items | sort_by(.metadata.creationTimestamp)[] |
    "\(.metadata.name) \(.status.readyReplicas // 0)/\(.spec.replicas)"] |
    if . == [] then "waits for its turn to start" else "ready: " + join(", ") end'
}

# sorry TEXT: a promise that was not kept, with what helps to find out why.
sorry() {
  local tenant root
  printf '\nerror: %s\n' "$*" >&2
  {
    for tenant in "${tenants[@]}"; do
      root=$(root_of "$DEMO_NAMESPACE" "$tenant" 2>/dev/null) || continue
      echo "--- $tenant"
      demo_kube get virtualcluster "$tenant" -o json | jq -c '.status | {phase, reason, message, upgrade, conditions}'
      kube -n "$root" get pods -o wide
    done
    echo "--- vc-manager"
    kube -n vc-manager get pods -o wide
    kube -n vc-manager logs -l app.kubernetes.io/name=vc-manager --tail=15 --prefix
  } 2>&1 | sed 's/^/  | /' >&2
  exit 1
}

# follow_events: each Event on a tenant as a line, as it happens.
follow_events() {
  local tenant reason note
  "$KUBECTL" -n "$DEMO_NAMESPACE" get events.events.k8s.io --watch-only \
    -o 'jsonpath={.regarding.name}|{.reason}|{.note}{"\n"}' 2>/dev/null |
    while IFS='|' read -r tenant reason note; do say "$tenant" "$reason: $note"; done
}

# await TEXT FUNCTION: until FUNCTION is true of tenant_states' output; says every ten seconds what is waited for.
await() {
  local text=$1 done=$2 states deadline=$((SECONDS + patience)) next=$((SECONDS + 10)) tenant phase root consent
  while :; do
    states=$(tenant_states) || states=
    if "$done" <<<"$states"; then return; fi
    [ "$SECONDS" -lt "$deadline" ] || sorry "$text: not after $patience s"
    if [ "$SECONDS" -ge "$next" ]; then
      next=$((SECONDS + 10))
      while IFS=$'\t' read -r tenant phase root _ consent _; do
        if [ "$root" = - ] || [ "$phase $consent" = "Running -" ]; then continue; fi
        say "$tenant" "... $(sets_of "$root")"
      done <<<"$states"
    fi
    sleep 1
  done
}

# --- The cluster --------------------------------------------------------------------

cleanup() {
  local status=$?
  trap - EXIT INT TERM
  # A pipeline in the background is a process of its own, with children that carry the mark.
  end_background "${background_pids[@]}"
  end_leftovers
  exit "$status"
}

if [ "$DEMO_CLUSTER" = ours ]; then
  if [ "$(id -u)" != 0 ] || ! command -v dpkg >/dev/null; then
    die demo "needs root on Debian 12 to bring up a cluster here, or KUBECONFIG for one that exists"
  fi
  echo "The demo of vc-manager, on a Kubernetes of one node that is brought up on this machine."
  echo "The first run compiles Kubernetes (about a quarter of an hour on two cores); later ones take about two minutes."
  "$VCM_CLUSTER_DIR/packages.sh"
  "$VCM_CLUSTER_DIR/build-tools.sh"
  "$VCM_CLUSTER_DIR/images.sh"
  "$VCM_CLUSTER_DIR/image.sh"
  "$VCM_CLUSTER_DIR/up.sh"
  image=$IMAGE_VC_MANAGER
else
  echo "The demo of vc-manager, on the cluster that KUBECONFIG names: $KUBECONFIG"
  echo "(To have one brought up on this machine instead: env -u KUBECONFIG make demo)"
  [ -n "${VC_MANAGER_IMAGE:-}" ] ||
    die demo "set VC_MANAGER_IMAGE to an image of vc-manager that this cluster can pull ('make image' packs one)"
  image=$VC_MANAGER_IMAGE
  for program in "$KUBECTL" curl jq base64; do
    command -v "$program" >/dev/null || die demo "$program is missing"
  done
  kube --request-timeout=10s get --raw=/readyz >/dev/null || die demo "that cluster does not answer"
fi

mkdir -p "$DEMO_STATE"
chmod 700 "$DEMO_STATE"
exec 9>"$DEMO_STATE/.lock"
flock -n 9 || die demo "another demo runs"
end_leftovers
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# --- vc-manager ---------------------------------------------------------------------

step "Installing vc-manager as a pod"
mark() { kube label --overwrite "$@" "$DEMO_LABEL=true" >/dev/null; }
exists() { kube get "$@" >/dev/null 2>&1; }
apply() { kube apply --server-side --force-conflicts --field-manager=vc-manager-demo "$@" >/dev/null; }

if [ "$DEMO_CLUSTER" = yours ] && exists namespace vc-manager &&
  [ "$(kube get namespace vc-manager -o "jsonpath={.metadata.labels.$DEMO_LABEL}")" != true ]; then
  die demo "there is a namespace vc-manager already that the demo did not make: it installs nothing over it"
fi
new_crds=()
for crd in virtualclusters clusterversions; do
  exists crd "$crd.tenancy.x-k8s.io" || new_crds+=("$crd.tenancy.x-k8s.io")
done
apply -f "$REPOSITORY/charts/vc-manager/crds/tenancy.x-k8s.io.yaml"
for crd in "${new_crds[@]}"; do mark crd "$crd"; done
kube wait --for=condition=Established crd/virtualclusters.tenancy.x-k8s.io crd/clusterversions.tenancy.x-k8s.io --timeout=60s >/dev/null

again=
if exists -n vc-manager deployment vc-manager; then again=yes; fi
sed "s|image: $IMAGE_VC_MANAGER\$|image: $image|" "$REPOSITORY/charts/vc-manager.yaml" >"$DEMO_STATE/vc-manager.yaml"
apply -f "$DEMO_STATE/vc-manager.yaml"
mark namespace vc-manager
mark -n vc-manager deployment vc-manager
mark clusterrole vc-manager
mark clusterrolebinding vc-manager
# The image may be another one of the same name.
[ -z "$again" ] || kube -n vc-manager rollout restart deployment/vc-manager >/dev/null
kube -n vc-manager rollout status deployment/vc-manager --timeout=180s >/dev/null ||
  sorry "vc-manager does not become ready"
say "" "vc-manager is ready: $(kube -n vc-manager get deployment vc-manager -o 'jsonpath={.status.readyReplicas}') pods of $image"

if exists namespace "$DEMO_NAMESPACE"; then
  say "" "removing the tenants of an earlier demo"
  demo_kube delete virtualclusters --all --wait --timeout="${patience}s" >/dev/null ||
    sorry "the tenants of an earlier demo do not go"
fi
kube delete clusterversion "$DEMO_CLUSTER_VERSION" --ignore-not-found --wait --timeout=120s >/dev/null ||
  sorry "ClusterVersion $DEMO_CLUSTER_VERSION of an earlier demo does not go; is it used by others?"
kube create namespace "$DEMO_NAMESPACE" --dry-run=client -o yaml | apply -f -
mark namespace "$DEMO_NAMESPACE"

# With the caBundle that the manager has written, the configurations are another field manager's as well: no force.
kube apply --server-side --field-manager=vc-manager-demo -f "$REPOSITORY/webhook-config" >/dev/null
for configuration in validating mutating; do
  mark "${configuration}webhookconfiguration" "virtualcluster-$configuration-webhook-configuration"
done

# cluster_version FILE: a sample, with another etcd if asked for.
cluster_version() {
  sed "s|image: $IMAGE_ETCD\$|image: ${DEMO_ETCD_IMAGE:-$IMAGE_ETCD}|" "$samples/$1"
}

# --- A mistake --------------------------------------------------------------------------

step "A ClusterVersion with three mistakes is refused before any tenant sees it"
mistaken() {
  cluster_version clusterversion-1.34.yaml | sed "s/^  name: .*/  name: $DEMO_CLUSTER_VERSION-mistaken/
    s/cpu: 100m/cpu: 100mm/; s/terminationGracePeriodSeconds: 10/terminationGracePeriod: 10/; s/containerPort: 6443/containerPort: 66443/"
}
# shellcheck disable=SC2329  # called by try
refused() { { mistaken | kube create --dry-run=server -f - 2>&1 || true; } | grep -F 'is invalid' -A9; }
# The API server learns of the webhooks, and of their CA, a moment after they are registered.
refusal=$(try refused) || sorry "a ClusterVersion with mistakes is accepted"
while IFS= read -r line; do say "" "$line"; done <<<"$refusal"

# --- Three tenants at 1.34 --------------------------------------------------------------

step "Three tenants from ClusterVersion $DEMO_CLUSTER_VERSION, Kubernetes $KUBERNETES_VERSION"
cluster_version clusterversion-1.34.yaml | apply -f -
mark clusterversion "$DEMO_CLUSTER_VERSION"
background follow_events
# The watch first, or it misses the first lines.
sleep 1
since=$(now)
for tenant in "${tenants[@]}"; do
  sed "s|^  name: alpha\$|  name: $tenant|" "$samples/virtualcluster.yaml" | apply -n "$DEMO_NAMESPACE" -f -
done
# shellcheck disable=SC2329  # called by await
all_running() { [ "$(awk -F'\t' '$2 == "Running"' | wc -l)" = ${#tenants[@]} ]; }
await "the tenants are Running" all_running
say "" "all are Running after $((($(now) - since) / 1000)) s"

# --- Access -----------------------------------------------------------------------------

step "Using them: a ConfigMap and a ServiceAccount token in each"
declare -A root forward_port version_before etcd_before pods_before token_user data probe_pid version_after
for tenant in "${tenants[@]}"; do
  root[$tenant]=$(root_of "$DEMO_NAMESPACE" "$tenant")
  write_kubeconfig "$DEMO_NAMESPACE" "$tenant" "$DEMO_STATE/$tenant.kubeconfig"
  split_kubeconfig "$DEMO_STATE/$tenant.kubeconfig" "$DEMO_STATE/$tenant"
done

# A tenant's Service is asked straight where its address leads somewhere from here; else through the API server.
server=$(<"$DEMO_STATE/${tenants[0]}/server")
reach=${DEMO_REACH:-forward}
if [ -z "${DEMO_REACH:-}" ] && http_ok --cacert "$DEMO_STATE/${tenants[0]}/ca.crt" "$server/version"; then reach=direct; fi
if [ "$reach" = forward ]; then
  say "" "$server is not reachable from here: going through the API server"
  base=${DEMO_PORT:-27440}
  forwarded=0
  background "$KUBECTL" proxy --port="$base" >/dev/null
  for tenant in "${tenants[@]}"; do
    port=$((++forwarded + base))
    forward_port[$tenant]=$port
    background "$VCM_CLUSTER_DIR/demo/forward.sh" "$KUBECTL" "${root[$tenant]}" "$port"
    for setting in "server https://127.0.0.1:$port" "tls-server-name kubernetes.default.svc"; do
      "$KUBECTL" --kubeconfig "$DEMO_STATE/$tenant.kubeconfig" config set "clusters.$tenant.${setting% *}" "${setting#* }" >/dev/null
    done
  done
fi

# whoami TENANT: as whom the tenant's API knows the bearer of the token that was minted at the start.
whoami() {
  local user
  user=$("$KUBECTL" --kubeconfig "$DEMO_STATE/$1.token.kubeconfig" --request-timeout=15s auth whoami \
    -o 'jsonpath={.status.userInfo.username}' 2>/dev/null) || return 1
  [ "$user" = system:serviceaccount:default:demo ] && echo "$user"
}

for tenant in "${tenants[@]}"; do
  version_before[$tenant]=$(try tenant_kube "$tenant" get --raw /version | jq -r .gitVersion)
  data[$tenant]=$tenant-$RANDOM$RANDOM
  tenant_kube "$tenant" create configmap demo --from-literal="written=${data[$tenant]}" >/dev/null
  tenant_kube "$tenant" create serviceaccount demo >/dev/null
  # A kubeconfig with nothing but the token, as a workload of the tenant has it.
  (
    umask 077
    token=$(tenant_kube "$tenant" create token demo --duration=1h)
    "$KUBECTL" --kubeconfig "$DEMO_STATE/$tenant.kubeconfig" config view --raw -o json |
      jq --arg token "$token" '.users[0].user = {token: $token}' >"$DEMO_STATE/$tenant.token.kubeconfig"
  )
  token_user[$tenant]=$(try whoami "$tenant") || sorry "$tenant does not accept a token it has just issued"
  pods_before[$tenant]=$(pods_of "${root[$tenant]}")
  etcd_before[$tenant]=$(grep '^etcd-0 ' <<<"${pods_before[$tenant]}")
  say "$tenant" "is ${version_before[$tenant]}; wrote ConfigMap demo; its token is accepted as ${token_user[$tenant]}"
done

for tenant in "${tenants[@]}"; do
  if [ "$reach" = direct ]; then
    folder=$DEMO_STATE/$tenant
    start_probe "$DEMO_STATE/$tenant.probe" --cacert "$folder/ca.crt" --cert "$folder/client.crt" --key "$folder/client.key" \
      "$(<"$folder/server")/api/v1/namespaces/default/configmaps/demo"
  else
    start_probe "$DEMO_STATE/$tenant.probe" \
      "http://127.0.0.1:$base/api/v1/namespaces/${root[$tenant]}/services/https:apiserver-svc:6443/proxy/version"
  fi
  probe_pid[$tenant]=$!
done
say "" "from here on each tenant is asked ten times a second"

# --- The edit -------------------------------------------------------------------------------

step "Editing ClusterVersion $DEMO_CLUSTER_VERSION: Kubernetes $KUBERNETES_NEXT_VERSION and one changed flag"
diff "$samples/clusterversion-1.34.yaml" "$samples/clusterversion-1.35.yaml" | grep '^[<>] *[^ #]' | grep -v '^[<>] *#' | sed 's/^/          /' || true
revision_before=$(kube get clusterversion "$DEMO_CLUSTER_VERSION" -o 'jsonpath={.status.revision}')
cluster_version clusterversion-1.35.yaml | apply -f -
for _ in {1..40}; do
  revision=$(kube get clusterversion "$DEMO_CLUSTER_VERSION" -o 'jsonpath={.status.revision}')
  [ "$revision" = "$revision_before" ] || break
  sleep 0.5
done
[ "$revision" != "$revision_before" ] || sorry "the edit was not recorded as a new revision"
say "" "recorded as revision $revision (was $revision_before); now nothing may happen"
sleep 10
for tenant in "${tenants[@]}"; do
  [ "$(pods_of "${root[$tenant]}")" = "${pods_before[$tenant]}" ] || sorry "$tenant: its pods changed, although nobody agreed"
  say "$tenant" "has not moved: the same pods, still $(try tenant_kube "$tenant" get --raw /version | jq -r .gitVersion)"
done

# --- Two agree -------------------------------------------------------------------------------

step "${movers[*]} agree; ${tenants[2]} does not"
since=$(now)
for tenant in "${movers[@]}"; do
  demo_kube label virtualcluster "$tenant" tenancy.x-k8s.io/ready-for-upgrade=true >/dev/null
  say "$tenant" "labelled tenancy.x-k8s.io/ready-for-upgrade=true"
done
# Over when each consent is used up, whatever came of it.
# shellcheck disable=SC2329  # called by await
all_answered() { [ "$(awk -F'\t' '$5 == "-" && $6 ~ /^TenantControlPlaneUpgrade/' | wc -l)" = ${#movers[@]} ]; }
await "the upgrades end" all_answered
say "" "both are through after $((($(now) - since) / 1000)) s"
sleep 3

# --- The table --------------------------------------------------------------------------------

broken=0
# cell VALUE PROMISE WIDTH: prints it, marked if it is not as promised.
cell() {
  local text=$1
  if [ "$1" != "$2" ]; then
    text="$1 (!)"
    broken=$((broken + 1))
  fi
  printf "%-$3s" "$text"
}

is_same() { if [ "$1" = "$2" ]; then echo yes; else echo no; fi; }

step "What was promised, and what happened"
echo
printf '%-8s%-10s%-12s%-12s%-11s%-11s%-11s%-10s%s\n' TENANT "OPTED IN" BEFORE AFTER "ETCD KEPT" "DATA KEPT" "OLD TOKEN" RESTARTS "API DOWN"
for tenant in "${tenants[@]}"; do
  end_background "${probe_pid[$tenant]}"
  opted_in=no
  promised=v$KUBERNETES_VERSION
  if [[ " ${movers[*]} " == *" $tenant "* ]]; then
    opted_in=yes
    promised=v$KUBERNETES_NEXT_VERSION
  fi
  version_after[$tenant]=$(try tenant_kube "$tenant" get --raw /version 2>/dev/null | jq -r .gitVersion)
  written=$(try tenant_kube "$tenant" get configmap demo -o 'jsonpath={.data.written}' 2>/dev/null) || written=
  accepted=no
  if try whoami "$tenant" >/dev/null; then accepted=yes; fi
  pods=$(pods_of "${root[$tenant]}")
  down=$(downtime "$DEMO_STATE/$tenant.probe")
  cell "$tenant" "$tenant" 8
  cell "$opted_in" "$opted_in" 10
  cell "${version_before[$tenant]}" "v$KUBERNETES_VERSION" 12
  cell "${version_after[$tenant]}" "$promised" 12
  cell "$(is_same "$(grep '^etcd-0 ' <<<"$pods")" "${etcd_before[$tenant]}")" yes 11
  cell "$(is_same "$written" "${data[$tenant]}")" yes 11
  cell "$accepted" yes 11
  cell "$(restarts_in "${root[$tenant]}")" 0 10
  if [ "$opted_in" = no ]; then
    cell "$down s" "0.0 s" 1
    if [ "$pods" != "${pods_before[$tenant]}" ]; then
      broken=$((broken + 1))
      printf ' (!) pods replaced'
    fi
  else
    printf '%s s' "$down"
  fi
  if [ "$(answers "$DEMO_STATE/$tenant.probe")" = 0 ]; then
    broken=$((broken + 1))
    printf ' (!) never answered'
  fi
  echo
done
echo
if [ "$broken" = 0 ]; then
  echo "Everything is as promised ($((($(now) - began) / 1000)) s in all)."
else
  echo "NOT as promised: $broken, marked with (!)."
fi

forward=
if [ "$reach" = forward ]; then
  forward="  $(command -v "$KUBECTL") -n ${root[alpha]} port-forward service/apiserver-svc ${forward_port[alpha]}:6443 &
"
fi
down=
[ "$DEMO_CLUSTER" = ours ] || down=" (removes the demo from your cluster and leaves the rest)"
cat <<TEXT

Look around:
  export KUBECONFIG=$KUBECONFIG
  $(command -v "$KUBECTL") -n $DEMO_NAMESPACE get virtualclusters -o wide
  $(command -v "$KUBECTL") -n $DEMO_NAMESPACE describe virtualcluster alpha
  $(command -v "$KUBECTL") -n ${root[alpha]} get pods
A tenant, as its administrator:
$forward  $(command -v "$KUBECTL") --kubeconfig $DEMO_STATE/alpha.kubeconfig get configmap demo -o yaml
Remove everything$down:
  make down
TEXT
[ "$broken" = 0 ] || exit 1
