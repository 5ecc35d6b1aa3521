#!/bin/sh
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Run by silence_test within a network namespace of its own: starts a job of two ranks, the second
# one in a second namespace, and takes their link down while they train. Prints what both ranks say.
#
#   silent_machine.sh <silence_program> <timeout ms>
# Exit code 77: this system does not allow it.
set -u
program=$1
timeout=$2
folder=$(mktemp -d)
unshare --net sleep 120 &
machine=$!
trap 'kill -9 $machine $first $second 2> /dev/null; rm -rf "$folder"' EXIT
first=
second=

ready() {
  ip link set lo up &&
    ip link add here type veth peer name there &&
    ip link set there netns $machine &&
    ip address add 10.213.0.1/24 dev here && ip link set here up &&
    nsenter --net=/proc/$machine/ns/net sh -c '
      ip link set lo up && ip address add 10.213.0.2/24 dev there && ip link set there up'
}
# The second namespace exists once its process has left ours.
for _ in 1 2 3 4 5 6 7 8 9 10; do
  [ "$(readlink /proc/$machine/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
  sleep 0.1
done
ready || exit 77

export WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.213.0.1 MASTER_PORT=29400
RANK=0 SILENCE_HOSTNAME=10.213.0.1 "$program" "$timeout" -1 stop start > "$folder/0" 2>&1 &
first=$!
RANK=1 SILENCE_HOSTNAME=10.213.0.2 nsenter --net=/proc/$machine/ns/net \
  "$program" "$timeout" -1 stop start > "$folder/1" 2>&1 &
second=$!

tries=0
while ! { grep -q trains "$folder/0" && grep -q trains "$folder/1"; }; do
  tries=$((tries + 1))
  [ $tries -gt 300 ] && break
  sleep 0.1
done
nsenter --net=/proc/$machine/ns/net ip link set there down
tries=0
while kill -0 $first 2> /dev/null || kill -0 $second 2> /dev/null; do
  tries=$((tries + 1))
  [ $tries -gt 300 ] && break
  sleep 0.1
done
cat "$folder/0"
echo "---- rank 1"
cat "$folder/1"
