# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Targets of tests/<room>/: each is called after its source and depends on the room that it tests.

Small ones of a room and of the same tags are one target, <room>_test: most of their time is that in
which a program loads libtorch.

A target names what it needs besides: `support` are libraries of //tests/support, `deps` all others.
"""

load("//third_party:zero.bzl", "zero_cc_binary", "zero_cc_library", "zero_cc_test")

_RANKS = "//tests/support:run_ranks"

# What all targets of a room depend on.
_ROOMS = {
    "agreement": ["//zero/agreement", _RANKS],
    "base": ["//zero/base"],
    "bookkeeping": ["//bookkeeping:memory", "//bookkeeping:reshard"],
    "checkpoint": ["//zero/checkpoint", _RANKS],
    "comm": ["//zero/comm", _RANKS],
    "gradients": ["//zero/gradients", _RANKS],
    "inner_optimizers": ["//zero/inner_optimizers"],
    "kernels": ["//kernels"],
    "memory": ["//zero/memory"],
    "norm": ["//zero/norm", _RANKS],
    "recovery": ["//zero/recovery", _RANKS],
    "rendezvous": ["//zero/rendezvous"],
    "training": ["//zero/optimizer", "//tests/support:training"],
    "update": ["//zero/update", _RANKS],
}

# Rooms whose tests train, and are medium if not said otherwise.
_MEDIUM = ["training"]

def _room():
    return native.package_name().split("/")[-1]

def _deps(room, support, deps):
    found = ["//tests/support:" + name for name in support] + deps
    if room:
        if _room() in _ROOMS:
            found = found + _ROOMS[_room()] + ["//tests/support:error_of"]
        found = found + ["@libtorch//:torch"]
    return [dep for i, dep in enumerate(found) if dep not in found[:i]]

def room_test(
        name,
        size = None,
        sources = None,
        srcs = [],
        support = [],
        deps = [],
        tags = [],
        cpus = 1,
        asan = True,
        room = True,
        long = None,
        **kwargs):
    """GoogleTests in <name>.cc, which may have a main() of its own, or in `sources`.

    Args:
      name: of the test, and of its source.
      size: small, medium or large: see tests/README.md. Of rooms that train, medium if not given.
      sources: the names of the sources, where that of the test is none.
      srcs: sources and headers besides.
      support: libraries of //tests/support.
      deps: other libraries.
      tags: tsan, fault and others of CONTRIBUTING.md.
      cpus: how many cores are kept for it: 2 where it measures a promise about time, or computes on
        both all the time. Ranks mostly wait for each other and for timeouts.
      asan: whether AddressSanitizer runs it too.
      room: False for a test that starts programs and links nothing of the room.
      long: the environment of <name without _test>_long_test, the same test with more of everything.
      **kwargs: as for cc_test.
    """
    size = size or ("medium" if _room() in _MEDIUM else "small")
    kwargs["srcs"] = [source + ".cc" for source in sources or [name]] + srcs
    kwargs["deps"] = _deps(room, support + ["test_main"], deps)
    cpu_tags = ["cpu:%d" % cpus] if cpus > 1 else []
    zero_cc_test(name = name, size = size, tags = tags + cpu_tags + (["asan"] if asan else []), **kwargs)
    if long:
        test_again(
            name = name[:-len("_test")] + "_long_test",
            test = name,
            size = "enormous",
            env = long,
            shard_count = kwargs.get("shard_count"),
            tags = cpu_tags + ["long", "manual"],
        )

def test_again(name, test, **kwargs):
    """The program of another test of this package, with another environment, size or tags."""
    native.sh_test(name = name, srcs = [":" + test], **kwargs)

def room_program(name, support = [], deps = [], **kwargs):
    """A program in <name>.cc that tests start."""
    zero_cc_binary(name = name, srcs = [name + ".cc"], deps = _deps(True, support + ["end_at_once"], deps), **kwargs)

def room_library(name, srcs = None, hdrs = None, support = [], deps = [], **kwargs):
    """What tests of a room share, in <name>.h and <name>.cc unless other files are named."""
    zero_cc_library(
        name = name,
        srcs = native.glob([name + ".cc"]) if srcs == None else srcs,
        hdrs = [name + ".h"] if hdrs == None else hdrs,
        deps = _deps(True, support, deps) + ["@gtest//:gtest"],
        **kwargs
    )
