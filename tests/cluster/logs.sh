#!/usr/bin/env bash
# Shows the end of the cluster's logs. Usage: logs.sh [component]   (none: the last lines of each)
# LINES sets how many. Promises to change nothing.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

logs=$VCM_STATE/log
[ -d "$logs" ] || die logs "there is no cluster: $logs is missing"
if [ $# = 0 ]; then
  for log in "$logs"/*.log; do
    printf '\n== %s\n' "$(basename "$log" .log)"
    tail -n "${LINES:-10}" "$log"
  done
  exit
fi
if [ "$1" = coredns ]; then
  kubectl_admin -n kube-system logs -l k8s-app=kube-dns --tail="${LINES:-100}"
  exit
fi
[ -e "$logs/$1.log" ] || die logs "no component '$1' (there are: $(cd "$logs" && echo ./*.log | sed 's,\./,,g; s,\.log,,g') coredns)"
tail -n "${LINES:-100}" "$logs/$1.log"
