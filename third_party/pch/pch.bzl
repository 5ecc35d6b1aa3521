# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""precompiled_header: libtorch's headers, parsed once instead of in every file.

On a slow core g++ takes 10 to 30 s for the headers of a file; with a precompiled header a file takes 1 to
3 s, and 3 to 7 s where the templates of its inline functions are not in it (see instantiate.cc).
third_party/zero.bzl puts -include of a header on the command line of each file, and the compiler takes
the precompiled file beside it. A precompiled file of other macros is not taken: -Winvalid-pch says so.
"""

load("@zero_cc//:cc.bzl", "zero_cc")

_COMPILE = "c++-compile"

def _precompiled_header_impl(ctx):
    cc_common = zero_cc.common
    toolchain = ctx.attr._cc_toolchain[cc_common.CcToolchainInfo]
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    context = cc_common.merge_cc_infos(cc_infos = [dep[zero_cc.info] for dep in ctx.attr.deps]).compilation_context

    # The header lies beside what was made of it, and not in the source tree, where
    # the compiler would find it first.
    header = ctx.actions.declare_file(ctx.label.name + ".h")
    ctx.actions.symlink(output = header, target_file = ctx.file.header)

    # clang looks for one name, g++ for another.
    suffix = ".h.pch" if "clang" in toolchain.compiler else ".h.gch"
    compiled = ctx.actions.declare_file(ctx.label.name + suffix)

    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = toolchain,
        user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts,
        include_directories = context.includes,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        preprocessor_defines = context.defines,
        use_pic = True,
    )
    ctx.actions.run(
        executable = ctx.executable._precompile,
        arguments = [
            cc_common.get_tool_for_action(feature_configuration = features, action_name = _COMPILE),
            ctx.file._instantiate.path,
        ] + cc_common.get_memory_inefficient_command_line(
            feature_configuration = features,
            action_name = _COMPILE,
            variables = variables,
        ) + ["-x", "c++-header", "-c", header.path, "-o", compiled.path],
        env = cc_common.get_environment_variables(
            feature_configuration = features,
            action_name = _COMPILE,
            variables = variables,
        ),
        # Bazel knows a compiler of the system by its path alone, and one that was upgraded there
        # refuses the header of the one before.
        inputs = depset([header, ctx.file._instantiate, ctx.file._compiler], transitive = [context.headers, toolchain.all_files]),
        outputs = [compiled],
        mnemonic = "PrecompileHeader",
        progress_message = "Precompiling %s" % ctx.label.name,
    )
    return [
        DefaultInfo(files = depset([header, compiled])),
        zero_cc.info(compilation_context = cc_common.create_compilation_context(headers = depset([header, compiled]))),
    ]

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "header": attr.label(allow_single_file = True, mandatory = True),
        "deps": attr.label_list(providers = [zero_cc.info]),
        "copts": attr.string_list(),
        "_compiler": attr.label(default = "@libtorch//:compiler.txt", allow_single_file = True),
        "_instantiate": attr.label(default = ":instantiate.cc", allow_single_file = True),
        "_precompile": attr.label(default = ":precompile.sh", allow_single_file = True, executable = True, cfg = "exec"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
