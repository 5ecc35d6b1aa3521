#!/bin/bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# What train_gpt writes beside the model: metrics by step that plot_metrics.py reads, and a
# trace with the training's own ranges and libtorch's. The same runs show that a batch may be cut.
set -u
program=examples/train_gpt/train_gpt
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/outputs.XXXXXX")
common="--data examples --validation-sequences 4 --sample-bytes 0 --nproc 2
        --layers 1 --width 32 --context 32 --batch 4"

fail() {
  echo "FAILED: $1"
  exit 1
}

$program $common --steps 6 --validate-every 3 --ema 0.9 --metrics "$work/metrics" \
  --trace "$work/trace.json" --trace-steps 2 > "$work/out" 2>&1 || fail "$(cat "$work/out")"

python3 - "$work/metrics/steps-0.jsonl" <<'END' || fail "metrics: $(cat "$work/metrics/steps-0.jsonl")"
import json, sys
run, *lines = [json.loads(line) for line in open(sys.argv[1])]
assert run["run"]["world_size"] == 2 and run["run"]["batch"] == 4, run
assert run["run"]["dtype"] == "float32" and run["run"]["first_step"] == 0, run
assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
for line in lines:
    assert 0 < line["loss"] < 10 and 0 < line["gradient_norm"] < 100, line
    assert line["learning_rate"] > 0 and line["seconds"] > 0, line
    assert abs(line["tokens_per_second"] * line["seconds"] / line["tokens"] - 1) < 1e-6, line
    assert line["memory"]["working_parameters"] > 0, line
assert lines[-1]["memory"]["optimizer_state"] > 0
assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6]
# The average is behind the parameters, which learn fast at first.
assert [line["step"] for line in lines if "ema_validation_loss" in line] == [3, 6]
assert all(line["ema_validation_loss"] > line["validation_loss"]
           for line in lines if "validation_loss" in line), lines
assert run["run"]["ema"] == 0.9 and lines[-1]["memory"]["ema"] > 0
END

python3 - "$work/trace.json" <<'END' || fail "the trace"
import json, sys
events = [e for e in json.load(open(sys.argv[1]))["traceEvents"] if e.get("ph") == "X"]
names = [e["name"] for e in events]
# Two steps, on rank 0 alone.
assert names.count("train_gpt::step") == 2, names.count("train_gpt::step")
for name in ("train_gpt::forward", "aten::layer_norm", "MmBackward0", "gloo:send"):
    assert name in names, name
# The optimizer's phases, by bucket, whichever thread they are on.
for phase in ("pack bucket 0", "reduce bucket 0", "clip", "update bucket 0", "gather bucket 0"):
    assert "zero::" + phase in names, phase
steps = [e for e in events if e["name"] == "train_gpt::step"]
# Validation is a forward pass outside of steps.
inside = [e for e in events if e["name"] == "train_gpt::forward" and any(
    s["ts"] <= e["ts"] and e["ts"] + e["dur"] <= s["ts"] + s["dur"] for s in steps)]
assert len(inside) == 2, len(inside)
END

# The plot where matplotlib is; elsewhere a sentence that says what to install.
python3 examples/train_gpt/plot_metrics.py "$work/metrics" --out "$work/run.png" > "$work/out" 2>&1
status=$?
if python3 -c "import matplotlib" 2> /dev/null; then
  [ $status -eq 0 ] && [ -s "$work/run.png" ] || fail "plot_metrics: $(cat "$work/out")"
else
  [ $status -ne 0 ] && grep -q "apt-get install python3-matplotlib" "$work/out" ||
    fail "plot_metrics: $(cat "$work/out")"
fi

# Event files hold every value of every step, where tensorboardX is.
python3 examples/train_gpt/plot_metrics.py "$work/metrics" --tensorboard "$work/events" > "$work/out" 2>&1
status=$?
if python3 -c "import tensorboardX" 2> /dev/null; then
  [ $status -eq 0 ] && python3 - "$work" << 'END' || fail "event files: $(cat "$work/out")"
import json, pathlib, struct, sys
from tensorboardX.proto.event_pb2 import Event
work = pathlib.Path(sys.argv[1])
[events] = (work / "events/metrics").iterdir()
data, got = events.read_bytes(), {}
while data:  # length, its checksum, event, its checksum
    length, = struct.unpack("<Q", data[:8])
    event = Event.FromString(data[12:12 + length])
    got.update(((event.step, v.tag), v.simple_value) for v in event.summary.value if v.tag != "run/text_summary")
    data = data[16 + length:]
steps = [json.loads(line) for path in work.glob("metrics/*") for line in path.open()]
steps = [line for line in steps if "step" in line]
assert steps
for line in steps:
    memory = line.pop("memory")
    line.update((f"memory/{kind}", value) for kind, value in memory.items())
    step = line.pop("step")
    for name, value in line.items():
        if value is not None:
            other = got.pop((step, name))
            assert abs(other - value) <= 1e-6 * abs(value), (step, name, value, other)
assert not got, got
END
else
  [ $status -ne 0 ] && grep -q "pip install tensorboardX" "$work/out" || fail "--tensorboard: $(cat "$work/out")"
fi

# Two runs in one picture, of which one was resumed on another number of ranks. However a batch is
# cut into micro-batches, it has one loss and one norm, up to rounding.
$program $common --accumulate 2 --steps 6 --metrics "$work/other" --checkpoints "$work/saved" --save-every 3 \
  > "$work/out" 2>&1 || fail "$(cat "$work/out")"
rm -r "$work/saved/step-6"
$program ${common/--nproc 2/--nproc 1} --accumulate 4 --steps 6 --metrics "$work/other" \
  --checkpoints "$work/saved" --resume > "$work/out" 2>&1 || fail "$(cat "$work/out")"
python3 - "$work" << 'END' || fail "losses and norms of batches that are cut"
import json, pathlib, sys
def steps(path):
    lines = [json.loads(line) for line in path.open()]
    return {line["step"]: line for line in lines if "step" in line}
work = pathlib.Path(sys.argv[1])
whole = steps(work / "metrics/steps-0.jsonl")
for name, first in ("steps-0.jsonl", 1), ("steps-3.jsonl", 4):
    cut = steps(work / "other" / name)
    assert list(cut) == list(range(first, 7)), cut
    for step, line in cut.items():
        for key in "loss", "gradient_norm":
            assert abs(line[key] / whole[step][key] - 1) < 1e-4, (name, line, whole[step])
END
if python3 -c "import matplotlib" 2> /dev/null; then
  python3 examples/train_gpt/plot_metrics.py "$work/metrics" "$work/other" --out "$work/two.png" \
    > "$work/out" 2>&1 && [ -s "$work/two.png" ] || fail "plot of two runs: $(cat "$work/out")"
fi

# A run that begins anew in a folder adds to it, and is all that is drawn then.
$program $common --steps 2 --metrics "$work/other" --log /dev/full > "$work/out" 2>&1 ||
  fail "a full disk ended the training: $(cat "$work/out")"
[ "$(grep -c "cannot write /dev/full" "$work/out")" -eq 1 ] || fail "a full disk: $(cat "$work/out")"
mkdir "$work/second"
cp -r "$work/metrics" "$work/second"
# The folder of a run that was given one when it went on.
mkdir "$work/late"
sed 's/"first_step": *0/"first_step": 1/; /"step": *1[,}]/d' "$work/metrics/steps-0.jsonl" > "$work/late/steps-1.jsonl"
PYTHONPATH=examples/train_gpt python3 - "$work/other" "$work"/{,second/}metrics "$work/late" << 'END' || fail "a new run in the folder of another"
import json, sys
from plot_metrics import Run, name_apart
run = Run(sys.argv[1])
assert list(run.steps) == [1, 2] and not run.restarts, run.steps
assert run.configuration["steps"] == 2, run.configuration
lines = [json.loads(line) for line in open(sys.argv[1] + "/steps-0.jsonl")]
assert [line.get("step") for line in lines] == [None, 1, 2, 3, 4, 5, 6, None, 1, 2], lines
late = Run(sys.argv[4])
assert late.restarts == [1] and "2 ranks" in late.label(), late.label()
equal = [Run(folder) for folder in sys.argv[2:4]]
name_apart(equal)
assert equal[0].name != equal[1].name == "second-metrics", [run.name for run in equal]
END

# Without --batch three ranks find one that suits them; the memory of a large model is shown.
without_batch=${common/--batch 4/}
$program ${without_batch/--nproc 2/--nproc 3} --steps 2 > "$work/out" 2>&1 ||
  fail "three ranks with defaults: $(cat "$work/out")"
grep -q "with a billion parameters in bf16: [0-9.]* GB on each of 3 ranks, 16.0 GB" "$work/out" ||
  fail "the memory of a billion parameters: $(cat "$work/out")"
$program ${common/--sample-bytes 0/--sample-bytes 20} --steps 10 --prompt "Or else" --temperature 0.5 \
  --update-in-backward --optimizer lion --lr 0.003 --log "$work/lion.jsonl" > "$work/out" 2>&1 ||
  fail "$(cat "$work/out")"
[ "$(grep -c "^sample" "$work/out")" -eq 3 ] || fail "three samples: $(cat "$work/out")"
[ "$(grep -c "^Or else" "$work/out")" -eq 3 ] || fail "samples of a prompt: $(cat "$work/out")"

# What cannot be written or used is said before there are ranks.
while read -r expected; do
  read -r arguments
  eval "set -- $arguments"
  $program $common --steps 2 "$@" > "$work/out" 2>&1
  [ $? -eq 2 ] && grep -q -e "$expected" "$work/out" || fail "$arguments: $(cat "$work/out")"
done << 'END'
--trace: cannot write
--trace "$work/no/such/folder.json"
--checkpoints: cannot make or write to the folder /proc/none
--checkpoints /proc/none
--metrics: cannot make or write to the folder /proc/none
--metrics /proc/none
--checkpoints: expected a path, got an empty text
--checkpoints "" --resume
--log: expected a path, got an empty text
--log ""
--report: expected another file than that of --log
--log "$work/twice" --report "$work/twice"
--muon-lr: expected --optimizer muon, got adamw
--muon-lr 0.1
--update-in-backward: .*--dtype float32 or bfloat16.*got .*--dtype float16
--update-in-backward --dtype float16
END
# Fewer steps than it would skip: the last one is traced.
$program $common --steps 2 --trace "$work/short.json" --accumulate 2 --dtype bfloat16 \
  --gradient-shards bfloat16 --log "$work/short.jsonl" > "$work/out" 2>&1 || fail "$(cat "$work/out")"
grep -q '"train_gpt::step"' "$work/short.json" || fail "a short run has no trace"
python3 - "$work" << 'END' || fail "losses in bfloat16 and of updates in backward"
import json, pathlib, sys
def steps(path):
    return [json.loads(line) for line in (pathlib.Path(sys.argv[1]) / path).open()][1:]
whole, short, lion = map(steps, ("metrics/steps-0.jsonl", "short.jsonl", "lion.jsonl"))
for key in "loss", "gradient_norm":
    assert abs(short[0][key] / whole[0][key] - 1) < 0.05, (short[0], whole[0])
assert len(lion) == 10 and lion[-1]["loss"] < lion[0]["loss"] - 0.5, lion
END
# Each option below leaves a number of its own in one of four runs.
options() {
  local name=$1
  shift
  $program ${common/0 --nproc 2/20 --nproc 1} --steps 2 --log "$work/$name.jsonl" \
    --checkpoints "$work/$name" "$@" > "$work/$name.out" 2>&1 || fail "$name: $(cat "$work/$name.out")"
}
options muon --optimizer muon --muon-lr 0.5 --warmup 1 --heads 1 --stage 1
options split --dtype bfloat16 --split-masters --moments int8 --gradient-shards bfloat16 --lr 0.002 --weight-decay 0.3
options clipped --max-norm 1e-9 --weight-decay 0 --dropout 0.5 --prompt "Or else"
options half --optimizer lamb --dtype float16
python3 - "$work" << 'END' || fail "an option does nothing: $(tail -n 2 "$work"/{muon,split,clipped,half}.jsonl)"
import json, pathlib, sys
work = pathlib.Path(sys.argv[1])
def steps(path):
    return [json.loads(line) for line in (work / path).open()][1:]
def manifest(name):
    return json.loads((work / name / "step-2/manifest.json").read_text())
plain = steps("metrics/steps-0.jsonl")
muon, split, clipped, half = (steps(name + ".jsonl") for name in ("muon", "split", "clipped", "half"))
assert [line["learning_rate"] for line in muon] == [0.25, 0.5], "--muon-lr, --warmup"
# Losses before training hardly differ. Two ranks and one differ by less than 1e-6.
assert abs(muon[0]["gradient_norm"] / plain[0]["gradient_norm"] - 1) > 5e-6, "--heads"
assert muon[0]["memory"]["full_gradients"] > 0 == plain[0]["memory"]["full_gradients"], "--stage"
assert split[0]["learning_rate"] == 0.002, "--lr"
memory = split[1]["memory"]
working = memory["working_parameters"]  # 2 bytes each
assert memory["master_parameters"] < 1.5 * working, "--split-masters"
assert memory["gradient_shards"] < 1.5 * working, "--gradient-shards"
assert memory["optimizer_state"] < 2 * working, "--moments"
assert [group["weight_decay"] for group in manifest("split")["groups"]] == [0.3, 0], "--weight-decay"
assert abs(clipped[0]["loss"] - plain[0]["loss"]) > 1e-5, "--dropout"
out = (work / "clipped.out").read_text()
before = float(out.split("validation loss before training: ")[1].split()[0])
assert abs(clipped[1]["validation_loss"] - before) < 1e-3, "--max-norm"
assert len(out.split("\nsample\n")[1]) == len("Or else") + 20 + 1, "--sample-bytes"
assert half[0]["loss_scale"] == 65536 and "lamb" in manifest("half")["optimizer"].lower(), "half"
END
echo "metrics, trace and plot are as they should be"
