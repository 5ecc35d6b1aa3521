#!/usr/bin/env bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Usage: tests/packages/bazel_test.sh [--build]
#
# The Bazel project of docs/building.md, outside of this repository, loads and is analysed; with
# --build, which compiles the library without optimisation, it also builds and runs.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
steps=(--nobuild)
[[ ${1:-} != --build ]] || steps=()
bazel=$(command -v bazel || command -v bazelisk)

if [[ -z ${TORCH_PATH:-}${LIBTORCH:-} ]]; then
  "$root/third_party/fetch_libtorch.sh" cpu
  export TORCH_PATH=$root/.deps/libtorch-cpu/torch
fi
work=$(mktemp -d)
project=$work/trainer
run_bazel() { (cd "$project" && "$bazel" --output_user_root="$work/bazel" "$@"); }
clean() {
  run_bazel shutdown > /dev/null 2>&1 || true
  chmod -R u+w "$work"
  rm -rf "$work"
}
trap clean EXIT

# The blocks of the section: WORKSPACE, BUILD, .bazelrc.
mkdir "$project"
ln -s "$root" "$work/zero"
cp "$root/tests/packages/consumer/trainer.cc" "$project"
awk -v folder="$project" '
  /^## / { here = $0 == "## Bazel" }
  !here { next }
  /^`WORKSPACE`/ { file = "WORKSPACE" } /^`BUILD`/ { file = "BUILD" } /^`.bazelrc`/ { file = ".bazelrc" }
  /^```/ { inside = !inside; next }
  inside { print > (folder "/" file) }' "$root/docs/building.md"
# Every target of the table of headers is visible from outside.
targets=$(grep -oE '`//[a-z]*:[a-z_]+`' "$root/docs/building.md" | tr -d '`' | sort -u | sed 's|.*|"@zero&", |')
[[ $targets == *//zero:launch* ]] || { echo "bazel_test: docs/building.md lists no targets" >&2; exit 1; }
printf 'cc_library(name = "every_target", deps = [%s])\n' "$targets" >> "$project/BUILD"
version=$(run_bazel --version 2> /dev/null)
case ${version#bazel } in
  6.* | 7.*) echo "common --noenable_bzlmod" >> "$project/.bazelrc" ;;
  8.*) printf 'common --noenable_bzlmod\ncommon --enable_workspace\n' >> "$project/.bazelrc" ;;
esac

run_bazel build --nobuild :every_target > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
run_bazel build --jobs=2 "${steps[@]}" --nosandbox_debug --color=no --noshow_progress :trainer 2>&1 | tee "$work/log"
if ((${#steps[@]} == 0)); then
  ! grep "warning:" "$work/log" || { echo "bazel_test: the library compiles with warnings" >&2; exit 1; }
  "$project/bazel-bin/trainer" | tee "$work/output"
  grep -q ': 2 ranks and one process agree$' "$work/output"
fi

# Another g++ in the place of one makes other precompiled headers: what it says of itself is an input.
printf '#!/bin/sh\n[ "$*" != --version ] || { cat "%s"; exit; }\nexec gcc "$@"\n' "$work/version" > "$work/gcc"
chmod +x "$work/gcc"
for version in "gcc 12.2.0-14" "gcc 12.2.0-14+deb12u1"; do
  echo "$version" > "$work/version"
  run_bazel shutdown
  CC=$work/gcc run_bazel aquery 'mnemonic("PrecompileHeader", @zero//third_party/pch:torch)' > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
  grep -q 'Inputs:.*external/libtorch/compiler.txt' "$work/log"
  grep -qxF "$version" "$(run_bazel info output_base 2> /dev/null)/external/libtorch/compiler.txt"
done
run_bazel shutdown

mkdir -p "$work/old/include/torch/headeronly" "$work/old/include/torch/csrc/api/include/torch" "$work/old/lib"
touch "$work/old/include/torch/csrc/api/include/torch/torch.h"
printf '#define TORCH_VERSION_%s %s\n' MAJOR 2 MINOR 8 PATCH 0 > "$work/old/include/torch/headeronly/version.h"
# refuses <message> [option of Bazel...]
old=$work/old
refuses() {
  if TORCH_PATH=$old run_bazel build --nobuild --color=no "${@:2}" :trainer > "$work/log" 2>&1 || ! grep -F "$1" "$work/log"; then
    cat "$work/log"
    echo "bazel_test: expected the message: $1" >&2
    exit 1
  fi
}
refuses "expected libtorch 2.9 or later, got 2.8"
old=old refuses "expected an absolute path of a libtorch, got TORCH_PATH=old"
cp -r "$work/old" "$work/a torch"
old="$work/a torch" refuses "expected a libtorch in a folder whose path has no space"

nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
if [[ -x $nvcc ]]; then
  printf '#define TORCH_VERSION_%s %s\n' MAJOR 2 MINOR 99 PATCH 0 > "$work/old/include/torch/headeronly/version.h"
  major=$("$nvcc" --version | sed -nE 's/.*release ([0-9]+)\..*/\1/p')
  for cuda in "$major.9" "$((major + 1)).0"; do
    echo "__version__ = '2.99.0+cu${cuda/./}'" > "$work/old/version.py"
    refuses "expected a CUDA toolkit $cuda or a later ${cuda%.*}," --repo_env=ZERO_CUDA=1
  done
fi
