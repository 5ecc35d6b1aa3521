#!/usr/bin/env bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Usage: precompile.sh <compiler> <instantiate.cc> <arguments of the compiler...>
#
# Precompiles a header with the templates that its inline functions need. g++ does that with a plugin,
# if the package with the headers of plugins is installed; without it every file instantiates them.
set -euo pipefail
export PATH  # bash has a default where the environment has none
compiler=$1 source=$2
shift 2

if "$compiler" --version | grep -q clang; then
  exec "$compiler" "$@" -fpch-instantiate-templates -Wno-unknown-pragmas
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
headers=$("$compiler" -print-file-name=plugin)/include
if [[ -e $headers/gcc-plugin.h ]] &&
  "$compiler" -x c++ -shared -fPIC -fno-rtti -O1 -isystem "$headers" "$source" -o "$folder/instantiate.so"; then
  set -- "$@" "-fplugin=$folder/instantiate.so"
fi
"$compiler" "$@" -Wno-unknown-pragmas
