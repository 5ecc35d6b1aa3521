# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Stands in for @rules_cc where Debian's Bazel 4.2.3 loads it."""

cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
cc_toolchain_alias = native.cc_toolchain_alias
cc_libc_top_alias = native.cc_libc_top_alias
fdo_profile = native.fdo_profile

def _no_op(name, **_kwargs):
    native.filegroup(name = name)

compiler_flag = _no_op
cc_flags_supplier = _no_op
