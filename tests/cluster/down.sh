#!/usr/bin/env bash
# Removes the cluster: its pods and processes, mounts, network, cgroups, and the state folder. Root on Debian 12 only.
# Promises: only what is the cluster's own goes, known by its state folder, its mark and its names; kernel settings are
# put back; the cache stays. May be run at any time, also after a crash, also twice, also with the cache gone.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_root_on_debian
[ "${1:-}" = --locked ] || lock_cluster

started=$(now)
found=
if [ -e "$VCM_STATE" ] || ip link show "$BRIDGE" >/dev/null 2>&1; then found=yes; fi

# --- Processes --------------------------------------------------------------------
# The kubelet first, or it starts anew what is ended here.
stop_daemon kubelet TERM 3
stop_daemon kube-proxy TERM 3

# Sockets that containerd's shims have outside the state folder; each task's folder names its own.
shim_sockets=()
for address in "$VCM_STATE"/run/containerd/io.containerd.runtime.v2.task/*/*/address; do
  [ ! -e "$address" ] || shim_sockets+=("$(sed 's,^unix://,,' "$address")")
done

# pod_processes: everything in the pods' cgroups, whichever version of cgroups the machine has.
pod_processes() {
  local root
  for root in "/sys/fs/cgroup/$CGROUP" /sys/fs/cgroup/*/"$CGROUP"; do
    [ ! -d "$root" ] || find "$root" -name cgroup.procs -exec cat {} + 2>/dev/null
  done | sort -un
}

stop_daemon containerd TERM 3
# Shims first: a shim that lives sees its container end and would report it to nobody.
for round in 1 2 3 4 5; do
  # shellcheck disable=SC2046  # ids, one word each
  set -- $(our_processes) $(pod_processes)
  [ $# -gt 0 ] || break
  kill -KILL "$@" 2>/dev/null || true
  sleep "0.$round"
done
for name in "${DAEMONS[@]}"; do rm -f "$VCM_STATE/run/$name.pid"; done
[ ${#shim_sockets[@]} = 0 ] || rm -f "${shim_sockets[@]}"

# --- Mounts, with the pods' network namespaces --------------------------------------
# The innermost first; the kernel writes a space in a path as \040.
mounts=$(awk -v below="$VCM_STATE/" 'index($5, below) == 1 { print $5 }' /proc/self/mountinfo | tac)
while IFS= read -r mount; do
  [ -n "$mount" ] || continue
  mount=$(printf '%b' "$mount")
  umount "$mount" 2>/dev/null || umount -l "$mount" 2>/dev/null || true
done <<<"$mounts"

# --- Network ------------------------------------------------------------------------
# remove_chains COMMAND TABLE: our chains, kube-proxy's, and the rules that jump to them, in one transaction.
remove_chains() {
  local rules script
  rules=$("$1-save" -t "$2" 2>/dev/null) || return 0
  script=$(awk '
    { ours = "^(KUBE|VCM)-" }
    /^:/ { chain = substr($1, 2); if (chain ~ ours) chains[chain] = 1 }
    /^-A/ {
      target = ""
      for (i = 3; i < NF; i++) if ($i == "-j" || $i == "-g") target = $(i + 1)
      if ($2 !~ ours && target ~ ours) { sub(/^-A/, "-D"); rules[++count] = $0 }
    }
    END {
      for (chain in chains) print ":" chain " - [0:0]"
      for (i = 1; i <= count; i++) print rules[i]
      for (chain in chains) print "-X " chain
    }' <<<"$rules")
  [ -n "$script" ] || return 0
  printf '*%s\n%s\nCOMMIT\n' "$2" "$script" | "$1-restore" -w --noflush ||
    echo "warning: chains of $1's table $2 are left" >&2
}

# kube-proxy's chains have the same names on every node: they are ours only if our own chain says so.
if command -v iptables >/dev/null && iptables -w -t nat -n -L VCM-POSTROUTING >/dev/null 2>&1; then
  # VCM-POSTROUTING, which says so, goes last.
  for table in mangle filter nat; do
    for command in ip6tables iptables; do remove_chains "$command" "$table"; done
  done
fi
# Taking the bridge's port away ends the pods' pairs too; namespaces that are gone took theirs along.
if ip link show "$BRIDGE" >/dev/null 2>&1; then
  ip -o link show master "$BRIDGE" | awk -F': ' '{ sub(/@.*/, "", $2); print $2 }' | while read -r port; do
    ip link delete "$port" 2>/dev/null || true
  done
  ip link delete "$BRIDGE"
fi
# What the CNI library remembers of each pod: of this network, and the loopback of the same pods.
for result in /var/lib/cni/results/"$CNI_NETWORK"-*-eth0; do
  [ -e "$result" ] || continue
  sandbox=${result##*/"$CNI_NETWORK"-}
  rm -f "$result" "/var/lib/cni/results/cni-loopback-${sandbox%-eth0}-lo"
done

# --- Cgroups, kernel settings, folders ------------------------------------------------
for root in "/sys/fs/cgroup/$CGROUP" /sys/fs/cgroup/*/"$CGROUP"; do
  [ ! -d "$root" ] || find "$root" -depth -type d -exec rmdir {} + 2>/dev/null || true
done
if [ -e "$VCM_STATE/sysctl.before" ]; then sysctl -q -e -p "$VCM_STATE/sysctl.before" >/dev/null 2>&1 || true; fi
# The kubelet's links to logs of pods that are gone.
for link in /var/log/containers/*; do
  case $(readlink "$link" 2>/dev/null) in "$VCM_STATE"/*) rm -f "$link" ;; esac
done
# Folders outside the state folder that were not there before, unless somebody else has put something in them.
if [ -e "$VCM_STATE/made-folders" ]; then
  while IFS= read -r folder; do
    if [ "$folder" = /var/lib/kubelet ]; then rm -rf --one-file-system /var/lib/kubelet/device-plugins; fi
    rmdir "$folder"/* "$folder" 2>/dev/null || true
  done <"$VCM_STATE/made-folders"
fi
rm -rf --one-file-system "$VCM_STATE"
[ -z "$found" ] || report cluster "is gone" "$started"
