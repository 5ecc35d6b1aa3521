#!/usr/bin/env bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Usage: fuzz_test.sh <name>: runs <name>_fuzzer on its seeds and on what it makes
# of them, for ZERO_FUZZ_SECONDS (default 30) or ZERO_FUZZ_RUNS runs.
#
# A crash, a report of a sanitizer, an allocation above 64 MiB by an input of at
# most 16 KiB, or a run longer than 10 s fails. What failed is printed in base64.
set -euo pipefail

here=$(dirname "$0")
name=$1
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/fuzz.XXXXXX")
mkdir "$work/corpus" "$work/tmp"
"$here/write_seeds" "$work/seeds"

# Errors are this target's daily bread; their backtraces would take all its time.
export TORCH_SHOW_CPP_STACKTRACES=0
export TMPDIR=$work/tmp
status=0
"$here/${name}_fuzzer" "$work/corpus" "$work/seeds/$name" \
  -dict="$here/${name}.dict" -max_len=16384 -timeout=10 \
  -rss_limit_mb=2048 -malloc_limit_mb=64 -seed=1 -print_final_stats=1 \
  -max_total_time="${ZERO_FUZZ_SECONDS:-30}" -runs="${ZERO_FUZZ_RUNS:-10000000}" \
  -artifact_prefix="$work/" > "$work/log" 2>&1 || status=$?
grep -vE '^#[0-9]+.*(NEW|REDUCE|pulse)' "$work/log" | tail -n 80
for input in "$work"/crash-* "$work"/oom-* "$work"/timeout-*; do
  [[ -f $input ]] && echo "input in base64: $(base64 -w0 "$input")"
done
exit "$status"
