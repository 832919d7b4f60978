#!/usr/bin/env bash
# The node's network: the pods' bridge, whose address is the node's, and two iptables chains of our own.
# Promises: pods on the bridge reach each other, the node and, behind its address, what the node reaches.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_root_on_debian
need_programs network ip iptables

started=$(now)
if ! ip link show "$BRIDGE" >/dev/null 2>&1; then
  if ip route show exact "$POD_CIDR" | grep -q .; then
    die network "$POD_CIDR is already routed here; change POD_CIDR and NODE_IP in versions.env"
  fi
  ip link add "$BRIDGE" type bridge
fi
ip addr replace "$NODE_IP/${POD_CIDR#*/}" dev "$BRIDGE"
ip link set "$BRIDGE" up

# chain TABLE NAME FROM: an empty chain of ours that the built-in chain FROM jumps to.
chain() {
  iptables -w -t "$1" -N "$2" 2>/dev/null || iptables -w -t "$1" -F "$2"
  iptables -w -t "$1" -C "$3" -j "$2" 2>/dev/null || iptables -w -t "$1" -I "$3" -j "$2"
}
chain filter VCM-FORWARD FORWARD
iptables -w -A VCM-FORWARD -i "$BRIDGE" -j ACCEPT
iptables -w -A VCM-FORWARD -o "$BRIDGE" -j ACCEPT
chain nat VCM-POSTROUTING POSTROUTING
iptables -w -t nat -A VCM-POSTROUTING -s "$POD_CIDR" ! -d "$POD_CIDR" -j MASQUERADE

mkdir -p "$VCM_STATE/cni/net.d"
render cni.conflist >"$VCM_STATE/cni/net.d/10-$CNI_NETWORK.conflist"
report network "$BRIDGE $NODE_IP" "$started"
