# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA toolkit of this machine (@cuda), and cuda_library to use it.

A machine without a toolkit loads every package and builds everything that is
not CUDA; a CUDA target then fails with one line that says what is missing.
"""

_MISSING = "zero: no CUDA toolkit found; set CUDA_HOME, or put nvcc on PATH, or install the toolkit in /usr/local/cuda"

_FOUND_BUILD = """\
package(default_visibility = ["//visibility:public"])
exports_files(["nvcc.sh"])
cc_library(
    name = "cudart",
    hdrs = ["include"],
    includes = ["include"],
    linkopts = ["-L{home}/lib64", "-Wl,-rpath,{home}/lib64", "-lcudart"],
)
"""

_MISSING_BUILD = """\
package(default_visibility = ["//visibility:public"])
exports_files(["nvcc.sh"])
genrule(name = "missing", outs = ["cuda_runtime_api.h"], cmd = "echo '{message}' >&2; exit 1")
cc_library(name = "cudart", hdrs = [":missing"], includes = ["."])
"""

# nvcc names its intermediate files by process number, which is the same in
# every sandbox, while all share /tmp: one build can delete another's. They lie
# beside the object file, which is the last argument, instead.
_NVCC = """\
#!/bin/sh
for object; do :; done
TMPDIR=$(mktemp -d "$PWD/$object.XXXXXX") || exit 1
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
"%s/bin/nvcc" "$@"
"""

def _home(rctx):
    on_path = rctx.which("nvcc")
    candidates = [rctx.os.environ.get(name, "") for name in ["CUDA_HOME", "CUDA_PATH"]]
    if on_path:
        candidates.append(str(on_path.realpath.dirname.dirname))
    candidates.append("/usr/local/cuda")
    for home in candidates:
        if home and rctx.path(home + "/bin/nvcc").exists:
            return home
    return None

def _cuda_impl(rctx):
    home = _home(rctx)
    if home:
        rctx.symlink(home + "/include", "include")
        rctx.file("BUILD", _FOUND_BUILD.format(home = home))

        # A script and not a link: nvcc finds its toolkit from its own path.
        rctx.file("nvcc.sh", _NVCC % home, executable = True)
    else:
        rctx.file("BUILD", _MISSING_BUILD.format(message = _MISSING))
        rctx.file("nvcc.sh", "#!/bin/sh\necho '%s' >&2\nexit 1\n" % _MISSING, executable = True)

cuda_repository = repository_rule(
    implementation = _cuda_impl,
    environ = ["CUDA_HOME", "CUDA_PATH", "PATH"],
    local = True,
)

# Machine code for Ampere and Ada (8.x), Hopper (9.0) and Blackwell (10.x, 12.x), and
# PTX of the last for whatever follows it. Older devices have no code: cuda_launch.cuh
# has the sentence that says so.
_ARCHITECTURES = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_100,code=sm_100",
    "-gencode=arch=compute_120,code=sm_120",
    "-gencode=arch=compute_120,code=compute_120",
]

def _cuda_objects_impl(ctx):
    contexts = [dep[CcInfo].compilation_context for dep in ctx.attr.deps]
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
        "deps": attr.label_list(providers = [CcInfo]),
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
    native.cc_library(
        name = name,
        srcs = [name + "_objects"],
        hdrs = hdrs,
        linkstatic = True,
        tags = tags,
        visibility = visibility,
        deps = deps + ["@cuda//:cudart"],
    )
