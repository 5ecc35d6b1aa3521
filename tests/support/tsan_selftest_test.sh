#!/usr/bin/env bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Passes when ThreadSanitizer reports the race that planted_race.cc contains:
# with --config=tsan only, which brings the suppressions that could hide it.
set -uo pipefail
output=$(tests/support/tsan_selftest 2>&1)
status=$?
printf '%s\n' "$output"
if ((status == 0)); then
  echo "expected a failure of planted_race, got exit status 0: the race was not reported"
  exit 1
fi
for text in "WARNING: ThreadSanitizer: data race" "count_without_a_lock"; do
  if [[ $output != *"$text"* ]]; then
    echo "expected the report to contain '$text'"
    exit 1
  fi
done
