#!/bin/bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# train_gpt goes on where it was: on as many ranks with the same losses to the last
# digit, on another number up to rounding; a new run leaves an earlier one's checkpoints
# alone; --init begins with the weights of a file; SIGTERM and Ctrl-C to the job save and end with
# 0, and a signal to one rank alone ends the others with 75.
set -u
program=examples/train_gpt/train_gpt
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/resume.XXXXXX")
common="--data examples --validate-every 1000 --validation-sequences 4 --sample-bytes 0
        --layers 1 --width 32 --context 32 --batch 12"

fail() {
  echo "FAILED: $1"
  exit 1
}

# Whether the losses of the steps after 10 in both logs differ by at most $3.
same_losses() {
  python3 -c '
import json, sys
def losses(path):
    entries = [json.loads(line) for line in open(path)]
    return {e["step"]: e["loss"] for e in entries if e.get("step", 0) > 10}
a, b = losses(sys.argv[1]), losses(sys.argv[2])
print(a, b)
sys.exit(not a or a.keys() != b.keys() or any(abs(a[s] - b[s]) > float(sys.argv[3]) for s in a))
' "$1" "$2" "$3"
}

# To one rank, whose others must stop with it, or to the whole job, as a launcher or a terminal
# sends it, also in a step that takes long (SLOW: for a rank that is stopped).
ends_at_signal() {
  local signal=$1 folder=$work/$1 out=$work/$1.out launcher rank expected=0 status
  : > "$out"
  # In a process group of its own, and with SIGINT, which the shell ignores for what runs behind it.
  python3 -c 'import os, signal, sys
os.setsid(); signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])' \
    $program $common --steps 1000000 --nproc 2 --checkpoints "$folder" \
    --save-every 1000000 > "$out" 2>&1 &
  launcher=$!
  for _ in $(seq 600); do
    grep -q "step" "$out" && break
    sleep 0.1
  done
  rank=$(cat /proc/$launcher/task/*/children | cut -d" " -f1)
  case $signal in
    ONE) kill -TERM "$rank"; expected=75 ;;
    TERM) kill -TERM $launcher ;;
    SLOW) kill -STOP "$rank"; kill -TERM $launcher; sleep 12; kill -CONT "$rank" ;;
    INT) kill -INT -- -$launcher ;;
  esac
  wait $launcher
  status=$?
  [ $status -eq $expected ] || fail "SIG$signal ended with $status: $(tail -5 "$out")"
  ls "$folder"/step-*/manifest.json > /dev/null || fail "SIG$signal saved nothing: $(cat "$out")"
  grep -q "^stopped by a signal" "$out" || fail "SIG$signal: $(cat "$out")"
}

# Beside what follows: nothing of it computes while it is stopped.
ends_at_signal SLOW &
slow=$!

$program $common --steps 20 --nproc 2 --checkpoints "$work/run" --save-every 10 \
  --log "$work/whole.jsonl" > "$work/out" || fail "the first run: $(cat "$work/out")"
for ranks in 2 3; do
  rm -rf "$work/run/step-20"
  [ -e "$work/run/step-10/manifest.json" ] || fail "no checkpoint after step 10"
  $program $common --steps 20 --nproc $ranks --checkpoints "$work/run" --resume \
    --log "$work/resumed-$ranks.jsonl" > "$work/out" || fail "resuming: $(cat "$work/out")"
  grep -q "resumed after step 10" "$work/out" || fail "did not resume: $(cat "$work/out")"
  grep -q "another text" "$work/out" && fail "the same text: $(cat "$work/out")"
done
same_losses "$work/whole.jsonl" "$work/resumed-2.jsonl" 0 || fail "other losses on 2 ranks"
same_losses "$work/whole.jsonl" "$work/resumed-3.jsonl" 1e-4 || fail "other losses on 3 ranks"

# A step that is repeated is saved under a new name: half a checkpoint may have the old one. A log
# that has half a line, too, goes on with whole ones.
printf '{"step":1' >> "$work/whole.jsonl"
rm "$work/run/step-20/rank-00001.safetensors"
before=$(ls "$work/run/step-20" | cksum)
$program $common --steps 20 --nproc 1 --checkpoints "$work/run" --resume --log "$work/whole.jsonl" \
  > "$work/out" || fail "repeating a step: $(cat "$work/out")"
python3 -c 'import json, sys
steps = [json.loads(line).get("step") for line in open(sys.argv[1])]
assert steps == [None, *range(1, 21), None, *range(11, 21)], steps' "$work/whole.jsonl" ||
  fail "half a line in a log"
grep -q "resumed after step 10" "$work/out" || fail "did not repeat: $(cat "$work/out")"
[ -e "$work/run/step-20-2/manifest.json" ] || fail "no checkpoint of the repeated step"
[ "$before" = "$(ls "$work/run/step-20" | cksum)" ] || fail "half a checkpoint was replaced"
rm -r "$work/run/step-20"
mv "$work/run/step-20-2" "$work/run/step-20"

# What a run does not change on its way; more text is only said.
while read -r option value expected; do
  $program $common --data examples/train_gpt/gpt.cc --steps 20 --nproc 1 --checkpoints "$work/run" \
    --resume $option $value > "$work/out" 2>&1 && fail "another $option was accepted"
  grep -q -e "$option: expected $expected as in" "$work/out" || fail "$option: $(cat "$work/out")"
done << 'END'
--heads 2 4
--weight-decay 0.5 0.1
--seed 7 1
END
grep -q "another text than that of .*step-20: [0-9]* bytes" "$work/out" ||
  fail "more text: $(cat "$work/out")"

$program $common --steps 40 --nproc 1 --checkpoints "$work/run" --resume \
  > "$work/out" 2>&1 && fail "the learning rates of another number of steps were accepted"
grep -q "learning rates" "$work/out" || fail "another number of steps: $(cat "$work/out")"

before=$(cat "$work"/run/*/manifest.json | cksum)
$program $common --steps 4 --nproc 1 --checkpoints "$work/run" --save-every 2 \
  > "$work/out" 2>&1 && fail "a new run was accepted in an earlier one's folder"
grep -q "expected a folder without checkpoints.*step-20.*--resume" "$work/out" ||
  fail "the refusal of a new run: $(cat "$work/out")"
[ "$before" = "$(cat "$work"/run/*/manifest.json | cksum)" ] ||
  fail "a refused run changed the checkpoints"

# Folders of own disks: here, one disk.
$program $common --steps 10 --nproc 2 --checkpoints "$work/disks" --save-every 5 --own-disks \
  > "$work/out" 2>&1 || fail "saving to own disks: $(cat "$work/out")"
# Where no batch is asked for, that of the run goes on; a new run of 3 ranks would have 18.
$program ${common/--batch 12/} --steps 10 --nproc 3 --checkpoints "$work/disks" --save-every 5 --own-disks \
  --keep 1 --resume > "$work/out" 2>&1 || fail "resuming from own disks: $(cat "$work/out")"
grep -q "resumed after step 10" "$work/out" || fail "own disks: $(cat "$work/out")"
# Ranks as a launcher starts them on two machines, of which one has lost its disk. A new run would
# have 16.
mkdir "$work/lost"
port=$(python3 -c 'import socket
with socket.socket() as s: s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
absolute=${common/--batch 12/}
absolute=${absolute/--data examples/--data $PWD/examples}
for rank in 0 1; do
  [ $rank -eq 0 ] && folder=$work/lost || folder=$work
  (root=$PWD; cd "$folder" && RANK=$rank WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
    MASTER_ADDR=127.0.0.1 MASTER_PORT=$port exec "$root/$program" $absolute --steps 10 \
    --checkpoints disks --save-every 5 --own-disks --resume) > "$work/out-$rank" 2>&1 &
  pids[rank]=$!
done
for rank in 0 1; do
  wait ${pids[rank]} || fail "without one disk: $(cat "$work"/out-?)"
done
grep -q "resumed after step 10" "$work/out-0" || fail "without one disk: $(cat "$work"/out-?)"

# A new run begins with the weights of a file, which Python makes of the last checkpoint.
python3 - "$work/run/step-20" "$work/model.safetensors" << 'END' || fail "no weights"
import json, pathlib, struct, sys
folder = pathlib.Path(sys.argv[1])
manifest = json.loads((folder / "manifest.json").read_text())
tensors = {}
for p in manifest["parameters"]:
    numel = 1
    for size in p["shape"]:
        numel *= size
    tensors[p["name"]] = bytearray(4 * numel)
for f, file in enumerate(manifest["files"]):
    data = (folder / file["name"]).read_bytes()
    at = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:at])
    for t in manifest["tensors"]:
        if "master" not in t["kinds"]:
            continue
        for number, begin, numel in zip(*(t["pieces"][i::3] for i in range(3))):
            if number == f:
                key = f"{t['of']}[{begin}:{begin + numel}].master"
                first, end = header[key]["data_offsets"]
                tensors[t["of"]][4 * begin:4 * (begin + numel)] = data[at + first:at + end]
header, at = {}, 0
for p in manifest["parameters"]:
    end = at + len(tensors[p["name"]])
    header[p["name"]] = {"dtype": "F32", "shape": p["shape"], "data_offsets": [at, end]}
    at = end
text = json.dumps(header).encode()
pathlib.Path(sys.argv[2]).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
END
trained=$(python3 -c '
import json, sys
print("%.4f" % json.loads(open(sys.argv[1]).readlines()[-1])["validation_loss"])' "$work/resumed-3.jsonl")
$program $common --steps 1 --nproc 1 --init "$work/model.safetensors" > "$work/out" 2>&1 ||
  fail "--init: $(cat "$work/out")"
grep -q "validation loss before training: $trained nats" "$work/out" ||
  fail "--init does not begin with $trained: $(cat "$work/out")"
$program ${common/layers 1/layers 2} --steps 1 --nproc 1 --init "$work/model.safetensors" \
  > "$work/out" 2>&1 && fail "weights of another model were accepted"
grep -q "model.safetensors: expected the tensors of the model" "$work/out" ||
  fail "weights of another model: $(cat "$work/out")"

for signal in ONE TERM INT; do ends_at_signal $signal; done
wait $slow || fail "SLOW, above"
