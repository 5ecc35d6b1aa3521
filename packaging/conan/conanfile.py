# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Conan 2: conan create packaging/conan, with TORCH_PATH or LIBTORCH in the environment, because
ConanCenter's libtorch is older than 2.9."""

import os

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy


class Zero(ConanFile):
    name = "zero"
    version = "0.1.0"
    description = "Sharded optimizer (ZeRO stages 1 and 2) for libtorch"
    license = "Apache-2.0"
    topics = ("deep-learning", "distributed-training", "zero", "libtorch")
    package_type = "library"
    settings = "os", "compiler", "build_type", "arch"
    options = {"shared": [True, False], "fPIC": [True, False], "cuda": [True, False]}
    default_options = {"shared": False, "fPIC": True, "cuda": False}
    implements = ["auto_shared_fpic"]

    # source: written by packaging/release.py
    def export_sources(self):
        checkout = os.path.join(self.recipe_folder, "..", "..")
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "zero/*", "kernels/*",
                        "bookkeeping/*", "third_party/gloo_stubs/*", "third_party/pch/*"):
            copy(self, pattern, src=checkout, dst=self.export_sources_folder)
    # end of source

    def validate(self):
        check_min_cppstd(self, 20)
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration(f"zero: expected Linux, got {self.settings.os}")

    def layout(self):
        cmake_layout(self)

    def requirements(self):
        self.requires("nlohmann_json/[>=3.9 <4]", visible=False)
        self.requires("xxhash/[>=0.8 <1]", visible=False)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["ZERO_CUDA"] = bool(self.options.cuda)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", src=self.source_folder, dst=os.path.join(self.package_folder, "licenses"))
        CMake(self).install()

    def package_info(self):
        # Consumers take zeroConfig.cmake, which brings libtorch.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/zero"]
        self.cpp_info.includedirs = ["include/zero-0"]
        self.cpp_info.libs = ["zero"]
