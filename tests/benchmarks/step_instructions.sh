#!/usr/bin/env bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Usage: ./bazelw run //tests/benchmarks:step_instructions [-- <options>]
#
# Instructions of one training step, by the number of ranks: what the optimizer costs on the host
# when communication is free (tests/support/simulated_steps.h), counted by callgrind on all threads. Counts
# do not depend on how busy the machine is. A minute with the defaults.
#
#   --worlds "8 64 1024 16384"   numbers of ranks
#   --layout contiguous          or per_parameter
#   --stage 2                    or 1
#   --parameters 200             half of them matrices [width, width], half vectors [width]
#   --widths "16 64"             one table each
#   --steps 10                   counted steps
#   --top 0                      functions to list, by instructions including what they call
#   --keep FOLDER                leave callgrind's files there
set -euo pipefail

worlds="8 64 1024 16384" layout=contiguous stage=2 parameters=200 widths="16 64" steps=10 top=0
keep=
while (($#)); do
  case $1 in
    --worlds | --layout | --stage | --parameters | --widths | --steps | --top | --keep)
      (($# > 1)) || { echo "step_instructions: $1 needs a value" >&2; exit 2; }
      printf -v "${1#--}" %s "$2"
      shift 2 ;;
    *) echo "step_instructions: unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
done
command -v valgrind > /dev/null || { echo "valgrind is missing: apt-get install valgrind" >&2; exit 1; }

program=$(dirname "${BASH_SOURCE[0]}")/count_steps
[[ -x $program ]] || program=.bazel/bin/tests/benchmarks/count_steps
folder=${keep:-$(mktemp -d)}
[[ -n $keep ]] || trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder"
# A thread pool would add instructions that depend on chance.
export OMP_NUM_THREADS=1

# count <world size> <width>: instructions of one step.
count() {
  local out=$folder/width-$2-world-$1.out collected
  collected=$(valgrind --tool=callgrind --instr-atstart=no --callgrind-out-file="$out" \
    "$program" "$1" "$stage" "$layout" "$parameters" "$2" "$steps" 2>&1 |
    sed -nE 's/.*Collected : ([0-9]+).*/\1/p')
  ((${collected:-0} > 0)) || { echo "step_instructions: callgrind counted nothing" >&2; return 1; }
  echo $((collected / steps))
}

for width in $widths; do
  plain=$(count 0 "$width")
  echo "$parameters parameters, width $width, $layout, stage $stage; autograd alone: $plain"
  printf '%8s %14s %16s %14s %10s\n' ranks step "beyond autograd" "per parameter" growth
  first=''
  for world in $worlds; do
    step=$(count "$world" "$width")
    : "${first:=$step}"
    awk -v w="$world" -v s="$step" -v o=$((step - plain)) -v n="$parameters" -v f="$first" \
      'BEGIN { printf "%8d %14d %16d %14d %+9.1f%%\n", w, s, o, o / n, (s / f - 1) * 100 }'
  done
  if ((top > 0)); then
    for world in $worlds; do
      echo "width $width, $world ranks: instructions of $steps steps with everything called"
      callgrind_annotate --inclusive=yes --threshold=100 "$folder/width-$width-world-$world.out" |
        grep -E '^ *[0-9,]+ \(' | grep 'zero::' | sed -E 's/ \[[^]]*\]$//; s/\?\?\?://' |
        cut -c1-150 | head -n "$top" || true
    done
  fi
done
