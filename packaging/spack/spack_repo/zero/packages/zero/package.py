# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
import os

from spack_repo.builtin.build_systems.cmake import CMakePackage, generator

from spack.package import *


class Zero(CMakePackage):
    """Sharded optimizer (ZeRO stages 1 and 2) for libtorch."""

    license("Apache-2.0")
    generator("ninja")

    # source: written by packaging/release.py
    git = "file://" + os.path.realpath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 6))
    version("0.1.0", branch="main")
    # end of source

    variant("shared", default=True, description="libzero.so instead of libzero.a")
    variant("cuda", default=False, description="CUDA kernels and NCCL")

    depends_on("cxx", type="build")
    depends_on("cmake@3.25:", type="build")
    depends_on("nlohmann-json@3.9:", type="build")
    depends_on("xxhash", type="build")
    # libtorch; its CMake files are found through CMAKE_PREFIX_PATH.
    depends_on("py-torch@2.9:+distributed+gloo", type=("build", "link", "run"))
    depends_on("py-torch+cuda+nccl", when="+cuda")
    depends_on("cuda", when="+cuda")

    conflicts("platform=darwin", msg="zero runs on Linux")

    def cmake_args(self):
        return [
            self.define_from_variant("BUILD_SHARED_LIBS", "shared"),
            self.define_from_variant("ZERO_CUDA", "cuda"),
        ]
