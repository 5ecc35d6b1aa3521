#!/usr/bin/env bash
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Usage: third_party/fetch_libtorch.sh cpu|cuda
#
# Makes .deps/libtorch-<flavour>, a virtual environment that holds the pinned
# torch wheel, and leaves a link to the package at .deps/libtorch-<flavour>/torch.
# Does nothing when that is complete already. Both ./bazelw and the repository
# rule call it: ./bazelw so that pip can draw its progress bar on a terminal.
set -euo pipefail

flavour=${1:?usage: fetch_libtorch.sh cpu|cuda}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/third_party/versions.env"

case $flavour in
  cpu)
    install=(--no-deps $TORCH_WHEEL $TORCH_CPU_EXTRAS)
    size="1.3 GB on disk" ;;
  cuda)
    install=($TORCH_WHEEL)
    size="4.7 GB on disk" ;;
  *) echo "fetch_libtorch.sh: expected cpu or cuda, got $flavour" >&2; exit 2 ;;
esac

venv=$root/.deps/libtorch-$flavour
marker=$venv/complete
pins="${install[*]}"
is_complete() { [[ -e $venv/torch/lib/libtorch_cpu.so && $(cat "$marker" 2>/dev/null) == "$pins" ]]; }
is_complete && exit 0

if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
  echo "fetch_libtorch.sh: python3 with venv is missing; run ./bazelw, or: apt-get install python3-venv" >&2
  exit 1
fi

# One at a time: ./bazelw in two terminals must not build the same folder.
mkdir -p "$root/.deps"
exec 9> "$root/.deps/lock"
flock 9
is_complete && exit 0

echo "zero: fetching libtorch ($TORCH_WHEEL for $flavour, $size) into .deps; this happens once" >&2
# A virtual environment cannot be renamed, so an interrupted one is known by
# its missing marker and made again from nothing.
rm -rf "$venv"
python3 -m venv "$venv"
"$venv/bin/pip" install --no-input --disable-pip-version-check "${install[@]}" >&2 || {
  rm -rf "$venv"
  echo "zero: pip could not install $pins; set TORCH_PATH to a torch package folder or LIBTORCH to an unpacked libtorch to do without" >&2
  exit 1
}
# Relative, since .deps may be a link in a checkout that is removed.
(cd "$venv" && ln -s lib/python3*/site-packages/torch torch)
printf '%s' "$pins" > "$marker"
