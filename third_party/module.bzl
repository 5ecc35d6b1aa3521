# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The repositories of WORKSPACE, for MODULE.bazel."""

load("//third_party:repositories.bzl", "outside_repositories")

def _outside_impl(_mctx):
    outside_repositories(from_rules_cc = True)

outside = module_extension(implementation = _outside_impl)
