# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Every GoogleTest of tests/ as <folder>/<name>, with the programs that tests start. Tests run in
# <build>/run, which has the files that Bazel would put there. They end as a program does, with what
# libtorch does at its end, which Bazel's skip (support/end_at_once.h). These stay with Bazel: CUDA kernels
# that run on the CPU, tests/hosts, tests/launchers and tests/gpu_machine (Python), tests/examples/*.{sh,py}, tests/fuzz
# (libFuzzer), tests/benchmarks, and tests tagged long.

if(NOT TARGET GTest::gtest_main)
  find_package(GTest REQUIRED)
endif()
find_package(Threads REQUIRED)

# ---- Files: tests, programs with a main(), what both share, and an emulated device ----
file(GLOB_RECURSE files CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/tests/*.cc")
list(FILTER files EXCLUDE
  REGEX "^tests/(benchmarks|fuzz|packages|support/cuda_emulation)/|tsan_selftest|support/test_main|write_golden|cuda_launch_test")
set(device ${files})
list(FILTER device INCLUDE REGEX "^tests/support/device/")
list(FILTER device EXCLUDE REGEX "_test\\.cc$")
list(REMOVE_ITEM files ${device})
list(TRANSFORM device PREPEND "${PROJECT_SOURCE_DIR}/")
if(NOT ZERO_CUDA)
  list(FILTER files EXCLUDE REGEX "/cuda_[a-z_]*_test")
endif()
set(support)
set(programs)
set(tests)
foreach(file IN LISTS files)
  file(STRINGS "${PROJECT_SOURCE_DIR}/${file}" has_main REGEX "^int main\\(" LIMIT_COUNT 1)
  if(file MATCHES "_test\\.cc$")
    list(APPEND tests "${file}")
  elseif(has_main)
    list(APPEND programs "${file}")
  else()
    list(APPEND support "${PROJECT_SOURCE_DIR}/${file}")
  endif()
endforeach()

add_library(zero_test_support STATIC EXCLUDE_FROM_ALL ${support})
zero_compile_options(zero_test_support)
target_include_directories(zero_test_support BEFORE PUBLIC "${PROJECT_SOURCE_DIR}")
target_link_libraries(zero_test_support
  PUBLIC zero nlohmann_json::nlohmann_json GTest::gtest Threads::Threads)
# One precompiled header for all, which needs the same flags for all: neither -fPIC nor -fPIE.
set_target_properties(zero_test_support PROPERTIES POSITION_INDEPENDENT_CODE OFF)
target_precompile_headers(zero_test_support PRIVATE
  <gtest/gtest.h> <ATen/Functions.h> <torch/csrc/distributed/c10d/HashStore.hpp>
  <torch/nn/modules/linear.h> <torch/optim/adamw.h> <torch/optim/sgd.h>)

# Objects, because they register operations and replace functions of the library.
add_library(zero_test_device OBJECT EXCLUDE_FROM_ALL ${device})
zero_compile_options(zero_test_device)
target_link_libraries(zero_test_device PUBLIC zero_test_support)

# ---- Data, where a test looks for it: the path in the repository ----
set(run "${PROJECT_BINARY_DIR}/run")
file(GLOB data RELATIVE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/docs/*.md"
  "${PROJECT_SOURCE_DIR}/tests/*/*.py" "${PROJECT_SOURCE_DIR}/tests/*/*.sh")
list(APPEND data README.md tests/checkpoint/golden_checkpoint tests/training/readme_program.cc
  tests/training/from_libtorch_program.cc)
foreach(path IN LISTS data)
  cmake_path(GET path PARENT_PATH folder)
  file(MAKE_DIRECTORY "${run}/${folder}")
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/${path}" "${run}/${path}" SYMBOLIC)
endforeach()

# ---- Targets: tests.<folder>.<name> and <name> ----
function(zero_test_executable target file)
  cmake_path(GET file STEM name)
  cmake_path(GET file PARENT_PATH folder)
  add_executable(${target} "${PROJECT_SOURCE_DIR}/${file}")
  zero_compile_options(${target})
  target_link_libraries(${target} PRIVATE zero_test_support)
  target_precompile_headers(${target} REUSE_FROM zero_test_support)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF
    OUTPUT_NAME ${name} RUNTIME_OUTPUT_DIRECTORY "${run}/${folder}")
endfunction()

foreach(file IN LISTS programs)
  cmake_path(GET file STEM name)
  zero_test_executable(${name} "${file}")
endforeach()
foreach(file IN LISTS tests)
  cmake_path(GET file STEM name)
  string(REGEX REPLACE "^tests/(.*)/[^/]*$" "\\1" room "${file}")
  string(REPLACE "/" "." target "tests.${room}.${name}")
  zero_test_executable(${target} "${file}")
  target_link_libraries(${target} PRIVATE GTest::gtest_main)
  if(room STREQUAL "examples")
    target_link_libraries(${target} PRIVATE zero_examples)
  endif()
  file(STRINGS "${PROJECT_SOURCE_DIR}/${file}" uses_device REGEX "^#include \"tests/support/device/")
  if(uses_device)
    target_link_libraries(${target} PRIVATE zero_test_device)
  endif()
  # The programs that this test names, but in an #include.
  file(STRINGS "${PROJECT_SOURCE_DIR}/${file}" named REGEX "^[^#].*tests/${room}/[a-z_]*_program")
  if(named)
    string(REGEX MATCHALL "tests/${room}/[a-z_]*_program" named "${named}")
    list(TRANSFORM named REPLACE "^.*/" "")
    list(REMOVE_DUPLICATES named)
    add_dependencies(${target} ${named})
  endif()
  # Tests with a folder of their own for files may run at the same time.
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/tmp/${target}")
  add_test(NAME ${room}/${name} COMMAND ${target} WORKING_DIRECTORY "${run}")
  set_tests_properties(${room}/${name} PROPERTIES PROCESSORS 2 TIMEOUT 900
    ENVIRONMENT "OMP_NUM_THREADS=1;TEST_TMPDIR=${PROJECT_BINARY_DIR}/tmp/${target}")
endforeach()
