# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""A library that the system's package manager installs.

Its headers are in /usr/include, where the compiler looks anyway. No -isystem
names that folder: in front of the C++ headers it breaks #include_next.
"""

_BUILD = """\
load("@zero_cc//:cc.bzl", "cc_library")
package(default_visibility = ["//visibility:public"])
cc_library(name = "{name}", linkopts = {linkopts})
"""

_MAIN = """\
cc_library(name = "main", linkopts = {linkopts}, deps = [":{name}"])
"""

def _system_library_impl(rctx):
    if not rctx.path("/usr/include/" + rctx.attr.header).exists:
        fail("/usr/include/%s is missing; run ./bazelw, or: apt-get install %s" % (rctx.attr.header, rctx.attr.package))
    name = rctx.name.replace("+", "~").split("~")[-1]  # behind the module's, with MODULE.bazel
    text = _BUILD.format(name = name, linkopts = rctx.attr.linkopts)
    if rctx.attr.main_linkopts:
        text += _MAIN.format(name = name, linkopts = rctx.attr.main_linkopts)
    rctx.file("BUILD", text)

system_library = repository_rule(
    implementation = _system_library_impl,
    attrs = {
        "header": attr.string(mandatory = True),
        "linkopts": attr.string_list(),
        "main_linkopts": attr.string_list(),
        "package": attr.string(mandatory = True),
    },
    local = True,
)
