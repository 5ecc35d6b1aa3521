# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""How our own code is compiled: cc rules with warnings, which are errors in this repository only.

The rules are those of @zero_cc, which every Bazel from 4 to 9 has: see cc_rules.bzl.
"""

load("@zero_cc//:cc.bzl", "zero_cc")

_WARNINGS = [
    "-Wall",
    "-Wextra",
]

_ERRORS = [
    "-Werror",

    # These three look through inlined functions and so report what they think
    # they see inside libtorch's headers. They stay visible and do not stop us.
    "-Wno-error=maybe-uninitialized",
    "-Wno-error=array-bounds",
    "-Wno-error=stringop-overflow",
]

# A project that uses this one may have a compiler with other warnings, or
# compile without optimisation, where g++ does not see that TORCH_CHECK throws.
def _warnings():
    repository = native.repo_name() if hasattr(native, "repo_name") else native.repository_name()
    if repository.strip("@"):
        return _WARNINGS + ["-Wno-return-type"]
    return _WARNINGS + select({
        "//:no_werror": [],
        "//conditions:default": _ERRORS,
    })

# at::parallel_for is a template: without -fopenmp in the file that calls it, it
# runs on one thread and says nothing.
_OPENMP = ["-fopenmp"]

# Two fifths of the time to compile a test and what it starts would go into optimising code that runs
# once. _OPTIMIZED_TESTS spend their time in loops of their own. Without optimisation g++ does not see
# that TORCH_CHECK throws.
_UNOPTIMIZED = ["-O0", "-U_FORTIFY_SOURCE", "-Wno-return-type"]
_OPTIMIZED_TESTS = [
    "tests/benchmarks",
    "tests/bookkeeping",
    "tests/fuzz",
    "tests/kernels",
    "tests/support/cuda_emulation",
]

def _is_unoptimized():
    package = native.package_name() + "/"
    return package.startswith("tests/") and not [room for room in _OPTIMIZED_TESTS if package.startswith(room + "/")]

# No loop of a step is in them, and a fifth of the time to compile them is what -O2 does beyond -O1.
# CMake has those of zero/ too.
_NOT_HOT = [
    "examples",
    "zero/agreement",
    "zero/base",
    "zero/checkpoint",
    "zero/comm",
    "zero/inner_optimizers",
    "zero/optimizer",
    "zero/recovery",
    "zero/rendezvous",
]

def _optimization():
    package = native.package_name() + "/"
    if not [room for room in _NOT_HOT if package.startswith(room + "/")]:
        return []
    return select({
        str(Label("//third_party:optimized")): ["-O1"],
        "//conditions:default": [],
    })

def _precompiled(deps, unoptimized):
    """The precompiled header for a target with these deps, or None: see //third_party/pch."""

    # As fast without one, and what waits for none is compiled beside it.
    if native.package_name() == "bookkeeping":
        return None
    if type(deps) != "list" or "@libtorch//:torch" not in deps:
        return None
    return "torch_unoptimized" if unoptimized else "torch"

def _options(kwargs, openmp, optimized = False, cuda_deps = []):
    unoptimized = _is_unoptimized() and not optimized

    # A NaN is noticed in a project that permits -ffast-math, too.
    copts = ["-fno-fast-math"] + _warnings() + (_OPENMP if openmp else []) + (
        _UNOPTIMIZED if unoptimized else _optimization()
    )

    # -fopenmp defines a macro that libtorch's headers ask for.
    header = _precompiled(kwargs.get("deps", []), unoptimized) if not openmp else None

    # In a sanitizer's build, whose header is precompiled with -O1, g++ 12 crashes with -O3.
    if "copts" in kwargs and type(kwargs["copts"]) == "list" and "-O3" in kwargs["copts"]:
        header = None
    if header:
        copts = copts + select({
            str(Label("//third_party/pch:off")): [],
            "//conditions:default": ["-Winvalid-pch", "-include", "third_party/pch/%s.h" % header],
        })
        kwargs["deps"] = kwargs["deps"] + select({
            str(Label("//third_party/pch:off")): [],
            "//conditions:default": [str(Label("//third_party/pch:" + header))],
        })
    if cuda_deps:
        kwargs["deps"] = kwargs["deps"] + select({
            str(Label("//:cuda")): cuda_deps,
            "//conditions:default": [],
        })
    kwargs["copts"] = copts + kwargs.get("copts", [])
    kwargs["linkopts"] = (_OPENMP if openmp else []) + kwargs.get("linkopts", [])

    # Static everywhere: each file is compiled once, and a program has one
    # run path, the one to libtorch.
    kwargs["linkstatic"] = True
    return kwargs

def zero_cc_library(openmp = False, optimized = False, cuda_deps = [], **kwargs):
    """`cuda_deps` come with --config=cuda. Behind a select() in `deps` nothing would be precompiled.

    `optimized` is for a library of tests whose instructions are counted.
    """
    zero_cc.library(**_options(kwargs, openmp, optimized, cuda_deps = cuda_deps))

def zero_cc_binary(openmp = False, **kwargs):
    zero_cc.binary(**_options(kwargs, openmp))

def zero_cc_test(openmp = False, data = [], deps = [], **kwargs):
    """A gtest. A main() of its own takes precedence over gtest's."""
    zero_cc.test(
        # --config=tsan looks for it in the test's run folder.
        data = data + ["//third_party:tsan.supp"],
        **_options(dict(kwargs, deps = deps + ["@gtest//:main"]), openmp)
    )
