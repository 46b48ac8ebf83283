#!/usr/bin/env bash
# `make test` five times on a busy machine: scripts/under_load.sh FOLDER
#
# Makes two clones in FOLDER, which must not exist, and runs the tests twice in a row in each, both clones at once: in
# one under nohup, in the other as another user if this one is root. Three loops keep processors busy meanwhile. A fifth
# run follows in the first clone. Each run is a line with its result, its log is in FOLDER. The status is 1 if one failed.
set -euo pipefail
folder=$(realpath -m "${1:?usage: scripts/under_load.sh FOLDER}")
top=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
mkdir "$folder"
other=()
if [ "$(id -u)" = 0 ]; then
    id kvtier-tests >/dev/null 2>&1 || useradd --create-home kvtier-tests
    other=(runuser -u kvtier-tests --)
    chmod a+x "$folder"
fi

prepare() { # CLONE COMMAND...
    local clone=$folder/$1
    git clone --quiet "$top" "$clone"
    [ $# = 1 ] || chown -R kvtier-tests: "$clone"
    "${@:2}" make -C "$clone" install >"$clone.install.log" 2>&1
}

run() { # NAME CLONE COMMAND...
    local log=$folder/$1.log began=$SECONDS status=0
    "${@:3}" make -C "$folder/$2" test >"$log" 2>&1 </dev/null || status=$?
    echo "$1: status $status after $((SECONDS - began)) s: $(grep -aE '^=+ .*(passed|failed).* in ' "$log" | tail -n 1)"
    return $status
}

busy=()
stop() { kill "${busy[@]}" 2>/dev/null || true; }
trap stop EXIT

prepare one
prepare two "${other[@]}"
for _ in 1 2 3; do
    while :; do :; done &
    busy+=($!)
done
failed=0
(set +e; run first one nohup; first=$?; run second one nohup && exit $first) & ours=$!
(set +e; run third two "${other[@]}"; third=$?; run fourth two "${other[@]}" && exit $third) & others=$!
wait $ours || failed=1
wait $others || failed=1
run fifth one nohup || failed=1
exit $failed
