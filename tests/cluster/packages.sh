#!/usr/bin/env bash
# Installs the Debian packages the cluster needs and the machine lacks. Root on Debian 12 only.
# Promises: packages that are there are left as they are; nothing is upgraded, removed or started. Where a
# package starts a service of its own (containerd), the cluster neither uses nor disturbs it.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_root_on_debian

# Without Rust, Go, gcc, make and git, which come first.
wanted=(
  ca-certificates conntrack containerd containernetworking-plugins curl g++ iproute2 iptables jq kmod
  libc6-dev mount openssl procps runc shellcheck tar util-linux
)

missing=()
for package in "${wanted[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} = 0 ]; then
  echo "packages: nothing is missing"
  exit
fi

started=$(now)
log=$VCM_CACHE/packages.log
mkdir -p "$VCM_CACHE"
export DEBIAN_FRONTEND=noninteractive
{
  apt-get update -q &&
    apt-get install -q -y --no-install-recommends --no-upgrade "${missing[@]}"
} >"$log" 2>&1 </dev/null || fail_with_log packages "apt-get could not install ${missing[*]}" "$log"
report packages "${#missing[@]} installed" "$started"
