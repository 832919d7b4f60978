#!/usr/bin/env bash
# Builds the Go programs the cluster is made of, from the Go modules pinned in tools/*/go.mod and go.sum.
# Usage: build-tools.sh [kubernetes-1.34|kubernetes-1.35|etcd|coredns|crane]...   (none: all of them)
#   or, for load.sh only: build-tools.sh [vegeta|webhook-go]...
# Promises: $VCM_CACHE/tools/<name>-<version>/ holds the static binaries of exactly the checked-in go.mod,
# go.sum, sources and flags; what is already there is not built again; a folder appears complete or not at all.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

all=(kubernetes-1.34 etcd crane coredns kubernetes-1.35)

# version_of NAME
version_of() {
  case $1 in
    kubernetes-1.34) echo "$KUBERNETES_VERSION" ;;
    kubernetes-1.35) echo "$KUBERNETES_NEXT_VERSION" ;;
    etcd) echo "$ETCD_VERSION" ;;
    coredns) echo "$COREDNS_VERSION" ;;
    crane) echo "$CRANE_VERSION" ;;
    vegeta) echo "$VEGETA_VERSION" ;;
    webhook-go) echo "$CONTROLLER_RUNTIME_VERSION" ;;
    *) die build-tools "unknown tool '$1' (known: ${all[*]} vegeta webhook-go)" ;;
  esac
}

# ldflags_of NAME: without -X a Go module build reports v0.0.0 as its version.
ldflags_of() {
  local version flags='-s -w'
  version=$(version_of "$1")
  case $1 in
    kubernetes-*)
      local minor=${version#1.} package
      for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        flags+=" -X $package.gitVersion=v$version -X $package.gitMajor=1 -X $package.gitMinor=${minor%%.*}"
        flags+=" -X $package.gitTreeState=clean"
      done
      ;;
    crane) flags+=" -X github.com/google/go-containerregistry/cmd/crane/cmd.Version=v$version" ;;
  esac
  echo "$flags"
}

# pinned_of NAME: the version go.mod asks for, which has to be the one versions.env names.
pinned_of() {
  local module
  case $1 in
    kubernetes-*) module=k8s.io/kubernetes ;;
    etcd) module=go.etcd.io/etcd/server/v3 ;;
    coredns) module=github.com/coredns/coredns ;;
    crane) module=github.com/google/go-containerregistry ;;
    vegeta) module=github.com/tsenart/vegeta/v12 ;;
    webhook-go) module=sigs.k8s.io/controller-runtime ;;
  esac
  awk -v module="$module" '{ sub(/^require /, "") } $1 == module && $2 ~ /^v/ { sub(/^v/, "", $2); print $2; exit }' \
    "$VCM_CLUSTER_DIR/tools/$1/go.mod"
}

# build NAME
build() {
  local name=$1 version source ldflags key target temporary log started attempt
  version=$(version_of "$name")
  source=$VCM_CLUSTER_DIR/tools/$name
  target=$VCM_CACHE/tools/$name-$version
  log=$VCM_CACHE/tools/$name.log
  ldflags=$(ldflags_of "$name")
  [ "$(pinned_of "$name")" = "$version" ] ||
    die "$name" "versions.env or env.sh says $version, tools/$name/go.mod says $(pinned_of "$name")"

  key=$({ cat "$source"/go.{mod,sum} && find "$source" -name '*.go' -exec cat {} + && echo "$go_version $ldflags ${build_flags[*]}"; } | sha256sum)
  key="$version ${key%% *}"
  if [ "$(cat "$target/.key" 2>/dev/null)" = "$key" ]; then
    printf '%-18s %-9s kept\n' "$name" "$version"
    return
  fi

  started=$SECONDS
  temporary=$(mktemp -d "$VCM_CACHE/tools/.$name.XXXXXX")
  # The modules are fetched first, and again if a download breaks off: a compile error is not worth a second try.
  for attempt in 1 2 3; do
    if (cd "$source" && go list -deps tool >/dev/null) >"$log" 2>&1; then break; fi
    [ "$attempt" -lt 3 ] || fail_with_log "$name" "its modules could not be fetched" "$log"
    sleep "$attempt"
  done
  (cd "$source" && go build "${build_flags[@]}" -ldflags "$ldflags" -o "$temporary/" tool) >>"$log" 2>&1 ||
    fail_with_log "$name" "the build failed" "$log"
  # Go names a program after its folder, and etcd's is called "server".
  [ "$name" != etcd ] || mv "$temporary/server" "$temporary/etcd"
  echo "$key" >"$temporary/.key"
  chmod 755 "$temporary"
  rm -rf "$target"
  mv "$temporary" "$target"
  printf '%-18s %-9s built in %d s\n' "$name" "$version" $((SECONDS - started))
}

command -v go >/dev/null || die build-tools "Go is not installed"
export CGO_ENABLED=0 GOFLAGS=-mod=readonly GOWORK=off GOOS=linux GOARCH=amd64
build_flags=(-trimpath -tags grpcnotrace)
go_version=$(go env GOVERSION)

mkdir -p "$VCM_CACHE/tools"
# One build at a time for each cache: another run waits here and then finds everything built.
exec 9>"$VCM_CACHE/tools/.lock"
flock 9
trap 'rm -rf "$VCM_CACHE"/tools/.*.??????' EXIT

[ $# -gt 0 ] || set -- "${all[@]}"
for name in "$@"; do version_of "$name" >/dev/null; done
for name in "$@"; do build "$name"; done
