# Keeps the processes of one test API server, and ends with the test that started it: however that ends, its end of
# the pipe on standard input is closed. Then everything started here is killed and the folder is removed.
#
# Standard input: one process per line, words separated by the ASCII unit separator, the first one a name for its
# log and pid file. Argument: the folder.
trap '' INT TERM HUP
dir=$1
pids=()
while IFS=$'\x1f' read -ra words; do
  "${words[@]:1}" </dev/null >"$dir/${words[0]}.log" 2>&1 &
  pids+=("$!")
  echo "$!" >"$dir/${words[0]}.pid.new"
  mv "$dir/${words[0]}.pid.new" "$dir/${words[0]}.pid"
done
[ ${#pids[@]} -eq 0 ] || kill -KILL "${pids[@]}" 2>/dev/null
wait
rm -rf "$dir"
