#!/bin/bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# train_gpt --same-bits trains the same bits on 1, 2 and 3 ranks, with dropout and clipping, in both
# stages, after --resume on another number of ranks and after a death; compare_logs.py says so, and
# names the steps and the parameter of another seed. What cannot have the same bits is refused.
set -u
program=examples/train_gpt/train_gpt
compare="python3 examples/compare_logs.py"
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/same_bits.XXXXXX")
small="--data examples --validate-every 7 --validation-sequences 20 --sample-bytes 0
       --layers 1 --width 32 --context 32 --batch 24"
common="$small --same-bits --micro-batches 12 --dropout 0.2 --max-norm 0.5"
steps=14

fail() {
  echo "FAILED: $1"
  exit 1
}

# train <name> <options>: a run, its log and what it printed.
train() {
  local name=$1
  shift
  $program $common --steps $steps --log "$work/$name.jsonl" "$@" > "$work/$name.out" 2>&1 ||
    fail "$name: $(cat "$work/$name.out")"
}

final_hash() {
  sed -n 's/^hash of the masters: //p' "$work/$1.out"
}

train 1 --nproc 1
[[ $(final_hash 1) =~ ^[0-9a-f]{32}$ ]] || fail "no hash at the end: $(cat "$work/1.out")"
python3 - "$work/1.jsonl" "$(final_hash 1)" << 'END' || fail "the hashes in the log"
import json, sys
run, *lines = [json.loads(line) for line in open(sys.argv[1])]
assert run["run"]["micro_batches"] == 12 and run["run"]["dropout"] == 0.2, run
# Every tenth step and the last one.
hashed = {line["step"]: line for line in lines if "masters_hash" in line}
assert list(hashed) == [10, 14], hashed
assert hashed[14]["masters_hash"] == sys.argv[2] != hashed[10]["masters_hash"]
masters = hashed[14]["masters"]
assert list(masters)[0] == "token_embedding.weight" and len(masters) == 17, masters
assert all(len(text) == 16 for text in masters.values()), masters
# Every gradient is clipped, and the masters change.
assert all(line["gradient_norm"] > 0.5 for line in lines), lines
assert all(masters[name] != text for name, text in hashed[10]["masters"].items())
END

train 2 --nproc 2 --checkpoints "$work/run" --save-every 5
train 3 --nproc 3 --stage 1
for ranks in 2 3; do
  said=$($compare "$work/1.jsonl" "$work/$ranks.jsonl") || fail "1 and $ranks ranks: $said"
  [[ $said == "equal in 14 steps, of which 2 have hashes of masters" ]] || fail "it says $said"
  [[ $(final_hash $ranks) == "$(final_hash 1)" ]] || fail "the hash at the end on $ranks ranks"
done

# Goes on from step 10 on another number of ranks.
rm -r "$work/run/step-14"
train resumed --nproc 3 --checkpoints "$work/run" --resume
grep -q "resumed after step 10" "$work/resumed.out" || fail "did not resume: $(cat "$work/resumed.out")"
$compare "$work/1.jsonl" "$work/resumed.jsonl" > "$work/said" || fail "resumed: $(cat "$work/said")"
[[ $(final_hash resumed) == "$(final_hash 1)" ]] || fail "the hash at the end of a resumed run"
# There is nothing left to train.
train again --nproc 1 --checkpoints "$work/run" --resume
[[ $(final_hash again) == "$(final_hash 1)" ]] || fail "the hash of a loaded checkpoint"
$program ${common/micro-batches 12/micro-batches 6} --steps $steps --nproc 1 --checkpoints "$work/run" --resume \
  > "$work/out" 2>&1 && fail "other micro-batches were accepted"
grep -q "micro-batches: expected 12 as in" "$work/out" || fail "other micro-batches: $(cat "$work/out")"
$program $small --dropout 0.2 --max-norm 0.5 --steps $steps --nproc 1 --checkpoints "$work/run" --resume \
  > "$work/out" 2>&1 && fail "a run went on without --same-bits"
grep -q "expected 12 as in .*got none (no --same-bits)" "$work/out" ||
  fail "without --same-bits: $(cat "$work/out")"

# Another seed is another model from the first step on.
train other --nproc 1 --seed 2
said=$($compare "$work/1.jsonl" "$work/other.jsonl")
[[ $? -eq 1 && $said == "17 of 17 masters differ in step 10, the first in the model is token_embedding.weight; no step before it has hashes; loss differs since step 1" ]] ||
  fail "another seed: $said"
# One changed hash is found, and its parameter named, with the step behind which it may have changed.
python3 - "$work/1.jsonl" "$work/changed.jsonl" << 'END'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
lines[-1]["masters"]["blocks.0.feed_forward_in.weight"] = "0" * 16
open(sys.argv[2], "w").writelines(json.dumps(line) + "\n" for line in lines)
END
said=$($compare "$work/1.jsonl" "$work/changed.jsonl")
[[ $? -eq 1 && $said == "1 of 17 masters differ in step 14, the first in the model is blocks.0.feed_forward_in.weight; all are equal in step 10" ]] ||
  fail "a changed hash: $said"
$program $small --steps 2 --nproc 1 --log "$work/plain.jsonl" > /dev/null 2>&1 || fail "a run without hashes"
for arguments in "" "$work/1.jsonl" "$work/1.jsonl $work/none" "$work/1.jsonl $work/1.out" \
  "$work/1.jsonl $work/plain.jsonl"; do
  $compare $arguments > "$work/out" 2>&1
  [[ $? -eq 2 ]] || fail "compare_logs $arguments: $(cat "$work/out")"
done

# refused <sentence> <options>
refused() {
  local sentence=$1
  shift
  $program $small --steps 2 "$@" > "$work/out" 2>&1
  [[ $? -eq 2 ]] && grep -q -e "$sentence" "$work/out" || fail "$*: $(cat "$work/out")"
}
refused "--accumulate: expected 1 with --same-bits" --same-bits --accumulate 2
refused "--batch: expected a multiple of --micro-batches 9, got 24" --same-bits --micro-batches 9
refused "--micro-batches: expected at least one for each of 13 ranks, got 12" --same-bits --nproc 13
refused "--micro-batches requires --same-bits" --micro-batches 12
$program ${small/--batch 24/} --same-bits --steps 1 --nproc 1 > "$work/out" 2>&1 || fail "defaults: $(cat "$work/out")"
grep -q "the same bits on 1 to 12 ranks: 12 micro-batches of 2 sequences" "$work/out" ||
  fail "defaults: $(cat "$work/out")"

# A rank dies, and the others go on with more micro-batches each.
steps=60
train alone --nproc 1 &
alone=$!
ZERO_TIMEOUT=60s $program $common --steps $steps --elastic --protect-every 3 --nproc 3 \
  --log "$work/elastic.jsonl" > "$work/elastic.out" 2>&1 &
launcher=$!
for _ in $(seq 600); do
  [[ -e $work/elastic.jsonl && $(wc -l < "$work/elastic.jsonl") -gt 5 ]] && break
  sleep 0.1
done
read -ra ranks < <(cat /proc/$launcher/task/*/children)
kill -9 "${ranks[2]}"
wait $launcher || fail "a death: $(cat "$work/elastic.out")"
wait $alone || exit 1
grep -q "^went on with 2 ranks" "$work/elastic.out" || fail "no recovery: $(cat "$work/elastic.out")"
$compare "$work/alone.jsonl" "$work/elastic.jsonl" > "$work/said" || fail "a death: $(cat "$work/said")"
[[ $(final_hash elastic) == "$(final_hash alone)" ]] || fail "the hash at the end after a death"
echo "the same bits on 1, 2 and 3 ranks, when resumed and after a death"
