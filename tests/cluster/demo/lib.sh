# shellcheck shell=bash
# What demo.sh, measure.sh and demo/clean.sh share: which cluster is meant, talking to tenants, and asking them from
# outside whether they are up. Sourced after env.sh; defines variables and functions only.

# --- Which cluster ----------------------------------------------------------------
# The user's own if KUBECONFIG names one, else the one `make cluster` brings up.
if [ -n "${KUBECONFIG:-}" ] && [ "$KUBECONFIG" != "$VCM_KUBECONFIG" ]; then
  DEMO_CLUSTER=yours
  DEMO_STATE=$VCM_CACHE/demo
else
  DEMO_CLUSTER=ours
  DEMO_STATE=$VCM_STATE/demo
  export KUBECONFIG=$VCM_KUBECONFIG
fi
KUBECTL=$VCM_KUBECTL
[ -x "$KUBECTL" ] || KUBECTL=kubectl

# What the demo makes is known by these.
DEMO_NAMESPACE=vc-manager-demo
DEMO_CLUSTER_VERSION=demo
# Label of what the demo installed that was not there before.
DEMO_LABEL=vc-manager-demo
REPOSITORY=$(cd "$VCM_CLUSTER_DIR/../.." && pwd)
export DEMO_CLUSTER DEMO_STATE DEMO_NAMESPACE DEMO_CLUSTER_VERSION DEMO_LABEL REPOSITORY

# kube ARG...: kubectl for the cluster that is meant.
kube() { "$KUBECTL" "$@"; }

# say WHO TEXT...: a line of progress with the time of day.
say() {
  local who=$1
  shift
  printf '%(%H:%M:%S)T  %-6s %s\n' -1 "$who" "$*"
}

# step TEXT...: a heading.
step() { printf '\n%(%H:%M:%S)T  %s\n' -1 "$*"; }

# --- Processes in the background ----------------------------------------------------
# Each carries a mark in its environment, so that those of a run that was killed are found by the next.

background_pids=()

# background COMMAND...: runs it; its pid is in $!.
background() {
  VCM_DEMO_OF=$DEMO_STATE VCM_DEMO_PARENT=$$ "$@" </dev/null 9>&- &
  background_pids+=("$!")
}

# end_background PID...
end_background() {
  local pid
  for pid in "$@"; do
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
}

# end_leftovers: what a killed run left running.
end_leftovers() {
  local environment pid
  for environment in /proc/[0-9]*/environ; do
    pid=${environment#/proc/}
    pid=${pid%/environ}
    if grep -qzxF "VCM_DEMO_OF=$DEMO_STATE" "$environment" 2>/dev/null; then kill "$pid" 2>/dev/null || true; fi
  done
}

# --- Tenants --------------------------------------------------------------------------

# root_of NAMESPACE NAME: the root namespace of a VirtualCluster.
root_of() { kube -n "$1" get virtualcluster "$2" -o 'jsonpath={.status.clusterNamespace}'; }

# secret_of NAMESPACE SECRET KEY: decoded. A dot in KEY is escaped by the caller.
secret_of() { kube -n "$1" get secret "$2" -o "jsonpath={.data.$3}" | base64 -d; }

# write_kubeconfig NAMESPACE NAME FILE: the administrator's of a tenant, readable by its owner only.
write_kubeconfig() {
  local root
  root=$(root_of "$1" "$2")
  (umask 077 && secret_of "$root" admin-kubeconfig admin-kubeconfig >"$3.new")
  mv "$3.new" "$3"
}

# split_kubeconfig FILE DIRECTORY: its certificates as files, for curl: ca.crt, client.crt, client.key; and server.
split_kubeconfig() {
  local config
  (
    umask 077
    mkdir -p "$2"
    config=$("$KUBECTL" --kubeconfig "$1" config view --raw -o json)
    jq -r '.clusters[0].cluster["certificate-authority-data"]' <<<"$config" | base64 -d >"$2/ca.crt"
    jq -r '.users[0].user["client-certificate-data"]' <<<"$config" | base64 -d >"$2/client.crt"
    jq -r '.users[0].user["client-key-data"]' <<<"$config" | base64 -d >"$2/client.key"
    jq -r '.clusters[0].cluster.server' <<<"$config" >"$2/server"
  )
}

# restarts_in NAMESPACE: of all containers there.
restarts_in() {
  kube -n "$1" get pods -o json | jq '[.items[].status | (.initContainerStatuses, .containerStatuses)[]?.restartCount] | add // 0'
}

# --- Downtime ---------------------------------------------------------------------------

# start_probe FILE CURL-ARGUMENT...: asks a tenant ten times a second, until ended by pid ($!).
start_probe() {
  : >"$1"
  background "$VCM_CLUSTER_DIR/demo/probe.sh" "$@"
}

# downtime FILE: what a probe saw, as seconds without an answer, in all.
downtime() {
  awk '
    $3 == 200 { if (since) { total += $2 - since; since = 0 } next }
    !since { since = $1 }
    { last = $2 }
    END { if (since) total += last - since; printf "%.1f\n", total }' "$1"
}

# answers FILE: how many answers a probe got.
answers() { awk '$3 == 200' "$1" | wc -l; }
