#!/usr/bin/env bash
# The kernel modules and settings a node needs.
# Promises: the former settings are noted first, also of those that the kubelet sets by itself, and down.sh puts them
# back. A limit is only ever raised.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_root_on_debian
need_programs kernel sysctl

started=$(now)
modprobe -q br_netfilter 2>/dev/null || true
modprobe -q overlay 2>/dev/null || true

mkdir -p "$VCM_STATE"
if [ ! -e "$VCM_STATE/sysctl.before" ]; then
  sysctl -e net.ipv4.ip_forward net.bridge.bridge-nf-call-iptables net.ipv4.conf.all.route_localnet \
    vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops \
    kernel.keys.root_maxkeys kernel.keys.root_maxbytes \
    fs.inotify.max_user_instances fs.inotify.max_user_watches >"$VCM_STATE/sysctl.before.new" 2>/dev/null || true
  mv "$VCM_STATE/sysctl.before.new" "$VCM_STATE/sysctl.before"
fi

# at_least KEY VALUE
at_least() { [ "$(sysctl -n "$1")" -ge "$2" ] || sysctl -qw "$1=$2"; }

sysctl -qw net.ipv4.ip_forward=1 || die kernel "it refuses IP forwarding"
sysctl -qw net.bridge.bridge-nf-call-iptables=1 ||
  die kernel "it does not pass bridged packets to iptables (module br_netfilter)"
# A tenant's control plane watches eleven files and folders; Debian's limit of 128 would be reached by the tenth.
at_least fs.inotify.max_user_instances 8192 || die kernel "it refuses more inotify instances"
at_least fs.inotify.max_user_watches 131072 || die kernel "it refuses more inotify watches"
report kernel "settings" "$started"
