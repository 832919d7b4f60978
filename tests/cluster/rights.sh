#!/usr/bin/env bash
# Holds the rights that charts/vc-manager.yaml grants against what the manager did, as the test cluster's audit log has
# it since the cluster came up: run it after `make demo` or the tests. Lists each verb with how often it was used.
# Fails if anything was refused, or if a verb is granted that was not used and is not among those named here.
set -euo pipefail
# shellcheck source=env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_programs rights jq "$VCM_KUBECTL"
account=system:serviceaccount:vc-manager:vc-manager

# Granted for what happens only now and then, or does not show as a verb of its own.
rare=(
  "create services"                           # asked for by a server-side apply that makes an object
  "create statefulsets.apps"                  # the same
  "delete pods"                               # an upgrade that is held up by a pod
  "get persistentvolumeclaims"                # the StatefulSet of etcd is gone
  "get pods/log"                              # a container that crashed
  "create tokenreviews.authentication.k8s.io" # /metrics over HTTPS is asked for
  "create subjectaccessreviews.authorization.k8s.io"
  "delete controllerrevisions.apps" # more than ten edits of one ClusterVersion
  "delete namespaces"               # a tenant is deleted
  "patch events.events.k8s.io"      # an Event that repeats
  "update secrets"                  # the webhooks' CA is replaced, or a retired one is done with
)

used=$(grep -F "\"$account\"" "$VCM_AUDIT_LOG" | jq -r --arg user "$account" 'select(.user.username == $user) | .objectRef as $o |
  [.responseStatus.code, "\(.verb) \($o.resource // .requestURI)" + (if $o.apiGroup then ".\($o.apiGroup)" else "" end)
    + (if $o.subresource then "/\($o.subresource)" else "" end)] | @tsv')
granted=$(for kind in clusterrole "role -n vc-manager"; do
  # shellcheck disable=SC2086  # two words
  kubectl_admin get $kind vc-manager -o json
done | jq -r '.rules[] | . as $rule | .resources[] | . as $resource | $rule.apiGroups[] | . as $group | $rule.verbs[] |
  ($resource | split("/")) as $parts |
  "\(.) \($parts[0])" + (if $group != "" then ".\($group)" else "" end) + (if $parts[1] then "/\($parts[1])" else "" end)' | sort -u)

status=0
while IFS= read -r right; do
  times=$(awk -F'\t' -v right="$right" '$2 == right' <<<"$used" | wc -l)
  note=
  if [ "$times" = 0 ]; then
    note="not seen; named in this script"
    if [[ " ${rare[*]/%/;} " != *" $right; "* ]]; then
      note="GRANTED WITHOUT NEED"
      status=1
    fi
  fi
  printf '%-55s %6d  %s\n' "$right" "$times" "$note"
done <<<"$granted"
refused=$(awk -F'\t' '$1 == 403 { print $2 }' <<<"$used" | sort | uniq -c)
if [ -n "$refused" ]; then
  printf 'REFUSED:\n%s\n' "$refused"
  status=1
else
  echo "nothing was refused in $(wc -l <<<"$used") requests"
fi
exit "$status"
