#!/usr/bin/env bash
# Ends the test cluster's API server and starts it again with the same arguments, as a node does with a static pod.
# Promises: when it returns, the API server is ready; all else of the cluster was left alone.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_programs restart-apiserver "$VCM_KUBECTL"

started=$(now)
pid=$(daemon_pid kube-apiserver) || die restart-apiserver "the test cluster's API server does not run: make cluster"
mapfile -d '' -t command <"/proc/$pid/cmdline"
# It listens no more from the signal on, and would live on for the watches it has. An outage of more than 40 s would
# be another matter: nodes are then taken for lost, and no Service has endpoints.
stop_daemon kube-apiserver TERM 5
start_daemon kube-apiserver "${command[@]}"
wait_ready kube-apiserver 90 kubectl_admin get --raw=/readyz
report kube-apiserver "restarted" "$started"
