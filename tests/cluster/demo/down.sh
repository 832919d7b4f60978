#!/usr/bin/env bash
# Undoes `make demo`: on a cluster of the user's own (KUBECONFIG) what the demo made there, else the whole cluster that
# was brought up on this machine.
set -euo pipefail
# shellcheck source=../env.sh
. "$(dirname "${BASH_SOURCE[0]}")/../env.sh"
# shellcheck source=lib.sh
. "$VCM_CLUSTER_DIR/demo/lib.sh"

if [ "$DEMO_CLUSTER" = yours ]; then
  echo "removing the demo from the cluster that KUBECONFIG names: $KUBECONFIG"
  exec "$VCM_CLUSTER_DIR/demo/clean.sh"
fi
end_leftovers
exec "$VCM_CLUSTER_DIR/down.sh"
