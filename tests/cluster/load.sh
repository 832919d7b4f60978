#!/usr/bin/env bash
# Measures the webhooks under load: real reviews of a ClusterVersion of 100 KiB, over TLS, on 64 connections. A webhook
# in Go (tools/webhook-go) that does the same with controller-runtime is measured in turns with ours. Ends with a table.
# Usage: load.sh
#   COUNT=n        reviews after which the memory is looked at (1000000)
#   ROUNDS=n       turns of both servers (4), of ROUND seconds each (10)
#   RATE=n         reviews per second for the latency (500), for RATE_SECONDS (30)
#   VCM_BINARY=f   the program (the one of `make image`)
# Promises: needs no cluster and no root: it starts an API server of its own, on free ports of loopback, and ends it.
# Fails when a request fails, an answer is wrong, or the memory is more than 15 MiB over the idle manager's at the end.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
unset KUBECONFIG

count=${COUNT:-1000000}
rounds=${ROUNDS:-4}
round=${ROUND:-10}
rate=${RATE:-500}
rate_seconds=${RATE_SECONDS:-30}
binary=${VCM_BINARY:-$VCM_CACHE/target/x86_64-unknown-linux-gnu/release/vc-manager}
connections=64
object_bytes=$((100 * 1024))
path=/mutate-tenancy-x-k8s-io-v1alpha1-clusterversion
# How much more than idle is too much, in KiB.
memory_limit=$((15 * 1024))

[ -x "$binary" ] || die load "$binary is missing: run 'make image' first"
need_programs load jq curl openssl taskset "$VCM_ETCD" "$VCM_KUBE_APISERVER" "$VCM_KUBECTL"
"$VCM_CLUSTER_DIR/build-tools.sh" vegeta webhook-go

# --- What is started, and ended ---------------------------------------------------------

VCM_STATE=$(mktemp -d "${TMPDIR:-/tmp}/vcm-load.XXXXXX")
chmod 700 "$VCM_STATE"
work=$VCM_STATE

cleanup() {
  local status=$? name
  trap - EXIT INT TERM
  for name in vc-manager webhook-go kube-apiserver etcd; do stop_daemon "$name" TERM 10; done
  rm -rf "$work"
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# free_port: below those that the kernel gives to clients.
free_port() {
  local port
  while :; do
    port=$((20000 + RANDOM % 10000))
    if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then break; fi
  done
  echo "$port"
}

all_cpus=$(taskset -pc $$ | sed 's/.*: //')
mapfile -t cpus < <(tr ',' '\n' <<<"$all_cpus" | awk -F- '{ for (i = $1; i <= (NF > 1 ? $2 : $1); i++) print i }')
server_cpu=${cpus[0]}
client_cpu=${cpus[-1]}
# on CPUS COMMAND...: what it starts runs on these, and counts no others. start_daemon knows a program by its name, so
# that it is this script that moves.
on() {
  taskset -pc "$1" $$ >/dev/null
  "${@:2}"
  taskset -pc "$all_cpus" $$ >/dev/null
}

# --- Certificates and an API server ------------------------------------------------------

# key FILE
key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>>"$work/openssl.log"; }
mkdir -p "$work/serving" "$work/api"
key "$work/ca.key"
openssl req -x509 -new -sha256 -key "$work/ca.key" -days 2 -subj /CN=load -out "$work/ca.crt" \
  -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign 2>>"$work/openssl.log"
key "$work/serving/tls.key"
printf '%s\n' basicConstraints=critical,CA:FALSE extendedKeyUsage=serverAuth subjectAltName=IP:127.0.0.1 >"$work/extensions"
openssl req -new -sha256 -key "$work/serving/tls.key" -subj /CN=127.0.0.1 2>>"$work/openssl.log" |
  openssl x509 -req -sha256 -CA "$work/ca.crt" -CAkey "$work/ca.key" -set_serial 2 -days 2 -extfile "$work/extensions" \
    -out "$work/serving/tls.crt" 2>>"$work/openssl.log"
key "$work/accounts.key"
openssl pkey -in "$work/accounts.key" -pubout -out "$work/accounts.pub"
token=$(openssl rand -hex 16)
echo "$token,admin,admin,system:masters" >"$work/tokens"

etcd_url=http://127.0.0.1:$(free_port)
peer_url=http://127.0.0.1:$(free_port)
api_port=$(free_port)
on "$client_cpu" start_daemon etcd "$VCM_ETCD" --data-dir="$work/etcd" --unsafe-no-fsync --log-level=warn \
  --listen-client-urls="$etcd_url" --advertise-client-urls="$etcd_url" \
  --listen-peer-urls="$peer_url" --initial-advertise-peer-urls="$peer_url" --initial-cluster="default=$peer_url"
on "$client_cpu" start_daemon kube-apiserver "$VCM_KUBE_APISERVER" --etcd-servers="$etcd_url" --bind-address=127.0.0.1 \
  --advertise-address=127.0.0.1 --secure-port="$api_port" --cert-dir="$work/api" --token-auth-file="$work/tokens" \
  --tls-cert-file="$work/serving/tls.crt" --tls-private-key-file="$work/serving/tls.key" \
  --service-account-issuer=https://kubernetes.default.svc --service-account-signing-key-file="$work/accounts.key" \
  --service-account-key-file="$work/accounts.pub" --service-cluster-ip-range=10.0.0.0/16 --authorization-mode=RBAC \
  --disable-admission-plugins=ServiceAccount --profiling=false
jq -n --arg server "https://127.0.0.1:$api_port" --arg ca "$(base64 -w0 "$work/ca.crt")" --arg token "$token" '
  {apiVersion: "v1", kind: "Config", "current-context": "load",
   clusters: [{name: "load", cluster: {server: $server, "certificate-authority-data": $ca}}],
   users: [{name: "load", user: {token: $token}}],
   contexts: [{name: "load", context: {cluster: "load", user: "load"}}]}' >"$work/kubeconfig"
kubectl_load() { "$VCM_KUBECTL" --kubeconfig "$work/kubeconfig" --cache-dir "$work/kubectl" "$@"; }
wait_ready kube-apiserver 120 kubectl_load get --raw /readyz
"$binary" crds | kubectl_load create -f - >/dev/null
kubectl_load wait --for=condition=Established crd/clusterversions.tenancy.x-k8s.io crd/virtualclusters.tenancy.x-k8s.io --timeout=60s >/dev/null

# --- The servers -------------------------------------------------------------------------

our_port=$(free_port)
go_port=$(free_port)
health_port=$(free_port)
# start_ours CPUS: anew.
start_ours() {
  stop_daemon vc-manager TERM 30
  # As in its image.
  export "${VCM_IMAGE_ENV?}"
  on "$1" start_daemon vc-manager "$binary" --kubeconfig="$work/kubeconfig" --enable-webhook=true --leader-election=false \
    --webhook-cert-dir="$work/serving" --https-addr="127.0.0.1:$our_port" --health-addr="127.0.0.1:$health_port"
  wait_ready vc-manager 60 http_ok "http://127.0.0.1:$health_port/readyz"
  pid=$(daemon_pid vc-manager)
}
start_go() {
  on "$server_cpu" start_daemon webhook-go "$VCM_WEBHOOK_GO" "$go_port" "$work/serving"
  wait_ready webhook-go 60 answer "$go_port"
}

# --- The review --------------------------------------------------------------------------

# The sample, with OnDelete, and with arguments, variables and annotations until it is as large as it has to be.
sample=$VCM_CLUSTER_DIR/../../charts/samples/clusterversion-1.34.yaml
kubectl_load create --dry-run=client -o json -f "$sample" | jq -c --argjson size "$object_bytes" '
  ["etcd", "apiServer", "controllerManager"] as $bundles
  | def padded($n): reduce $bundles[] as $b (.;
      .spec[$b].statefulset.spec |= (.updateStrategy = {type: "OnDelete"}
        | .template.metadata.annotations += ([range($n) | {key: "example.com/note-\(.)", value: "what somebody wanted to be known of part \(.) of this"}] | from_entries)
        | .template.spec.containers[0] |= (
            .args += [range($n) | "--some-flag-of-a-component-\(.)=/etc/kubernetes/some/file-\(.).conf"]
          | .env += [range($n) | {name: "SETTING_\(.)", value: "value \(.), as long as such values are"}])));
    def fill($from; $to): if $to - $from <= 1 then padded($from) else (($from + $to) / 2 | floor) as $n
      | if (padded($n) | tojson | length) > $size then fill($from; $n) else fill($n; $to) end end;
    fill(0; 1000)
  | (.metadata.annotations["example.com/filling"] = "") as $almost
  | .metadata.annotations["example.com/filling"] = "x" * ($size - ($almost | tojson | length))' >"$work/object.json"
jq -c --slurpfile object "$work/object.json" -n '
  {apiVersion: "admission.k8s.io/v1", kind: "AdmissionReview", request: {
    uid: "705ab4f5-6393-11e8-b7cc-42010a800002", name: "demo", operation: "CREATE", dryRun: false,
    kind: {group: "tenancy.x-k8s.io", version: "v1alpha1", kind: "ClusterVersion"},
    requestKind: {group: "tenancy.x-k8s.io", version: "v1alpha1", kind: "ClusterVersion"},
    resource: {group: "tenancy.x-k8s.io", version: "v1alpha1", resource: "clusterversions"},
    requestResource: {group: "tenancy.x-k8s.io", version: "v1alpha1", resource: "clusterversions"},
    userInfo: {username: "jane", groups: ["system:authenticated"]},
    object: $object[0], oldObject: null, options: {kind: "CreateOptions", apiVersion: "meta.k8s.io/v1", fieldManager: "kubectl-create"}}}' |
  tr -d '\n' >"$work/review.json"
size=$(jq -c .request.object "$work/review.json" | tr -d '\n' | wc -c)
[ "$size" -gt $((object_bytes * 98 / 100)) ] || die load "the object has $size bytes only"

# answer PORT: to one review.
answer() {
  curl -sSf --noproxy '*' --max-time 20 --cacert "$work/ca.crt" -H 'Content-Type: application/json' \
    --data-binary "@$work/review.json" "https://127.0.0.1:$1$path"
}

# check NAME PORT: the answer has to be right; leaves its length in length_NAME.
check() {
  answer "$2" >"$work/$1.answer"
  jq -e '.response | .allowed and .uid == "705ab4f5-6393-11e8-b7cc-42010a800002" and .patchType == "JSONPatch" and
    ([.patch | @base64d | fromjson | .[] | select(.path | contains("/updateStrategy")) | .value
      | select(. == "RollingUpdate" or .type? == "RollingUpdate")] | length == 3)' "$work/$1.answer" >/dev/null ||
    die load "the answer of $1 is wrong: $(head -c 600 "$work/$1.answer")"
}

# --- Load --------------------------------------------------------------------------------

# attack NAME PORT SECONDS RATE: RATE 0 is as many as it takes. Leaves the report in attack.json. The review is always
# the same, so that every answer has to be as long as the one that was checked.
attack() {
  local seconds=$3
  printf 'POST https://127.0.0.1:%s%s\nContent-Type: application/json\n@%s\n' "$2" "$path" "$work/review.json" >"$work/targets"
  taskset -c "$attack_cpus" "$VCM_VEGETA" attack -targets="$work/targets" -root-certs="$work/ca.crt" -http2=false \
    -rate="$4" -duration="${seconds}s" -workers="$connections" -max-workers="$connections" -connections="$connections" \
    -max-connections="$connections" -timeout=20s |
    taskset -c "$attack_cpus" "$VCM_VEGETA" report -type=json >"$work/attack.json"
  jq -e --argjson length "$(wc -c <"$work/$1.answer")" \
    '.requests > 0 and .success == 1 and .errors == [] and .bytes_in.total == .requests * $length' "$work/attack.json" >/dev/null ||
    die load "requests to $1 failed, or were not answered as the first one: $(jq -c '{requests, status_codes, errors, bytes_in}' "$work/attack.json")"
}
attack_cpus=$client_cpu

cpu_ticks() { awk '{ sub(/.*\) /, ""); print $12 + $13 }' "/proc/$1/stat"; }
memory() { awk -v key="$2:" '$1 == key { print $2 }' "/proc/$1/status"; }
mean() { printf '%s\n' "$@" | awk '{ sum += $1 } END { printf "%d", sum / NR }'; }
mib() { awk -v kib="$1" 'BEGIN { printf "%.1f MiB", kib / 1024 }'; }

rows=()
row() {
  rows+=("$(printf '%-58s %-20s %s' "$1" "$2" "${3:-}")")
  printf '  %s: %s\n' "$1" "$2"
}

# turn NAME PORT PID: one round; adds to served_NAME and prints it with the server's share of its CPU.
declare -A served=() spent=() ticks=()
turn() {
  local before
  before=$(cpu_ticks "$3")
  attack "$1" "$2" "$round" 0
  # The requests under way at the end of the round take their time, too.
  ticks[$1]=$((${ticks[$1]:-0} + $(cpu_ticks "$3") - before))
  served[$1]=$((${served[$1]:-0} + $(jq .requests "$work/attack.json")))
  spent[$1]=$(jq --argjson so_far "${spent[$1]:-0}" '$so_far + (.duration + .wait) / 1e9' "$work/attack.json")
  printf '  %-10s %s\n' "$1" "$(jq -r '"\(.throughput | floor)/s, p50 \(.latencies["50th"] / 1e6 | floor) ms, p99 \(.latencies["99th"] / 1e6 | floor) ms"' "$work/attack.json")"
}
per_second() { jq -n "${served[$1]} / ${spent[$1]} | floor"; }
busy() { jq -n "100 * ${ticks[$1]} / $(getconf CLK_TCK) / ${spent[$1]} | round"; }

echo "measuring $binary, a ClusterVersion of $size bytes, $connections connections"
echo "throughput: $rounds turns of $round s; server on CPU $server_cpu, client on CPU $client_cpu"
start_ours "$server_cpu"
start_go
check vc-manager "$our_port"
check webhook-go "$go_port"
go_pid=$(daemon_pid webhook-go)
for ((i = 0; i < rounds; i++)); do
  turn vc-manager "$our_port" "$pid"
  turn webhook-go "$go_port" "$go_pid"
done
row "reviews per second, one CPU (of which it takes)" "$(per_second vc-manager) ($(busy vc-manager) %)"
row "the Go webhook: reviews per second, one CPU" "$(per_second webhook-go) ($(busy webhook-go) %)"
row "times the Go webhook" "$(jq -n "$(per_second vc-manager) / $(per_second webhook-go) * 10 | round / 10")" "5 at least"
row "CPU of a review, against the Go webhook's" "$(jq -rn "
  def ms(\$ticks; \$n): \$ticks / $(getconf CLK_TCK) / \$n * 1e5 | round / 100;
  \"\(ms(${ticks[vc-manager]}; ${served[vc-manager]})), \(ms(${ticks[webhook-go]}; ${served[webhook-go]})) ms\"")"
row "the Go webhook: memory now, peak" "$(mib "$(memory "$go_pid" VmRSS)"), $(mib "$(memory "$go_pid" VmHWM)")"
stop_daemon webhook-go TERM 10

# Anew, with all CPUs: more threads have more memory of their own.
start_ours "$all_cpus"
attack_cpus=$all_cpus
sleep 5
idle=$(memory "$pid" VmRSS)
# From here on the peak is that of the load.
echo 5 >"/proc/$pid/clear_refs"
attack vc-manager "$our_port" "$rate_seconds" "$rate"
jq -e --argjson rate "$rate" '.rate > $rate * 0.98' "$work/attack.json" >/dev/null || die load "the client does not reach $rate/s"
row "latency at $rate/s for $rate_seconds s: p50, p99" \
  "$(jq -r '.latencies | "\(.["50th"] / 1e4 | round / 100), \(.["99th"] / 1e4 | round / 100) ms"' "$work/attack.json")" "p99 5 ms"

echo "memory: $count reviews, as fast as they go"
answered=0
early=()
late=()
while [ "$answered" -lt "$count" ]; do
  attack vc-manager "$our_port" 10 0
  answered=$((answered + $(jq .requests "$work/attack.json")))
  end=$(memory "$pid" VmRSS)
  if [ $((answered * 2)) -lt "$count" ]; then early+=("$end"); else late+=("$end"); fi
  printf '  %9d reviews: %s\n' "$answered" "$(mib "$end")"
done
peak=$(memory "$pid" VmHWM)
row "memory, idle" "$(mib "$idle")"
row "memory, peak under load; over idle" "$(mib "$peak"), $(mib $((peak - idle)))" "15 MiB over idle"
row "memory after $answered reviews; over idle" "$(mib "$end"), $(mib $((end - idle)))" "15 MiB over idle"
if [ ${#early[@]} -gt 0 ]; then
  row "growth, from the first half's mean to the second's" "$(mib $(($(mean "${late[@]}") - $(mean "${early[@]}"))))" "none"
fi

printf '\n%-58s %-20s %s\n' "$(basename "$binary")" MEASURED GOAL
printf '%s\n' "${rows[@]}"
[ $((end - idle)) -le "$memory_limit" ] || die load "the memory after the load is $(mib $((end - idle))) over that of the idle manager"
