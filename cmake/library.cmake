# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# The target zero::zero. Every .cc of the three folders belongs to it: none of them holds a test.

file(GLOB_RECURSE zero_sources CONFIGURE_DEPENDS
  "${PROJECT_SOURCE_DIR}/zero/*.cc" "${PROJECT_SOURCE_DIR}/bookkeeping/*.cc")
file(GLOB_RECURSE zero_kernel_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/kernels/*.cc")
if(ZERO_CUDA)
  list(REMOVE_ITEM zero_kernel_sources "${PROJECT_SOURCE_DIR}/kernels/cuda/no_cuda.cc")
endif()

# Flags of every object, beside those of the build type. No -Werror: a newer compiler has new
# warnings. Objects fit both kinds of library, so changing BUILD_SHARED_LIBS only links again.
function(zero_compile_options target)
  target_link_libraries(${target} PRIVATE zero::torch)
  target_include_directories(${target} BEFORE PRIVATE "${PROJECT_SOURCE_DIR}")
  # Without optimisation g++ does not see that TORCH_CHECK(false) throws.
  # A NaN is noticed in a project that permits -ffast-math, too.
  target_compile_options(${target} PRIVATE -fno-fast-math -Wall -Wextra
    $<$<CONFIG:Debug>:-Wno-return-type>)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON)
  if(ZERO_CUDA)
    target_link_libraries(${target} PRIVATE zero::torch_cuda)
    target_compile_definitions(${target} PRIVATE ZERO_CUDA)
  endif()
endfunction()

# Sets <variable> to the option for the plugin of third_party/pch, or to nothing without precompiled
# headers, for other compilers than g++ and for one without the headers of plugins.
function(zero_instantiate_plugin variable)
  set(${variable} "" PARENT_SCOPE)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR CMAKE_DISABLE_PRECOMPILE_HEADERS)
    return()
  endif()
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=plugin
    OUTPUT_VARIABLE headers OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT EXISTS "${headers}/include/gcc-plugin.h")
    string(REGEX MATCH "^[0-9]+" major "${CMAKE_CXX_COMPILER_VERSION}")
    message(STATUS "zero: the headers of g++'s plugins save a third of a build; on Debian: apt-get install gcc-${major}-plugin-dev")
    return()
  endif()
  set(plugin "${PROJECT_BINARY_DIR}/instantiate.so")
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -shared -fPIC -fno-rtti -O1
    -isystem "${headers}/include" "${PROJECT_SOURCE_DIR}/third_party/pch/instantiate.cc" -o "${plugin}"
    RESULT_VARIABLE status ERROR_QUIET)
  if(status EQUAL 0)
    set(${variable} "-fplugin=${plugin}" PARENT_SCOPE)
  endif()
endfunction()

if(ZERO_CUDA)
  if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100 120-real)  # those of third_party/cuda.bzl
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  zero_toolkit_problem(problem "${ZERO_TORCH_ROOT}")
  if(problem)
    message(FATAL_ERROR "zero: ${problem}")
  endif()
  zero_add_libtorch_cuda("${ZERO_TORCH_ROOT}")
  file(GLOB_RECURSE zero_cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/kernels/*.cu")
  add_library(zero_cuda_objects OBJECT ${zero_cuda_sources})
  target_include_directories(zero_cuda_objects PRIVATE "${PROJECT_SOURCE_DIR}")
  # The standard as a flag: CMake 3.25 does not know how nvcc is asked for C++20.
  target_compile_options(zero_cuda_objects PRIVATE -std=c++20 -O3 -fmad=false -lineinfo
    --compress-mode=size -Xcompiler=-Wall,-Wextra)
  set_target_properties(zero_cuda_objects PROPERTIES POSITION_INDEPENDENT_CODE ON)
endif()

add_library(zero_objects OBJECT)
# No loop of a step is in these: see third_party/zero.bzl. In build types whose precompiled header has
# another macro for its optimisation, it would fit none of them.
add_library(zero_cold_objects OBJECT)
foreach(source IN LISTS zero_sources)
  cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE path)
  if(path MATCHES "^zero/(agreement|base|checkpoint|comm|inner_optimizers|optimizer|recovery|rendezvous)/")
    target_sources(zero_cold_objects PRIVATE "${source}")
    # These have names of their own that others of them have, too.
    if(path MATCHES "^zero/(inner_optimizers|recovery|rendezvous)/|/(file_exchange|group_health|interop|manifest_fields|safetensors|shared_peers|whole_exchange).cc$")
      set_source_files_properties("${source}" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  else()
    target_sources(zero_objects PRIVATE "${source}")
  endif()
endforeach()

zero_instantiate_plugin(plugin)
foreach(objects IN ITEMS zero_objects zero_cold_objects)
  zero_compile_options(${objects})
  target_include_directories(${objects} SYSTEM PRIVATE "${ZERO_XXHASH_INCLUDE_DIR}")
  target_link_libraries(${objects} PRIVATE nlohmann_json::nlohmann_json)
  target_compile_options(${objects} PRIVATE -Wno-unknown-pragmas ${plugin})
  # Several sources in one unit read the precompiled header once. Whoever works on the library has
  # single files: tests, or tools that read compile_commands.json, as in each preset.
  if(NOT DEFINED CMAKE_UNITY_BUILD AND NOT ZERO_TESTS AND NOT CMAKE_EXPORT_COMPILE_COMMANDS)
    set_target_properties(${objects} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
    # For the compiler a source in a unit is a header, whose classes may not have members of types
    # that other files cannot name.
    target_compile_options(${objects} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  endif()
endforeach()
# Most of the time to compile a file is libtorch's headers, and the templates of their inline
# functions: see third_party/pch. CMake passes clang's own option by itself.
target_precompile_headers(zero_objects PRIVATE "${PROJECT_SOURCE_DIR}/third_party/pch/torch.pch")
target_precompile_headers(zero_cold_objects REUSE_FROM zero_objects)
target_compile_options(zero_cold_objects PRIVATE "$<$<CONFIG:Release,RelWithDebInfo>:-O1>")
set_source_files_properties("${PROJECT_SOURCE_DIR}/zero/comm/backends/gloo.cc" PROPERTIES
  COMPILE_DEFINITIONS USE_C10D_GLOO
  INCLUDE_DIRECTORIES "${PROJECT_SOURCE_DIR}/third_party/gloo_stubs")

# The kernels, with the flags of kernels/BUILD. The loops are optimised in every build type.
add_library(zero_kernel_objects OBJECT ${zero_kernel_sources})
zero_compile_options(zero_kernel_objects)
set(loops -O3 -fno-fast-math -ffp-contract=off -fno-math-errno -fno-trapping-math)
set(avx2)
set(avx512)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 -mavx2 -mfma -mf16c)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
endif()
foreach(source IN LISTS zero_kernel_sources)
  cmake_path(GET source STEM name)
  set(flags -ffp-contract=off ${OpenMP_CXX_FLAGS})
  if(name STREQUAL "no_cuda")  # it only refuses
    set(flags)
  elseif(name MATCHES "^range_kernels_(.*)$")
    set(flags ${loops} ${${CMAKE_MATCH_1}})
  elseif(name STREQUAL "row_changes")
    set(flags -O3)
  endif()
  set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${flags}")
endforeach()

add_library(zero $<TARGET_OBJECTS:zero_objects> $<TARGET_OBJECTS:zero_cold_objects>
  $<TARGET_OBJECTS:zero_kernel_objects>)
add_library(zero::zero ALIAS zero)
target_compile_features(zero PUBLIC cxx_std_20)
# The flag and not OpenMP::OpenMP_CXX, which names the compiler's libgomp by its path: a wheel of
# torch has a libgomp of the same name, which the program is to load.
target_link_libraries(zero PUBLIC zero::torch PRIVATE ${OpenMP_CXX_FLAGS})
if(ZERO_CUDA)
  target_sources(zero PRIVATE $<TARGET_OBJECTS:zero_cuda_objects>)
  target_link_libraries(zero PRIVATE zero::torch_cuda)
endif()
# libtorch and the CUDA runtime beside it are named although the link path has them: CMake leaves out
# folders within the sources, where bazelw puts them.
set(run_path "${ZERO_TORCH_ROOT}/lib")
if(ZERO_CUDA)
  zero_find_cudart(cudart "${ZERO_TORCH_ROOT}")
  if(cudart)
    cmake_path(GET cudart PARENT_PATH folder_of_cudart)
    list(APPEND run_path "${folder_of_cudart}")
  endif()
endif()
# Before version 1 every minor version may change interfaces.
set_target_properties(zero PROPERTIES LINKER_LANGUAGE CXX
  INSTALL_RPATH "${run_path}" INSTALL_RPATH_USE_LINK_PATH ON
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

# The public headers, in a folder of links: a project with add_subdirectory sees what is installed,
# and its own kernels/ or tests/ are not hidden by those of this repository.
file(GLOB zero_public_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/zero/*.h")
list(APPEND zero_public_headers
  bookkeeping/bucket_rows.h bookkeeping/layout.h bookkeeping/memory.h bookkeeping/plan.h)
file(REMOVE_RECURSE "${PROJECT_BINARY_DIR}/include")
foreach(header IN LISTS zero_public_headers)
  cmake_path(GET header PARENT_PATH folder)
  file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/include/${folder}")
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/${header}" "${PROJECT_BINARY_DIR}/include/${header}" SYMBOLIC)
endforeach()
set(ZERO_INCLUDE_NAME zero-${PROJECT_VERSION_MAJOR})
target_include_directories(zero PUBLIC
  "$<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>"
  "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/${ZERO_INCLUDE_NAME}>")
