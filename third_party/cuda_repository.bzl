# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA toolkit of this machine: @cuda.

A machine without a toolkit loads every package and builds everything that is
not CUDA; a CUDA target then fails with one line that says what is missing.
"""

_MISSING = "zero: no CUDA toolkit found; set CUDA_HOME, or put nvcc on PATH, or install the toolkit in /usr/local/cuda"

_FOUND_BUILD = """\
load("@zero_cc//:cc.bzl", "cc_library")
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
load("@zero_cc//:cc.bzl", "cc_library")
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

def cuda_home(rctx):
    """The folder of the toolkit, or None."""
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
    home = cuda_home(rctx)
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
