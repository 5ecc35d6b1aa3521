# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# An overlay port: vcpkg install zero --overlay-ports=packaging/vcpkg, with TORCH_PATH or LIBTORCH in
# the environment, because vcpkg's libtorch is older than 2.9.

# source: written by packaging/release.py
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
# end of source

vcpkg_check_features(OUT_FEATURE_OPTIONS features FEATURES cuda ZERO_CUDA)
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}" OPTIONS ${features} -DZERO_INSTALL=ON)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/zero)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
