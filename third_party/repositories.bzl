# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Everything from outside this repository."""

load("//third_party:cc_rules.bzl", "cc_rules_repository")
load("//third_party:cuda_repository.bzl", "cuda_repository")
load("//third_party:libtorch.bzl", "libtorch_repository")
load("//third_party:system_library.bzl", "system_library")

def _shim_impl(rctx):
    folder = rctx.path(Label("//third_party:versions.env")).dirname.get_child(rctx.name)
    for child in folder.readdir():
        rctx.symlink(child, child.basename)

# A folder of this third_party/, from whichever project loads it.
_shim = repository_rule(implementation = _shim_impl, local = True)

def _debian_bazel():
    """What Debian's Bazel 4.2.3 would download, from files that are here.

    Debian's own rules_cc package is too old for its Bazel, hence the shim.
    Later versions bring what they need and are left alone.
    """
    if native.bazel_version and int(native.bazel_version.split(".")[0]) > 4:
        return
    for name, path in {
        "platforms": "/usr/share/bazel/platforms",
        "rules_java": "/usr/share/bazel/rules/java",
        "rules_proto": "/usr/share/bazel/rules/proto",
    }.items():
        native.local_repository(name = name, path = path)
    _shim(name = "remote_coverage_tools")
    _shim(name = "rules_cc")

def zero_repositories():
    """For a WORKSPACE."""
    _debian_bazel()
    outside_repositories()

def outside_repositories(from_rules_cc = False):
    """What is outside of Bazel, too: for a WORKSPACE, and for module.bzl with the rules of rules_cc."""
    cc_rules_repository(name = "zero_cc", from_rules_cc = from_rules_cc)
    libtorch_repository(name = "libtorch")
    cuda_repository(name = "cuda")
    system_library(
        name = "gtest",
        header = "gtest/gtest.h",
        linkopts = ["-lgtest", "-lpthread"],
        main_linkopts = ["-lgtest_main"],
        package = "libgtest-dev",
    )
    system_library(
        name = "benchmark",
        header = "benchmark/benchmark.h",
        linkopts = ["-lbenchmark", "-lpthread"],
        main_linkopts = ["-lbenchmark_main"],
        package = "libbenchmark-dev",
    )
    system_library(
        name = "cli11",
        header = "CLI/CLI.hpp",
        package = "libcli11-dev",
    )
    system_library(
        name = "nlohmann_json",
        header = "nlohmann/json.hpp",
        package = "nlohmann-json3-dev",
    )
    system_library(
        name = "xxhash",
        header = "xxhash.h",
        package = "libxxhash-dev",
    )
