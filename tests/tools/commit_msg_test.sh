#!/usr/bin/env bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# The hook accepts subjects as CONTRIBUTING.md asks for them, and says of others what is wrong.
set -euo pipefail

hook=$PWD/.ci/hooks/commit-msg
message=$(mktemp)
trap 'rm -f "$message"' EXIT
failed=0

# accepts <message>
accepts() {
  printf '%b' "$1" > "$message"
  local said
  said=$("$hook" "$message" 2>&1) || { echo "refused: $1: $said"; failed=1; }
}

# refuses <words of the reason> <message>
refuses() {
  printf '%b' "$2" > "$message"
  local said
  if said=$("$hook" "$message" 2>&1); then
    echo "accepted: $2"
    failed=1
  elif [[ $said != *"$1"* ]]; then
    echo "another reason for: $2: $said"
    failed=1
  fi
}

longest=$(printf 'a%.0s' {1..58})
accepts "comm: post receives before sends\n"
accepts "comm: post receives before sends\n\nThe body says why.\nIn lines.\n"
accepts "gradients, checkpoint: say which buckets go last\n# a comment of git\n"
accepts ".ci/run: pass --full on\n"
accepts "tests: bring $longest\n"
accepts "Merge branch 'main'\n"
accepts 'Revert "comm: take back what ends waits"\n'
accepts "fixup! comm: post receives before sends\n"

refuses "73 characters" "tests: bring ${longest}aa\n"
refuses "names no area" "post receives before sends\n"
refuses "names no area" "comm:post receives\n"
refuses "names no area" "wip\n"
refuses "names no area" "\n"
refuses "capital letter" "comm: Post receives before sends\n"
refuses "full stop" "comm: post receives before sends.\n"
refuses 'begins with "a"' "comm: a receive is posted before sends\n"
refuses 'begins with "what"' "checkpoint: what a copy without a bucket is\n"
refuses "not an imperative" "comm: posted receives before sends\n"
refuses "not an imperative" "comm: posts receives before sends\n"
refuses "not an imperative" "comm: posting receives before sends\n"
refuses "is not empty" "comm: post receives before sends\nThe body.\n"
exit "$failed"
