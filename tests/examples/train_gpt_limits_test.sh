#!/bin/bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# train_gpt under limits of memory, descriptors, file size and stack: it trains or ends with a
# message, in time and with all of its processes, and the checkpoint that was there goes on with
# the losses of a run without limits.
set -u
program=examples/train_gpt/train_gpt
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/limits.XXXXXX")
options="--data examples --validate-every 1000 --validation-sequences 4 --sample-bytes 0
         --layers 1 --width 32 --context 32 --batch 12 --nproc 2 --steps 6 --save-every 2"
seconds=60

fail() {
  echo "FAILED: $1"
  exit 1
}

# The loss of the last step, in all digits.
last_loss() {
  python3 -c '
import json, sys
print([e["loss"] for e in map(json.loads, open(sys.argv[1])) if e.get("step") == 6])' "$1"
}

# limited <flag of ulimit> <value>: one run that begins after step 2.
limited() {
  local run="$work/run" status
  rm -rf "$run" && cp -r "$work/after-2" "$run"
  # Every process of the job inherits the lock.
  (
    flock 9
    ulimit "$1" "$2" 2> /dev/null || exit 99
    exec timeout --signal=KILL "$seconds" $program $options --checkpoints "$run" --resume
  ) 2>&1 9> "$work/lock" | cat > "$work/out"  # whose size is not limited
  status=${PIPESTATUS[0]}
  ((status != 99)) || { echo "ulimit $1 $2: not permitted here"; return; }
  ((status != 137)) || fail "ulimit $1 $2: no end after $seconds seconds: $(cat "$work/out")"
  flock --wait 5 "$work/lock" true || fail "ulimit $1 $2: a process of the job is left"
  ((status == 0)) || [[ -s "$work/out" ]] || fail "ulimit $1 $2: status $status without a message"
  echo "ulimit $1 $2: status $status, $(grep -v '^ *$' "$work/out" | tail -n 1 | cut -c 1-150)"
  if ((status == 0)); then
    [[ -e $run/step-6/manifest.json ]] || fail "ulimit $1 $2: status 0 without a checkpoint"
    return
  fi
  refused=$((refused + 1))
  rm -rf "$run/step-6"
  $program $options --checkpoints "$run" --resume --log "$work/resumed.jsonl" > "$work/out" 2>&1 ||
    fail "ulimit $1 $2: it does not go on: $(cat "$work/out")"
  [[ $(last_loss "$work/resumed.jsonl") == "$expected" ]] || fail "ulimit $1 $2: another loss"
}

$program $options --checkpoints "$work/after-2" --log "$work/whole.jsonl" > "$work/out" 2>&1 ||
  fail "without limits: $(cat "$work/out")"
rm -r "$work/after-2/step-4" "$work/after-2/step-6"
expected=$(last_loss "$work/whole.jsonl")
[[ $expected == "["?*"]" ]] || fail "no loss"

refused=0
for kib in $(seq 350000 50000 1500000); do limited -v "$kib"; done
for kib in $(seq 100000 50000 400000); do limited -d "$kib"; done
for count in 6 8 10 12 14 16 18 20 24 28 32 40 48 64; do limited -n "$count"; done
for kib in 0 1 4 16 64 256; do limited -f "$kib"; done
for kib in 256 1024 4096; do limited -s "$kib"; done
echo "$refused runs ended under their limit"
((refused > 20)) || fail "expected the limits to end more runs"
