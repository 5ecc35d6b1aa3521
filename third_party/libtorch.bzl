# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The repository @libtorch: headers and link flags of an installed libtorch.

It is found in this order:
  1. TORCH_PATH, the folder of a Python torch package;
  2. LIBTORCH, an unpacked libtorch;
  3. the pinned wheel in <workspace>/.deps, fetched if it is not there.

The libraries are named by -L and -rpath with absolute paths and are never
inputs of a rule: Bazel would load them through its own symbolic links, and
then the wheel's $ORIGIN/../../nvidia does not lead to the NVIDIA libraries.
"""

load(":cuda_repository.bzl", "cuda_home")

# The oldest that is tested; cmake/zero_libtorch.cmake has it too.
_MINIMUM = [2, 9]

# What every libtorch has.
_LANDMARK = "include/torch/csrc/api/include/torch/torch.h"

_HEADER = """\
// Where the libtorch of this build is. Written by third_party/libtorch.bzl.
#pragma once

namespace zero {{

inline constexpr char kLibtorchVersion[] = "{version}";
inline constexpr char kLibtorchIncludePath[] = "{root}/include";

}}  // namespace zero
"""

def _torch_root(rctx, cuda):
    for name in ["TORCH_PATH", "LIBTORCH"]:
        given = rctx.os.environ.get(name, "")
        if given:
            if not given.startswith("/"):
                fail("zero: expected an absolute path of a libtorch, got %s=%s" % (name, given))
            if not rctx.path(given + "/" + _LANDMARK).exists:
                fail("%s=%s has no %s; expected a torch package folder or an unpacked libtorch" % (name, given, _LANDMARK))
            return rctx.path(given).realpath

    # Naming the pins makes Bazel run this rule again when they change.
    workspace = rctx.path(Label("//third_party:versions.env")).dirname.dirname
    flavour = "cuda" if cuda else "cpu"
    result = rctx.execute(
        [rctx.path(Label("//third_party:fetch_libtorch.sh")), flavour],
        timeout = 7200,
        quiet = False,
    )
    if result.return_code != 0:
        fail("there is no libtorch in .deps and it could not be fetched; run ./bazelw, or set TORCH_PATH or LIBTORCH")
    return rctx.path("%s/.deps/libtorch-%s/torch" % (workspace, flavour)).realpath

def _version(rctx, root):
    # A Python package says it in version.py, an unpacked libtorch in
    # build-version.
    if rctx.path("%s/version.py" % root).exists:
        for line in rctx.read("%s/version.py" % root).split("\n"):
            if line.startswith("__version__ = "):
                return line.split("'")[1]
    if rctx.path("%s/build-version" % root).exists:
        return rctx.read("%s/build-version" % root).strip()
    return "unknown"

def _check_version(rctx, root):
    header = "%s/include/torch/headeronly/version.h" % root
    if not rctx.path(header).exists:
        header = "%s/include/torch/csrc/api/include/torch/version.h" % root
    numbers = {}
    for line in rctx.read(header).split("\n"):
        parts = line.split(" ")
        if len(parts) == 3 and parts[0] == "#define" and parts[2].isdigit():
            numbers[parts[1]] = int(parts[2])
    found = [numbers.get("TORCH_VERSION_" + part, 0) for part in ["MAJOR", "MINOR"]]
    if found < _MINIMUM:
        fail("zero: expected libtorch %d.%d or later, got %d.%d in %s; set TORCH_PATH or LIBTORCH to another" %
             (_MINIMUM[0], _MINIMUM[1], found[0], found[1], root))

def _cudart_folders(rctx, root):
    """The folders of the CUDA runtime beside a wheel: one, unless there are several major versions."""
    site = rctx.path("%s/nvidia" % root.dirname)
    folders = [rctx.path("%s/lib" % package) for package in site.readdir()] if site.exists else []
    return [
        str(folder)
        for folder in folders
        if folder.exists and [file for file in folder.readdir() if file.basename.startswith("libcudart.so.")]
    ]

def _check_toolkit(rctx, root, version, cudart_folders):
    """As zero_toolkit_problem() of cmake/zero_libtorch.cmake. What is not known is no problem."""
    home = cuda_home(rctx)
    header = "%s/include/cuda_runtime_api.h" % home
    numbers = version.split("+cu")[-1]
    if not home or not rctx.path(header).exists or "+cu" not in version or not numbers.isdigit():
        return
    major = int(numbers[:-1])
    oldest = [major, 0 if cudart_folders else int(numbers[-1])]
    for line in rctx.read(header).split("\n"):
        words = [word for word in line.split(" ") if word]
        if len(words) == 3 and words[:2] == ["#define", "CUDART_VERSION"] and words[2].isdigit():
            found = [int(words[2]) // 1000, int(words[2]) % 1000 // 10]
            if found[0] != major or found < oldest:
                fail("zero: expected a CUDA toolkit %d.%d or a later %d, as the libtorch in %s needs, got %d.%d in %s; set CUDA_HOME to another" %
                     (major, oldest[1], major, root, found[0], found[1], home))

def _compiler(rctx):
    """What the compiler says of itself; "" where Bazel's own configuration would not find it either."""
    return rctx.execute([rctx.os.environ.get("CC", "") or "gcc", "--version"]).stdout

def _libtorch_impl(rctx):
    cuda = rctx.os.environ.get("ZERO_CUDA", "") == "1"
    root = _torch_root(rctx, cuda)
    if " " in str(root):
        fail("zero: expected a libtorch in a folder whose path has no space, since Bazel and the linker cut options there, got '%s'; set TORCH_PATH or LIBTORCH to another" % root)
    _check_version(rctx, root)
    version = _version(rctx, root)
    rctx.symlink("%s/include" % root, "include")
    rctx.file("paths/zero_libtorch_paths.h", _HEADER.format(root = root, version = version))
    rctx.file("compiler.txt", _compiler(rctx))

    # The wheels of NVIDIA lie beside torch; an unpacked libtorch has none and
    # takes nccl.h from the CUDA toolkit.
    nccl = rctx.path("%s/nvidia/nccl/include" % root.dirname)
    if nccl.exists:
        rctx.symlink(nccl, "nccl_include")
    cudart_folders = _cudart_folders(rctx, root)
    if cuda:
        _check_toolkit(rctx, root, version, cudart_folders)
    rctx.template("BUILD", Label("//third_party:libtorch.BUILD"), substitutions = {
        "%{cudart_rpaths}": str(["-Wl,-rpath," + folder for folder in cudart_folders]),
        "%{lib}": "%s/lib" % root,
        "%{nccl_include}": '["nccl_include"]' if nccl.exists else "[]",
        "%{version}": version,
    })

libtorch_repository = repository_rule(
    implementation = _libtorch_impl,
    environ = ["TORCH_PATH", "LIBTORCH", "ZERO_CUDA", "CUDA_HOME", "CUDA_PATH", "CC"],
    local = True,
)
