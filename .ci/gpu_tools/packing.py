# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The folder that goes to a GPU machine: programs, the libraries they need, and sources.

  .gpu/pack.json          the commit, and the version of libtorch
  .gpu/bin, .gpu/lib      programs, and libraries that are neither libtorch's nor libc's
  .gpu/.ci, .gpu/zero ... tracked files: this command, the Python systems, and what a debugger shows
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

FACTS = "pack.json"
LIMIT_MB = 64
# Each a test tagged gpu, or a program that a step runs.
TARGETS = [
    "//examples/benchmark:benchmark",
    "//examples/train_gpt:train_gpt",
    "//tests/benchmarks:cuda_kernels_benchmark",
    "//tests/checkpoint:random_state_gpu_test",
    "//tests/kernels:cuda_kernels_test",
    "//tests/kernels:cuda_updates_test",
    "//tests/training:cuda_optimizer_test",
    "//tests/training:nccl_program",
]
SOURCES = [".ci", "bookkeeping", "examples", "kernels", "tests", "zero"]
# Every machine with a compiler has these, and the wheel of torch those of CUDA.
_EVERYWHERE = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+))\.so")
_WHEEL = re.compile(r"lib(torch|c10|cud|cup|cu[a-z]+|nv|nccl|gomp|shm)[^/]*\.so")


class Pack:
    """A folder that make() made."""

    def __init__(self, folder):
        self.folder = folder
        self.facts = json.loads((folder / FACTS).read_text())

    def program(self, name):
        return str(self.folder / "bin" / name)

    def source(self, path):
        return str(self.folder / path)

    def environment(self):
        """What programs need to find libtorch: the one of the Python that runs this."""
        folders = [str(self.folder / "lib"), *_wheel_folders()]
        given = os.environ.get("LD_LIBRARY_PATH")
        environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
        environment["LD_LIBRARY_PATH"] = ":".join([*folders, *([given] if given else [])])
        environment.setdefault("OMP_NUM_THREADS", "1")
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(name, "lo")  # a machine without a network has no other
        return environment


def _wheel_folders():
    code = "import os, torch; print(os.path.dirname(torch.__file__))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if found.returncode != 0:
        return []
    torch = Path(found.stdout.strip().splitlines()[-1])
    return [str(torch / "lib"), *map(str, sorted(torch.parent.glob("nvidia/*/lib")))]


def _run(root, *command):
    return subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout


def missing_gpu_tests(root):
    """Tests tagged gpu that TARGETS has not."""
    query = "attr(tags, '[\\[ ]gpu[,\\]]', tests(//...))"
    found = _run(root, "./bazelw", "query", "--keep_going", query).decode().split()
    return sorted(set(found) - set(TARGETS))


def _program_of(root, target):
    return root / ".bazel/bin" / target[2:].replace(":", "/")


def _needed(program):
    """Paths of shared libraries that the other machine may lack."""
    lines = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
    found = re.findall(r"^\s*(\S+) => (/\S+)", lines, re.MULTILINE)
    return {name: path for name, path in found
            if not _EVERYWHERE.match(name) and not _WHEEL.match(name)}


def _copy_programs(root, folder):
    """Stripped programs into bin, and the libraries of the system that they need into lib."""
    for name in ("bin", "lib"):
        (folder / name).mkdir(parents=True)
    for target in TARGETS:
        program = _program_of(root, target)
        if "libtorch_cuda" not in _run(root, "readelf", "-d", str(program)).decode() and \
                "libcudart" not in _run(root, "readelf", "-d", str(program)).decode():
            sys.exit(f"{program} is not linked with CUDA; build it with --config=cuda")
        copy = folder / "bin" / program.name
        _run(root, "strip", "-o", str(copy), str(program))
        copy.chmod(0o755)
        for name, path in _needed(program).items():
            shutil.copy(path, folder / "lib" / name)


def _torch_version(root):
    lines = (root / "third_party/versions.env").read_text()
    return re.search(r'TORCH_WHEEL="torch==([^"]+)"', lines).group(1)


def make(root, folder, build):
    """Builds TARGETS with CUDA, and fills `folder`, of which nothing else is kept."""
    if build:
        missing = missing_gpu_tests(root)
        if missing:
            sys.exit(f"add to TARGETS of {__file__}: {' '.join(missing)}")
        _run(root, "./bazelw", "build", "--config=cuda", *TARGETS)
    if folder.exists():
        if not (folder / FACTS).exists():
            sys.exit(f"{folder} is there and was not made by this command")
        shutil.rmtree(folder)
    _copy_programs(root, folder)
    archive = _run(root, "git", "archive", "HEAD", *SOURCES)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    commit = _run(root, "git", "describe", "--always", "--dirty").decode().strip()
    facts = {"commit": commit, "torch": _torch_version(root)}
    (folder / FACTS).write_text(json.dumps(facts) + "\n")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    print(f"{folder}: {size:.1f} MiB, {len(TARGETS)} programs of {commit}")
    if size > LIMIT_MB:
        sys.exit(f"expected at most {LIMIT_MB} MiB")
    return 0
