# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The repository @zero_cc: the C++ rules under one name for every Bazel.

Up to version 8 they are in Bazel itself; rules_cc has them for MODULE.bazel, which Bazel 9 requires.
"""

_MODULE = """\
load("@rules_cc//cc:cc_binary.bzl", _binary = "cc_binary")
load("@rules_cc//cc:cc_library.bzl", _library = "cc_library")
load("@rules_cc//cc:cc_test.bzl", _test = "cc_test")
load("@rules_cc//cc/common:cc_common.bzl", _common = "cc_common")
load("@rules_cc//cc/common:cc_info.bzl", _info = "CcInfo")
"""

_WORKSPACE = """\
_binary = native.cc_binary
_library = native.cc_library
_test = native.cc_test
_common = cc_common
_info = CcInfo
"""

_RULES = """
zero_cc = struct(binary = _binary, common = _common, info = _info, library = _library, test = _test)
cc_library = _library
"""

def _cc_rules_impl(rctx):
    rctx.file("BUILD", "")
    rctx.file("cc.bzl", (_MODULE if rctx.attr.from_rules_cc else _WORKSPACE) + _RULES)

cc_rules_repository = repository_rule(
    implementation = _cc_rules_impl,
    attrs = {"from_rules_cc": attr.bool()},
)
