#!/usr/bin/env bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# How many compilers ./bazelw runs at once, on machines that are folders, and what it says where one
# was killed. In place of Bazel is a program that prints its arguments.
set -euo pipefail
work=$(mktemp -d "${TEST_TMPDIR:-/tmp}/bazelw.XXXXXX")
work=$(readlink -f "$work")

fail() { echo "FAILED: $1"; exit 1; }

# ---- third_party/build_jobs.sh ----
# jobs <cores> <MemAvailable in MB>, on the machine of $root
jobs() {
  mkdir -p "$root/proc"
  echo "MemAvailable: $(($2 * 1024)) kB" > "$root/proc/meminfo"
  CORES=$1 third_party/build_jobs.sh "$root"
}
expect() { [[ $2 == "$3" ]] || fail "$1: expected $2, got $3"; }
# group <folder> <limit in MB or a word> <used> <page cache>, of version 2
group() {
  mkdir -p "$1"
  if [[ $2 =~ ^[0-9]+$ ]]; then echo $(($2 << 20)); else echo "$2"; fi > "$1/memory.max"
  echo $(($3 << 20)) > "$1/memory.current"
  printf 'anon 1\nfile %d\n' $(($4 << 20)) > "$1/memory.stat"
}

root=$work/plain
expect "memory for all" 3 "$(jobs 2 24000)"
expect "64 cores" 96 "$(jobs 64 200000)"
expect "64 cores and 8 GB" 7 "$(jobs 64 8100)"
expect "2 GB" 1 "$(jobs 4 2048)"
expect "nearly nothing" 1 "$(jobs 4 300)"
expect "nothing known" 6 "$(CORES=4 third_party/build_jobs.sh "$work/none")"

root=$work/group2
mkdir -p "$root/proc/self"
echo 0::/user/job > "$root/proc/self/cgroup"
group "$root/sys/fs/cgroup/user/job" max 100 0
expect "no limit" 12 "$(jobs 8 64000)"
group "$root/sys/fs/cgroup/user" 6144 3072 2048
expect "a limit above the process, of which the page cache takes a part" 4 "$(jobs 8 64000)"
group "$root/sys/fs/cgroup" 2048 100 0
expect "a limit at the top, as in a container" 1 "$(jobs 8 64000)"

root=$work/group1
mkdir -p "$root"/{proc/self,sys/fs/cgroup/memory/docker/x}
printf '5:devices:/\n4:cpu,memory:/docker/x\n' > "$root/proc/self/cgroup"
echo 9223372036854771712 > "$root/sys/fs/cgroup/memory/memory.limit_in_bytes"
echo 0 > "$root/sys/fs/cgroup/memory/memory.usage_in_bytes"
expect "version 1 without a limit" 12 "$(jobs 8 64000)"
echo $((4096 << 20)) > "$root/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes"
echo $((1024 << 20)) > "$root/sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes"
expect "version 1" 2 "$(jobs 8 64000)"

# ---- ./bazelw ----
export HOME=$work/home TORCH_PATH=$work BAZEL_STATUS=0
mkdir -p "$work"/{bin,home,tree/third_party,tree/.bazel,base/execroot/zero/bazel-out}
ln -s "$work/base/execroot/zero/bazel-out" "$work/tree/.bazel/out"
cp bazelw "$work/tree/"
printf '%s\n' 'APT_PACKAGES=""' 'APT_PLUGIN_PACKAGE="dpkg"' > "$work/tree/third_party/versions.env"
printf '#!/bin/sh\necho 5\n' > "$work/tree/third_party/build_jobs.sh"
cat > "$work/bin/bazel" << 'END'
#!/bin/sh
[ "$1" != --version ] || { echo "bazel ${BAZEL_VERSION:-no_version}"; exit; }
[ -z "${BAZEL_PID:-}" ] || { echo $$ > "$BAZEL_PID"; exec sleep 1000; }
echo "$*"
exit "$BAZEL_STATUS"
END
chmod +x "$work/bin/bazel" "$work/tree/third_party/build_jobs.sh"
bazelw() { PATH=$work/bin:$PATH "$work/tree/bazelw" "$@" 2>&1; }

expect "build" "build --jobs=5 //..." "$(bazelw build //...)"
expect "startup options" "--batch test --jobs=5 -k //x" "$(bazelw --batch test -k //x)"
expect "run" "run --jobs=5 //x -- --nproc 2" "$(bazelw run //x -- --nproc 2)"
expect "the user's" "build --jobs=9 //..." "$(bazelw build --jobs=9 //...)"
expect "the user's, in short" "build -j 9 //..." "$(bazelw build -j 9 //...)"
expect "query" "query //..." "$(bazelw query //...)"
expect "help" "help test --long" "$(bazelw help test --long)"
echo "build --jobs=2" > "$work/tree/user.bazelrc"
expect "user.bazelrc" "build //..." "$(bazelw build //...)"
echo "# build --jobs=2" > "$work/tree/user.bazelrc"
expect "a comment in user.bazelrc" "build --jobs=5 //..." "$(bazelw build //...)"

expect "Bazel 7" "--bazelrc=$work/tree/third_party/bazel7.bazelrc build --jobs=5 //..." "$(BAZEL_VERSION=7.6.1 bazelw build //...)"
for version in 8.0.0 9.1.0 10.0.0; do
  BAZEL_VERSION=$version bazelw build //... > "$work/log" && fail "Bazel $version: taken"
  grep -q "bazelw: expected Bazel 4 to 7,.*got bazel $version in $work/bin/bazel" "$work/log" || fail "Bazel $version: $(< "$work/log")"
done

# What is fetched lies in the checkout, and Bazel refuses a libtorch whose path has a space.
mkdir -p "$work/a tree/third_party"
cp "$work/tree/bazelw" "$work/a tree/"
cp "$work/tree/third_party"/* "$work/a tree/third_party/"
printf '#!/bin/sh\necho fetched\n' > "$work/a tree/third_party/fetch_libtorch.sh"
chmod +x "$work/a tree/third_party/fetch_libtorch.sh"
(unset TORCH_PATH; PATH=$work/bin:$PATH "$work/a tree/bazelw" build //... 2>&1) > "$work/log" && fail "a space: taken"
[[ $(< "$work/log") == "bazelw: expected a checkout whose path has no space"* ]] || fail "a space: $(< "$work/log")"
expect "a space, with a libtorch" "build --jobs=5 //..." "$(PATH=$work/bin:$PATH "$work/a tree/bazelw" build //... 2>&1)"

said="run this again with --jobs=1"
# ends <status> <line of Bazel's log>: what bazelw says, and that it passes the status on.
ends() {
  local status=0
  echo "$2" > "$work/base/command.log"
  BAZEL_STATUS=$1 bazelw build //... || status=$?
  ((status == $1)) || fail "expected status $1, got $status"
}
for line in "g++: fatal error: Killed signal terminated program cc1plus" \
  "collect2: fatal error: ld terminated with signal 9 [Killed]" \
  "clang: error: unable to execute command: Killed" \
  "cc1plus: out of memory allocating 65536 bytes" \
  "ERROR: C++ compilation of rule '//x' failed (Killed): gcc failed"; do
  [[ $(ends 1 "$line") == *"$said"* ]] || fail "nothing said of: $line"
done
[[ $(ends 1 "x.cc:1: error: expected ';'") != *"$said"* ]] || fail "said of another error"
[[ $(ends 0 "Killed signal terminated program cc1plus") != *"$said"* ]] || fail "said of success"
ends 8 "" > /dev/null

# A package may be installed for several architectures, and that of the machine counts.
mkdir "$work/debian"
printf '#!/bin/sh\nexit 1\n' | tee "$work/debian/apt-get" > "$work/debian/sudo"
printf '#!/bin/sh\necho native\n' > "$work/debian/dpkg"
cat > "$work/debian/dpkg-query" << 'END'
#!/bin/sh
[ "$1 $2" = "-W -f" ] || exit 1
for architecture in $ARCHITECTURES; do
  printf "$(printf %s "$3" | sed "s/\${Architecture}/$architecture/; s/\${db:Status-Status}/installed/")"
done
END
chmod +x "$work/debian"/*
sed -i 's/APT_PACKAGES=""/APT_PACKAGES="library"/' "$work/tree/third_party/versions.env"
# installed <architectures of every package>: what bazelw prints or says
installed() { (export ARCHITECTURES=$1 PATH=$work/debian:$PATH; bazelw build //...) || true; }
for architectures in native all "native foreign" "foreign native"; do
  expect "$architectures" "build --jobs=5 //..." "$(installed "$architectures")"
done
for architectures in "" foreign; do
  [[ $(installed "$architectures") == *"apt-get install library"* ]] || fail "taken for installed: $architectures"
done
sed -i 's/APT_PACKAGES=.*/APT_PACKAGES=""/' "$work/tree/third_party/versions.env"

# A script that is killed leaves no Bazel behind.
if command -v setpriv > /dev/null; then
  BAZEL_PID=$work/pid PATH=$work/bin:$PATH "$work/tree/bazelw" build //... &
  script=$!
  until [[ -s $work/pid ]]; do sleep 0.05; done
  kill -KILL "$script"
  wait "$script" 2> /dev/null || true
  stat=/proc/$(cat "$work/pid")/stat
  until [[ ! -e $stat || $(cut -d ' ' -f 3 "$stat") == Z ]]; do sleep 0.05; done
fi
echo passed
