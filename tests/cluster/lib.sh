# shellcheck shell=bash
# What the cluster's scripts share: progress lines, failures that show a log, waiting with a deadline, and
# daemons that can be found again. Sourced by env.sh; defines functions only.

# --- Talking --------------------------------------------------------------------

# die COMPONENT TEXT...: name the part that failed and end the script.
die() {
  local component=$1
  shift
  printf 'error: %s: %s\n' "$component" "$*" >&2
  exit 1
}

# fail_with_log COMPONENT TEXT LOG: the same, with the end of the component's log.
fail_with_log() {
  printf 'error: %s: %s; the end of %s:\n' "$1" "$2" "$3" >&2
  tail -n 25 "$3" 2>/dev/null | sed 's/^/  | /' >&2
  exit 1
}

# now: milliseconds, for durations.
now() {
  local microseconds=${EPOCHREALTIME/[.,]/}
  echo "${microseconds%???}"
}

# report COMPONENT TEXT SINCE: one line of progress with the seconds since SINCE (of now).
report() {
  local took=$(($(now) - $3))
  printf '%-24s %-22s %3d.%d s\n' "$1" "$2" $((took / 1000)) $((took % 1000 / 100))
}

# --- Requirements ---------------------------------------------------------------

# need_root_on_debian: the first line a script prints where it cannot work.
need_root_on_debian() {
  [ "$(id -u)" = 0 ] || die "$(basename "$0")" "needs root (on Debian 12): it manages mounts, namespaces, packages and iptables"
  command -v dpkg >/dev/null || die "$(basename "$0")" "needs Debian 12: dpkg is not here"
}

# need_programs COMPONENT PATH...: each has to be built or installed.
need_programs() {
  local component=$1 program
  shift
  for program in "$@"; do
    command -v "$program" >/dev/null || die "$component" "$program is missing: run 'make packages tools' first"
  done
}

# lock_cluster: one up.sh or down.sh at a time. Daemons close descriptor 9, so that it ends with the script.
lock_cluster() {
  mkdir -p "$VCM_CACHE"
  exec 9>"$VCM_CACHE/cluster.lock"
  flock -w 600 9 || die lock "another up.sh or down.sh has been busy for ten minutes ($VCM_CACHE/cluster.lock)"
}

# --- Daemons --------------------------------------------------------------------
# A daemon is known by its pid file (pid, start time, program), and by a mark in its environment that
# names this state folder, so that one whose pid file was lost in a crash is still found, and no other ever is.

daemon_log() { echo "$VCM_STATE/log/$1.log"; }

# started_at PID: the kernel's start time, which tells a process from a later one with the same id.
started_at() {
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  # The name before the last ')' may hold anything; the start time is the 20th field after it.
  echo "${stat##*) }" | cut -d' ' -f20
}

# start_daemon NAME PROGRAM ARG...: in its own session, with its log in log/NAME.log.
start_daemon() {
  local name=$1 pid
  shift
  mkdir -p "$VCM_STATE/run" "$VCM_STATE/log"
  VCM_DAEMON_OF=$VCM_STATE setsid "$@" </dev/null >>"$(daemon_log "$name")" 2>&1 9>&- &
  pid=$!
  disown "$pid"
  echo "$pid $(started_at "$pid") $1" >"$VCM_STATE/run/$name.pid"
  # On a busy machine it may still be this script's copy, which nobody would know for the program.
  for _ in {1..100}; do
    if daemon_pid "$name" >/dev/null || [ ! -e "/proc/$pid" ]; then return 0; fi
    sleep 0.05
  done
}

# daemon_pid NAME: its pid if it runs and is the one that was started.
daemon_pid() {
  local pid since program
  read -r pid since program 2>/dev/null <"$VCM_STATE/run/$1.pid" || return 1
  [ "$(started_at "$pid")" = "$since" ] || return 1
  tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -qxF -- "$program" || return 1
  echo "$pid"
}

# stop_daemon NAME SIGNAL SECONDS: ends it, at last with SIGKILL; silent if it does not run.
stop_daemon() {
  local pid
  if pid=$(daemon_pid "$1"); then end_process "$pid" "$2" "$3"; fi
  rm -f "$VCM_STATE/run/$1.pid"
}

# end_process PID SIGNAL SECONDS
end_process() {
  local tries=$(($3 * 20))
  kill "-$2" "$1" 2>/dev/null || return 0
  while [ -e "/proc/$1" ] && ! grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; do
    if [ "$tries" -le 0 ]; then
      kill -KILL "$1" 2>/dev/null || true
      tries=100
    fi
    tries=$((tries - 1))
    sleep 0.05
  done
}

# our_processes: ids of everything that carries this state folder's mark (daemons and containerd's shims).
our_processes() {
  local environment
  for environment in /proc/[0-9]*/environ; do
    if grep -qzxF "VCM_DAEMON_OF=$VCM_STATE" "$environment" 2>/dev/null; then
      environment=${environment#/proc/}
      echo "${environment%/environ}"
    fi
  done
}

# --- Waiting --------------------------------------------------------------------

# wait_ready NAME SECONDS COMMAND...: until COMMAND succeeds. Fails with the daemon's log if it ends or the
# deadline passes.
wait_ready() {
  local name=$1 deadline=$((SECONDS + $2)) seconds=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    if [ -e "$VCM_STATE/run/$name.pid" ] && ! daemon_pid "$name" >/dev/null; then
      fail_with_log "$name" "it ended while starting" "$(daemon_log "$name")"
    fi
    [ "$SECONDS" -lt "$deadline" ] || fail_with_log "$name" "not ready after $seconds s ($*)" "$(daemon_log "$name")"
    sleep 0.1
  done
}

# http_ok URL [curl argument...]
http_ok() { curl -sf --noproxy '*' -m 2 -o /dev/null "$@"; }

# kubectl as the administrator of the host cluster.
kubectl_admin() { "$VCM_KUBECTL" --kubeconfig "$VCM_KUBECONFIG" "$@"; }

# dns_address NAME SERVER: the address a DNS server has for a name (one A record, asked over UDP). dd sends the
# query as one packet; printf alone would cut it at each byte that is a newline.
dns_address() {
  local name=$1 server=$2 query='\x56\x4d\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00' label answer
  local labels
  IFS=. read -r -a labels <<<"$name"
  for label in "${labels[@]}"; do query+=$(printf '\\x%02x%s' "${#label}" "$label"); done
  query+='\x00\x00\x01\x00\x01'
  # shellcheck disable=SC2016  # the inner shell expands them; the query is a format because it holds the escapes
  answer=$(timeout 2 bash -c 'exec 3<>"/dev/udp/$1/53" && printf "$2" | dd bs=512 iflag=fullblock >&3 && dd bs=512 count=1 <&3' _ "$server" "$query" 2>/dev/null |
    od -An -v -tu1 | tr -s ' \n' ' ')
  # shellcheck disable=SC2206  # split on purpose: one number for each byte
  answer=($answer)
  # Bytes 6 and 7 count the answers; an A record's address is what the answer ends with.
  [ "${#answer[@]}" -gt 16 ] && [ "$((answer[6] * 256 + answer[7]))" -ge 1 ] || return 1
  local IFS=.
  echo "${answer[*]: -4}"
}

# --- Files ----------------------------------------------------------------------

# render FILE: a template of config/ with each @NAME@ replaced by the variable NAME.
render() {
  local text name
  text=$(<"$VCM_CLUSTER_DIR/config/$1")
  while [[ $text =~ @([A-Z_]+)@ ]]; do
    name=${BASH_REMATCH[1]}
    text=${text//"@$name@"/"${!name?render: $1 wants $name}"}
  done
  printf '%s\n' "$text"
}

# own_folder PATH...: makes folders outside the state folder, noting those that were not there before,
# which down.sh removes again.
own_folder() {
  local folder
  for folder in "$@"; do
    if [ ! -e "$folder" ]; then
      mkdir -p "$folder"
      echo "$folder" >>"$VCM_STATE/made-folders"
    fi
  done
}

# --- The cluster ----------------------------------------------------------------

# The host's daemons, in the order they start.
DAEMONS=(registry containerd etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy)
export DAEMONS

# cluster_identity: changes when a version, a setting or a program of the cluster does.
cluster_identity() {
  {
    (cd "$VCM_CLUSTER_DIR" && cat versions.env config/* {pki,kernel,network,containerd,control-plane,node,dns}.sh)
    cat "$VCM_KUBE_DIR/.key" "$VCM_ETCD_DIR/.key" 2>/dev/null || true
  } | sha256sum | cut -d' ' -f1
}

# Cargo's target folder: one for all checkouts on this machine, so that dependencies are compiled once. Cargo would take
# what another checkout compiled of vc-manager itself for this one's, where files are not newer: that is dropped.
use_cargo_target() {
  local checkout
  export CARGO_TARGET_DIR=$VCM_CACHE/target
  checkout=$(cd "$VCM_CLUSTER_DIR/../.." && pwd)
  if [ "$(cat "$CARGO_TARGET_DIR/.checkout" 2>/dev/null)" != "$checkout" ]; then
    mkdir -p "$CARGO_TARGET_DIR"
    (cd "$checkout" &&
      cargo clean --quiet --locked -p vc-manager &&
      cargo clean --quiet --locked -p vc-manager --release --target x86_64-unknown-linux-gnu)
    printf '%s\n' "$checkout" >"$CARGO_TARGET_DIR/.checkout"
  fi
}
