#!/usr/bin/env bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Usage: tests/packages/cmake_test.sh [--cuda | --compare] [build folder]
#
# The project of docs/building.md, outside of this repository, builds and runs in every way that the
# document shows: with add_subdirectory, FetchContent, and with an installation in an empty folder,
# static and shared, by find_package and by pkg-config. Compares both builds, and runs a few tests
# by ctest.
#
# The library is compiled once, without optimisation, in the build folder (build/packages), and
# again only where sources changed. With --cuda only this is done: the library is built with
# ZERO_CUDA and optimised, static and shared, and the project trains on the CPU with it. With
# --compare nothing is compiled: both builds are compared. Exit status 77: there is no cmake, no
# ninja, or with --cuda no nvcc here.
set -euo pipefail
flavour=cpu
compare=false
if [[ ${1:-} == --compare ]]; then compare=true; shift; fi
if [[ ${1:-} == --cuda ]]; then flavour=cuda; shift; fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$(realpath -m "${1:-$root/build/packages}")
nvcc=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v nvcc) || nvcc=
for tool in cmake ninja; do
  command -v "$tool" > /dev/null || { echo "cmake_test: skipped, no $tool here"; exit 77; }
done
if [[ $flavour == cuda && -z $nvcc ]]; then echo "cmake_test: skipped, no nvcc here"; exit 77; fi

if [[ -z ${TORCH_PATH:-}${LIBTORCH:-}${Torch_DIR:-} ]]; then
  "$root/third_party/fetch_libtorch.sh" "$flavour"
  export TORCH_PATH=$root/.deps/libtorch-$flavour/torch
fi
unset CMAKE_PREFIX_PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What grep -q reads here comes from <(): in a pipe its early end is the end of the writer, by SIGPIPE,
# and with pipefail a failure.
say() { echo "--- $*"; }
die() { echo "cmake_test: $*" >&2; exit 1; }
configure() { cmake -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG= "$@" > "$work/log" || { cat "$work/log"; return 1; }; }
compile() { cmake --build "$@" > "$work/log" || { cat "$work/log"; return 1; }; }
must_not_match() { ! grep -qE "$1" "$work/log" || { cat "$work/log"; die "$2"; }; }
# project <folder> [sed script]: the project of docs/building.md, with a change.
project() {
  mkdir -p "$1"
  cp "$root/tests/packages/consumer/trainer.cc" "$1"
  awk '/^```cmake$/ { inside = 1; next } /^```$/ { if (inside) exit } inside' "$root/docs/building.md" > "$1/CMakeLists.txt"
  grep -q 'find_package(zero 0.1 CONFIG REQUIRED)' "$1/CMakeLists.txt" || die "docs/building.md shows no project"
  sed -i "${2:-}" "$1/CMakeLists.txt"
}
run() { "$@" | tee "$work/output"; grep -q ': 2 ranks and one process agree$' "$work/output" || die "the program did not train"; }

# train_with <prefix> <folder>: the project with an installation.
train_with() {
  project "$2"
  configure -S "$2" -B "$2/build" -DCMAKE_PREFIX_PATH="$1"
  compile "$2/build"
  run "$2/build/trainer"
}

if [[ $flavour == cuda ]]; then
  for shared in OFF ON; do
    say "CUDA, BUILD_SHARED_LIBS=$shared"
    CUDACXX=$nvcc configure -S "$root" -B "$build/cuda" -DZERO_CUDA=ON -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=$shared -DCMAKE_INSTALL_LIBDIR=lib
    compile "$build/cuda" --target zero
    must_not_match "warning:" "the library compiles with warnings"
    cmake --install "$build/cuda" --prefix "$work/$shared" > /dev/null
    train_with "$work/$shared" "$work/$shared-project"
    if compgen -G "$(realpath "${TORCH_PATH:-.}")/../nvidia/*/lib/libcudart.so.*" > /dev/null; then
      grep -q 'libcudart.* => .*/nvidia/' <(ldd "$work/$shared-project/build/trainer") || die "the program does not load the CUDA runtime of the wheel"
    fi
  done
  exit
fi

compare_builds() {
  say "the same sources, flags and tests as Bazel"
  cp "$build/tree/compile_commands.json" "$build/tree/zero"
  cuda=()
  if [[ -n $nvcc ]]; then
    cuda=("$work/cuda")
    CUDACXX=$nvcc configure -S "$root" -B "$work/cuda" -DZERO_CUDA=ON -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
  fi
  "$root/tests/packages/compare_builds.py" "$build/tree/zero" "${cuda[@]}"
}

say "add_subdirectory"
mkdir -p "$build"
project "$build/project" "s|find_package(zero .*|add_subdirectory(\"$root\" zero)|"
common=(-S "$build/project" -B "$build/tree" -DZERO_INSTALL=ON -DZERO_TESTS=ON -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
configure "${common[@]}" -DBUILD_SHARED_LIBS=OFF
if $compare; then compare_builds; exit; fi

say "without the variables of the first shell"
libtorch() { sed -n 's/^-- zero .*: libtorch .* in //p' "$work/log"; }
# without_variables <libtorch> <arguments of cmake>: finds this libtorch, where Python has none.
mkdir -p "$work/no-torch"
ln -s "$(command -v false)" "$work/no-torch/python3"
without_variables() {
  env -u TORCH_PATH -u LIBTORCH -u Torch_DIR PATH="$work/no-torch:$PATH" cmake "${@:2}" > "$work/log" 2>&1 || true
  [[ $(libtorch) == "$1" ]] || { cat "$work/log"; die "expected the libtorch in $1, got that in $(libtorch)"; }
}
torch=$(libtorch)
without_variables "$torch" "$build/tree"
mkdir -p "$work/clone/.deps/libtorch-cpu"
cp -r "$root"/{CMakeLists.txt,bookkeeping,cmake,kernels,zero} "$work/clone"
ln -s "$torch" "$work/clone/.deps/libtorch-cpu/torch"
without_variables "$work/clone/.deps/libtorch-cpu/torch" -G Ninja -S "$work/clone" -B "$work/clone/build"
# With CUDA it takes the one that has it. Whether there is an nvcc is seen behind that.
mkdir "$work/clone/.deps/libtorch-cuda"
ln -s "$torch" "$work/clone/.deps/libtorch-cuda/torch"
without_variables "$work/clone/.deps/libtorch-cuda/torch" -S "$work/clone" -B "$work/clone/build" -DZERO_CUDA=ON

compile "$build/tree" --target trainer
must_not_match "warning:" "the library compiles with warnings"
run "$build/tree/trainer"

say "ctest"
small=(kernels/cpu_capability_test bookkeeping/plan_test training/failure_test)
compile "$build/tree" --target $(printf 'tests.%s ' "${small[@]//\//.}")
ctest --test-dir "$build/tree/zero" --output-on-failure -R "^($(IFS='|'; echo "${small[*]}"))\$" | tail -n 8

compare_builds

say "FetchContent"
project "$work/fetch" "s|find_package(zero .*|include(FetchContent)\nFetchContent_Declare(zero SOURCE_DIR \"$root\")\nFetchContent_MakeAvailable(zero)|"
configure -S "$work/fetch" -B "$work/fetch/build"
ninja -C "$work/fetch/build" -n trainer > /dev/null

public_headers() { (cd "$root" && ls zero/*.h && echo bookkeeping/{bucket_rows,layout,memory,plan}.h | tr ' ' '\n') | sort; }
for kind in static shared; do
  say "installed, $kind"
  prefix=$work/$kind
  configure "${common[@]}" -DBUILD_SHARED_LIBS=$([[ $kind == static ]] && echo OFF || echo ON) -DCMAKE_INSTALL_LIBDIR=lib
  compile "$build/tree" --target zero
  cmake --install "$build/tree" --prefix "$prefix" > /dev/null
  diff <(cd "$prefix/include/zero-0" && find . -name '*.h' -printf '%P\n' | sort) <(public_headers) || die "other headers are installed than the public ones"
  train_with "$prefix" "$work/$kind-project"
  if [[ $kind == shared ]]; then
    grep -q 'libzero\.so\.0\.' <(readelf -d "$work/shared-project/build/trainer") || die "the program does not load libzero.so"
  fi
done

if command -v pkg-config > /dev/null; then
  for kind in static shared; do
    say "pkg-config, $kind"
    export PKG_CONFIG_PATH=$work/$kind/lib/pkgconfig
    # shellcheck disable=SC2046
    "${CXX:-c++}" "$root/tests/packages/consumer/trainer.cc" -o "$work/trainer" $(pkg-config --cflags --libs zero)
    run "$work/trainer"
  done
fi

headers=$("${CXX:-c++}" -print-file-name=plugin)/include
if [[ -e $headers/plugin-version.h ]]; then
  say "a plugin that was made for another g++"
  mkdir "$work/another"
  sed 's/basever\[\] = "/&another /' "$headers/plugin-version.h" > "$work/another/plugin-version.h"
  "${CXX:-c++}" -shared -fPIC -fno-rtti -I"$work/another" -isystem "$headers" "$root/third_party/pch/instantiate.cc" -o "$work/instantiate.so"
  "${CXX:-c++}" -fplugin="$work/instantiate.so" -Wno-unknown-pragmas -fsyntax-only -x c++ - <<< "#pragma zero instantiate"
fi

say "another version"
refuses() {
  ! cmake "${@:2}" > "$work/log" 2>&1 || die "expected to be refused: $1"
  grep -qF "$1" <(tr -s '\n ' ' ' < "$work/log") || { cat "$work/log"; die "expected the message: $1"; }
  echo "$1"
}
project "$work/newer" "s|zero 0.1|zero 0.2|"
refuses 'compatible with requested version "0.2"' -S "$work/newer" -B "$work/newer/build" -DCMAKE_PREFIX_PATH="$work/static"

say "another libtorch"
mkdir -p "$work/old/include/torch/headeronly" "$work/old/lib"
touch "$work/old/lib/libtorch_cpu.so"
old_version() { printf '#define TORCH_VERSION_%s %s\n' MAJOR 2 MINOR "$1" PATCH 0 > "$work/old/include/torch/headeronly/version.h"; }
(cd "$work" && TORCH_PATH=old refuses "expected an absolute path of a libtorch, got 'old'" -S "$root" -B "$work/refused0")
old_version 8
TORCH_PATH=$work/old refuses "expected libtorch 2.9 or later, got 2.8.0" -S "$root" -B "$work/refused"
old_version 99
TORCH_PATH=$work/old refuses "and cannot be used with 2.99.0" -S "$work/static-project" -B "$work/refused2" -DCMAKE_PREFIX_PATH="$work/static"

if [[ -n $nvcc ]]; then
  say "another CUDA toolkit"
  major=$("$nvcc" --version | sed -nE 's/.*release ([0-9]+)\..*/\1/p')
  with_cuda() { echo "__version__ = '2.99.0+cu$1'" > "$work/old/version.py"; }
  export TORCH_PATH=$work/old CUDACXX=$nvcc
  with_cuda "${major}9"
  refuses "expected a CUDA toolkit $major.9 or a later $major," -S "$root" -B "$work/refused3" -DZERO_CUDA=ON
  mkdir -p "$work/nvidia/cudart/lib" "$work/old/include/torch/csrc/api/include"
  touch "$work/nvidia/cudart/lib/libcudart.so.$major"
  configure -S "$root" -B "$work/own-runtime" -DZERO_CUDA=ON
  with_cuda "$((major + 1))9"
  refuses "expected a CUDA toolkit $((major + 1))." -S "$root" -B "$work/refused4" -DZERO_CUDA=ON
fi
