# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# The programs of examples/, in <build>/run/examples/. A file without main() is shared by the
# programs.

find_package(CLI11 REQUIRED)
file(GLOB_RECURSE files CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/examples/*.cc")
set(shared)
set(programs)
foreach(file IN LISTS files)
  file(STRINGS "${file}" has_main REGEX "^int main\\(" LIMIT_COUNT 1)
  if(has_main)
    list(APPEND programs "${file}")
  else()
    list(APPEND shared "${file}")
  endif()
endforeach()

# The same text as that of third_party/libtorch.bzl.
file(CONFIGURE OUTPUT examples/zero_libtorch_paths.h CONTENT [=[
#pragma once

namespace zero {

inline constexpr char kLibtorchVersion[] = "@ZERO_TORCH_VERSION@";
inline constexpr char kLibtorchIncludePath[] = "@ZERO_TORCH_ROOT@/include";

}  // namespace zero
]=] @ONLY)

add_library(zero_examples STATIC EXCLUDE_FROM_ALL ${shared})
zero_compile_options(zero_examples)
target_include_directories(zero_examples BEFORE PUBLIC
  "${PROJECT_SOURCE_DIR}" "${PROJECT_BINARY_DIR}/examples")
target_include_directories(zero_examples SYSTEM PRIVATE "${ZERO_XXHASH_INCLUDE_DIR}")
target_link_libraries(zero_examples PUBLIC zero CLI11::CLI11 nlohmann_json::nlohmann_json)
foreach(file IN LISTS programs)
  cmake_path(GET file STEM name)
  cmake_path(RELATIVE_PATH file BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE folder)
  cmake_path(GET folder PARENT_PATH folder)
  add_executable(example_${name} "${file}")
  zero_compile_options(example_${name})
  target_link_libraries(example_${name} PRIVATE zero_examples)
  set_target_properties(example_${name} PROPERTIES OUTPUT_NAME ${name}
    RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/run/${folder}")
endforeach()
