#!/usr/bin/env bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Usage: third_party/build_jobs.sh [<root of proc and sys>]
#
# Prints how many actions Bazel may run at once: half as many again as there are cores, since many
# tests wait, and no more compilers than fit into the memory that is free, here and in every control
# group of this process. ./bazelw passes it as --jobs. The argument and CORES are for the test.
set -euo pipefail

root=${1:-}
compiler_mb=1000  # of a file that includes most of libtorch
server_mb=1000    # of Bazel itself

cores=${CORES:-$(nproc)}
free_mb=$(awk '/^MemAvailable:/ {print int($2 / 1024)}' "$root/proc/meminfo" 2> /dev/null || true)
free_mb=${free_mb:-$((cores * compiler_mb * 2))}

# limit <folder> <file of the limit> <file of the use> <name of the page cache in memory.stat>:
# the page cache counts as used there, and goes where memory is needed.
limit() {
  local most used cache room
  most=$(cat "$1/$2" 2> /dev/null) && used=$(cat "$1/$3" 2> /dev/null) || return 0
  # "max", or of version 1 a number beyond any memory.
  [[ $most =~ ^[0-9]{1,15}$ ]] || return 0
  cache=$(awk -v name="$4" '$1 == name {print $2}' "$1/memory.stat" 2> /dev/null || true)
  room=$(((most - used + ${cache:-0}) / 1048576))
  ((room >= free_mb)) || free_mb=$room
}

# From the group of this process up: each has a limit of its own. In a container the path may be
# that of the host, and the container's group is mounted at the top.
while IFS=: read -r _ controllers path; do
  case ,$controllers, in
    ,,) top=$root/sys/fs/cgroup files=(memory.max memory.current file) ;;
    *,memory,*) top=$root/sys/fs/cgroup/memory files=(memory.limit_in_bytes memory.usage_in_bytes total_cache) ;;
    *) continue ;;
  esac
  while :; do
    limit "$top$path" "${files[@]}"
    [[ -n ${path%/} ]] || break
    path=${path%/*}
  done
done < <(cat "$root/proc/self/cgroup" 2> /dev/null)

jobs=$(((cores * 3 + 1) / 2))
fit=$(((free_mb - server_mb) / compiler_mb))
((fit >= jobs)) || jobs=$fit
echo $((jobs < 1 ? 1 : jobs))
