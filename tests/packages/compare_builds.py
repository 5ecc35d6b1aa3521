#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Usage: tests/packages/compare_builds.py <build folder of CMake> [<one that is configured with ZERO_CUDA>]

Compares how CMake and Bazel compile the library: the sources, and for each source the flags that
choose instructions, devices, rounding, threads and the standard. Also compares the tests that ctest knows with
those of Bazel, the version with CHANGELOG.md, and zero/zero.h with the public headers. Prints each
difference in one line; the exit status is then 1.
"""

import json
import os
import re
import shlex
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ROOMS = ("zero/", "kernels/", "bookkeeping/")
FLAGS = re.compile(r"-(m|fmad=|ffp-|fopenmp$|f(no-)?fast-math|f(no-)?math-errno|f(no-)?trapping-math|"
                   r"f(no-)?exceptions|f(no-)?rtti|DZERO_(?!TORCH_VERSION))")
# Both spellings of nvcc: of a device's code, and of several that come from one architecture.
GENERATED = re.compile(r"-(?:gencode|-generate-code)=arch=(\w+),code=\[?([\w,]+)\]?$")
# Tests that only Bazel runs, by what makes them so; docs/building.md and cmake/tests.cmake name them.
ONLY_BAZEL = re.compile(r"^//tests/(hosts|launchers|gpu_machine|fuzz|benchmarks|packages|tools|support/cuda_emulation)[/:]|"
                        r":(train_gpt_\w+|tools)_test$|:tsan_selftest_test$|:cuda_\w+_emulated_|:cuda_launch_test$")


def flags_of(arguments):
    """The flags that count. The last -std counts, and the last -O of the loops, which are optimised in
    every build."""
    found = {flag for flag in arguments if FLAGS.match(flag)}
    for generated in filter(None, map(GENERATED.match, arguments)):
        found |= {f"{code} of {generated[1]}" for code in generated[2].split(",")}
    found.add([flag for flag in arguments if flag.startswith("-std=")][-1])
    if any("range_kernels_" in argument for argument in arguments):
        found.add([flag for flag in arguments if re.match(r"-O\w*$", flag)][-1])
    return found


def cmake_commands(build, ending):
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
        entries = json.load(file)
    commands = {}
    for entry in entries:
        source = os.path.relpath(entry["file"], ROOT)
        if source.startswith(ROOMS) and source.endswith(ending):
            commands[source] = flags_of(shlex.split(entry["command"]))
    return commands


def bazel(*arguments):
    return subprocess.run(["./bazelw", *arguments], cwd=ROOT, check=True, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout


def bazel_commands(ending):
    query = {".cc": 'mnemonic("CppCompile", deps(//:zero))',
             ".cu": 'mnemonic("CudaCompile", deps(//kernels:cuda_kernels))'}[ending]
    actions = json.loads(bazel("aquery", "--output=jsonproto", query))
    commands = {}
    for action in actions["actions"]:
        arguments = action["arguments"]
        source = arguments[arguments.index("-c") + 1]
        if source.startswith(ROOMS) and source.endswith(ending):
            commands[source] = flags_of(arguments)
    return commands


def compare_commands(build, ending):
    ours, theirs = cmake_commands(build, ending), bazel_commands(ending)
    for source in sorted(set(ours) | set(theirs)):
        if source not in ours:
            yield f"{source}: compiled by Bazel only"
        elif source not in theirs:
            yield f"{source}: compiled by CMake only; no BUILD file below //:zero names it"
        elif ending == ".cc" and "-fno-fast-math" not in ours[source]:
            yield f"{source}: compiled without -fno-fast-math, so that a project's NaNs may be missed"
        elif ours[source] != theirs[source]:
            yield (f"{source}: only CMake has {sorted(ours[source] - theirs[source])}, "
                   f"only Bazel {sorted(theirs[source] - ours[source])}")


def compare_tests(build):
    output = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], check=True,
                            text=True, stdout=subprocess.PIPE).stdout
    ours = {test["name"] for test in json.loads(output)["tests"]}
    excluded = 'attr(tags, "[\\[ ](long|gpu|manual)[,\\]]", tests(//tests/...))'
    labels = [label for label in bazel("query", f"tests(//tests/...) except {excluded}").split()
              if not ONLY_BAZEL.search(label)]
    # With Bazel, small tests of a room are one.
    sources = bazel("query", f"labels(srcs, set({' '.join(labels)}))").split()
    theirs = {source[len("//tests/"):-len(".cc")].replace(":", "/") for source in sources
              if source.endswith("_test.cc")}
    for name in sorted(ours ^ theirs):
        yield f"test {name}: known to {'CMake' if name in ours else 'Bazel'} only"


def compare_version(build):
    with open(os.path.join(build, "zeroConfigVersion.cmake"), encoding="utf-8") as file:
        version = re.search(r'set\(PACKAGE_VERSION "(.*)"\)', file.read()).group(1)
    with open(os.path.join(ROOT, "CHANGELOG.md"), encoding="utf-8") as file:
        if f"## {version}" not in file.read():
            yield f"CHANGELOG.md has no heading for version {version} of zero/version.h"


def compare_umbrella():
    folder = os.path.join(ROOT, "zero")
    with open(os.path.join(folder, "zero.h"), encoding="utf-8") as file:
        included = set(re.findall(r'#include "zero/([a-z_]*\.h)"', file.read()))
    for name in sorted(set(os.listdir(folder)) - included - {"zero.h"}):
        if name.endswith(".h"):
            yield f"zero/zero.h does not include zero/{name}"


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    build = os.path.abspath(sys.argv[1])
    differences = [*compare_commands(build, ".cc"), *compare_tests(build), *compare_version(build),
                   *compare_umbrella()]
    if len(sys.argv) == 3:
        differences += compare_commands(os.path.abspath(sys.argv[2]), ".cu")
    for difference in differences:
        print(difference)
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
