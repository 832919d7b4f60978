#!/usr/bin/env bash
# Keeps a way open to a tenant whose Service cannot be reached from this machine.
# Usage: forward.sh KUBECTL NAMESPACE PORT. Promises to end with the script that started it (VCM_DEMO_PARENT).
set -uo pipefail
forwarding=
trap '[ -z "$forwarding" ] || kill "$forwarding" 2>/dev/null; exit' TERM INT
while kill -0 "$VCM_DEMO_PARENT" 2>/dev/null; do
  "$1" -n "$2" port-forward service/apiserver-svc "$3:6443" >/dev/null 2>&1 &
  forwarding=$!
  # A forward holds on to one pod: it is taken up anew once that is gone.
  while kill -0 "$forwarding" 2>/dev/null && kill -0 "$VCM_DEMO_PARENT" 2>/dev/null; do sleep 0.2; done
  kill "$forwarding" 2>/dev/null
done
