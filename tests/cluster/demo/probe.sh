#!/usr/bin/env bash
# Asks a tenant's API ten times a second, each time by a new connection, and notes the answers.
# Usage: probe.sh FILE CURL-ARGUMENT...   One line for each question in FILE: begun, ended (seconds), HTTP status or 000.
# Promises to end with the script that started it (VCM_DEMO_PARENT), also if that one was killed.
set -uo pipefail
file=$1
shift
while kill -0 "$VCM_DEMO_PARENT" 2>/dev/null; do
  begun=$EPOCHREALTIME
  # An answer that takes longer than two seconds is none.
  status=$(curl -s -o /dev/null -w '%{http_code}' --noproxy '*' -m 2 "$@")
  printf '%s %s %s\n' "${begun/,/.}" "${EPOCHREALTIME/,/.}" "$status" >>"$file"
  passed=$(((${EPOCHREALTIME/[.,]/} - ${begun/[.,]/}) / 1000))
  if [ "$passed" -lt 100 ]; then
    printf -v rest '0.%03d' $((100 - passed))
    sleep "$rest"
  fi
done
