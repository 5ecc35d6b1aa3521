# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""cuda_library: what is compiled by the nvcc of @cuda."""

load("@zero_cc//:cc.bzl", "zero_cc")

# Machine code for Ampere and Ada (8.x), Hopper (9.0) and Blackwell (10.x, 12.x). PTX of 10.0, which
# serves all other devices from there on: 11.0 and whatever follows 12.x. Older devices have no code:
# cuda_launch.cuh has the sentence that says so. cmake/library.cmake has the same list, and
# tests/packages/compare_builds.py compares them.
_ARCHITECTURES = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_100,code=sm_100",
    "-gencode=arch=compute_120,code=sm_120",
    "-gencode=arch=compute_100,code=compute_100",
]

def _cuda_objects_impl(ctx):
    contexts = [dep[zero_cc.info].compilation_context for dep in ctx.attr.deps]
    headers = depset(ctx.files.hdrs, transitive = [c.headers for c in contexts])

    # Line numbers are for compute-sanitizer and profilers; compressed, code is a tenth as large.
    flags = ["-std=c++20", "-O3", "-lineinfo", "--compress-mode=size", "-I."]
    flags += ["-Xcompiler=-fPIC,-Wall,-Wextra", "-Werror=all-warnings"]
    for context in contexts:
        flags += ["-D" + define for define in context.defines.to_list()]
        for include in context.includes.to_list() + context.quote_includes.to_list() + context.system_includes.to_list():
            flags += ["-isystem", include]
    objects = []
    for source in ctx.files.srcs:
        object = ctx.actions.declare_file("%s/%s.pic.o" % (ctx.label.name, source.basename))
        ctx.actions.run(
            executable = ctx.executable._nvcc,
            arguments = flags + _ARCHITECTURES + ctx.attr.copts + ["-c", source.path, "-o", object.path],
            inputs = depset([source], transitive = [headers]),
            outputs = [object],
            mnemonic = "CudaCompile",
            progress_message = "Compiling " + source.short_path,
            use_default_shell_env = True,
        )
        objects.append(object)
    return [DefaultInfo(files = depset(objects))]

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = {
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [zero_cc.info]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh"]),
        "srcs": attr.label_list(allow_files = [".cu"]),
        "_nvcc": attr.label(
            default = "@cuda//:nvcc.sh",
            allow_single_file = True,
            executable = True,
            cfg = "exec",
        ),
    },
)

def cuda_library(name, srcs, hdrs = [], deps = [], copts = [], visibility = None, tags = []):
    """A cc_library of .cu files. Needs the toolkit, and not libtorch.

    It is tagged manual, so that //... does not ask a machine without a toolkit
    to build it; other targets depend on it under select({"//:cuda": ...}).
    """
    tags = tags + ["manual"]
    _cuda_objects(
        name = name + "_objects",
        srcs = srcs,
        hdrs = hdrs,
        copts = copts,
        tags = tags,
        visibility = ["//visibility:private"],
        deps = deps,
    )
    zero_cc.library(
        name = name,
        srcs = [name + "_objects"],
        hdrs = hdrs,
        linkstatic = True,
        tags = tags,
        visibility = visibility,
        deps = deps + ["@cuda//:cudart"],
    )
