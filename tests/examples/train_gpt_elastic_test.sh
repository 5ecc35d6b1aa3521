#!/bin/bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# train_gpt --elastic with ranks that are killed at random until one of four is left: no job is
# lost or hangs, every step is made, and each has the loss that it has without deaths, up to
# rounding; so no sequence is lost or trained twice. Then one whose dead rank is replaced by a process
# that joins. KILLS: how many in all; SEED: of their times.
set -u
program=examples/train_gpt/train_gpt
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/elastic.XXXXXX")
kills=${KILLS:-3}
RANDOM=${SEED:-$$}
export ZERO_TIMEOUT=60s
common="--data examples --validate-every 1000 --validation-sequences 4 --sample-bytes 0
        --layers 2 --width 64 --context 64 --batch 10 --steps 250 --elastic"

fail() {
  echo "FAILED after $done_kills kills, SEED=${SEED:-$$}: $1"
  cat "$work/out"
  exit 1
}

# The loss of every step, the last entry of a repeated one. A rank 0 that is killed may have made
# the step from which the others go on, and not have written its line.
check_losses() {
  wait $whole || return 1
  python3 -c '
import json, re, sys
def losses(path):
    entries = [json.loads(line) for line in open(path)]
    return {e["step"]: e["loss"] for e in entries if "loss" in e}
whole, elastic = losses(sys.argv[1]), losses(sys.argv[2])
unwritten = {int(step) for step in re.findall("after step ([0-9]+)", open(sys.argv[3]).read())}
missing = set(range(1, 251)) - set(elastic)
assert missing <= unwritten, f"steps are missing: {missing - unwritten}"
worst = max(abs(whole[s] - elastic[s]) for s in elastic)
print("largest difference of a loss:", worst)
assert worst < 1e-4, "other losses"' "$work/whole.jsonl" "$work/elastic.jsonl" "$work/out"
}

# Bounded: waits until the file has so many lines with a text.
wait_for_lines() {
  for _ in $(seq 600); do
    [ "$(grep -c "$2" "$work/out")" -ge "$1" ] && return 0
    kill -0 "$launcher" 2> /dev/null || return 1
    sleep 0.1
  done
  return 1
}

done_kills=0
late=0
touch "$work/out"
# The run without deaths, beside the others.
$program $common --nproc 1 --log "$work/whole.jsonl" > "$work/whole.out" 2>&1 &
whole=$!
jobs=0
while [ $done_kills -lt "$kills" ]; do
  : > "$work/out"  # of the job before
  $program $common --nproc 4 --protect-every $((RANDOM % 4 + 1)) --log "$work/elastic.jsonl" \
    > "$work/out" 2>&1 &
  launcher=$!
  wait_for_lines 1 "validation loss before" || fail "did not begin"
  deaths=0
  while [ $deaths -lt 3 ] && [ $done_kills -lt "$kills" ]; do
    sleep "0.$((RANDOM % 6 + 1))"
    read -ra ranks < <(cat /proc/$launcher/task/*/children)
    # A job that has ended meanwhile has nothing left to kill.
    [ ${#ranks[@]} -gt 1 ] || break
    kill -9 "${ranks[RANDOM % ${#ranks[@]}]}" || break
    deaths=$((deaths + 1))
    done_kills=$((done_kills + 1))
    wait_for_lines $deaths "^went on with" || break
  done
  wait $launcher || fail "the job was lost"
  check_losses || fail "its losses"
  jobs=$((jobs + 1))
  # A rank that is killed after its last step is not missed by others.
  if ! grep -q "^went on with" "$work/out"; then
    late=$((late + 1))
    [ $late -lt 10 ] || fail "nothing was recovered in 10 jobs"
    done_kills=$((done_kills - deaths))
  fi
done
echo "$done_kills kills in $jobs jobs"

# A death behind the last step, in its validation: the others save what that step owes.
short=${common/steps 250/steps 10}
$program ${short/sequences 4/sequences 3000} --nproc 3 --protect-every 5 --log "$work/last.jsonl" \
  --checkpoints "$work/last" > "$work/out" 2>&1 &
launcher=$!
until grep -qs '"step":9,' "$work/last.jsonl" || ! kill -0 $launcher 2> /dev/null; do sleep 0.05; done
sleep 0.3
read -ra ranks < <(cat /proc/$launcher/task/*/children)
[ ${#ranks[@]} -eq 0 ] || kill -9 "${ranks[1]}"
wait $launcher || fail "the job was lost at its end"
ls "$work"/last/step-10*/manifest.json > /dev/null || fail "the last step was not saved"

# A job that is stopped and goes on without --batch: who joins it takes that of the run, too.
: > "$work/out"
$program $common --nproc 2 --log "$work/begun.jsonl" --checkpoints "$work/begun" \
  > "$work/out" 2>&1 &
launcher=$!
wait_for_lines 1 "validation loss before" || fail "did not begin"
kill -TERM $launcher
wait $launcher
ls "$work"/begun/step-*/manifest.json > /dev/null || fail "a stopped job saved nothing"

for attempt in 1 2 3 4 5; do
  : > "$work/out"
  rm -rf "$work/run"
  cp -r "$work/begun" "$work/run"
  cp "$work/begun.jsonl" "$work/elastic.jsonl"
  $program ${common/--batch 10/} --nproc 4 --protect-every 2 --replacements 1 \
    --checkpoints "$work/run" --resume --log "$work/elastic.jsonl" > "$work/out" 2>&1 &
  launcher=$!
  wait_for_lines 1 "validation loss before" || fail "did not begin"
  read -ra ranks < <(cat /proc/$launcher/task/*/children)
  kill -9 "${ranks[RANDOM % 4]}"
  wait $launcher || fail "the job was lost"
  check_losses || fail "its losses"
  # A process that starts slowly finds that the others have ended.
  if grep -q "^went on with 4 ranks" "$work/out"; then
    echo "replaced in attempt $attempt"
    exit 0
  fi
done
fail "no process joined"
