# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# Finds a libtorch and makes the target zero::torch of it. Used by the build of zero and, installed
# beside zeroConfig.cmake, by projects that use zero.
#
# find_package(Torch) is not used: with a CUDA wheel it fails without a CUDA toolkit, enables the
# language CUDA, and links libtorch_cuda into programs of the CPU. zero::torch can be used beside
# it: the libtorch of a find_package(Torch) before is the one that is taken.

set(ZERO_TORCH_MINIMUM 2.9)

# zero_find_libtorch(<variable> <fallback>): the folder that has include/ and lib/, or "". The first
# of
#   1. the target torch_cpu, if a find_package(Torch) made it;
#   2. Torch_DIR, of CMake or of the environment: the folder of TorchConfig.cmake;
#   3. the environment's TORCH_PATH, a Python package, or LIBTORCH, an unpacked libtorch;
#   4. CMAKE_PREFIX_PATH, with torch.utils.cmake_prefix_path or a libtorch in it;
#   5. <fallback>, if it is there;
#   6. the torch of the active Python, `python3`.
function(zero_find_libtorch variable fallback)
  set(roots)
  if(TARGET torch_cpu)
    get_target_property(library torch_cpu LOCATION)
    cmake_path(GET library PARENT_PATH folder)
    cmake_path(GET folder PARENT_PATH root)
    list(APPEND roots "${root}")
  endif()
  foreach(folder IN ITEMS "${Torch_DIR}" "$ENV{Torch_DIR}")
    if(folder)
      cmake_path(SET root NORMALIZE "${folder}/../../..")
      list(APPEND roots "${root}")
    endif()
  endforeach()
  list(APPEND roots "$ENV{TORCH_PATH}" "$ENV{LIBTORCH}")
  set(prefixes "$ENV{CMAKE_PREFIX_PATH}")
  string(REPLACE ":" ";" prefixes "${prefixes}")
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH prefixes)
    if(EXISTS "${prefix}/Torch/TorchConfig.cmake")
      cmake_path(SET root NORMALIZE "${prefix}/../..")
      list(APPEND roots "${root}")
    elseif(EXISTS "${prefix}/share/cmake/Torch/TorchConfig.cmake")
      list(APPEND roots "${prefix}")
    endif()
  endforeach()
  if(EXISTS "${fallback}/lib/libtorch_cpu.so")
    list(APPEND roots "${fallback}")
  endif()
  list(REMOVE_ITEM roots "")
  if(NOT roots)
    # Finds the package without importing it, which takes seconds.
    execute_process(
      COMMAND python3 -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE roots OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(root "")
  if(roots)
    list(GET roots 0 root)
    cmake_path(SET root NORMALIZE "${root}")
    string(REGEX REPLACE "/$" "" root "${root}")
  endif()
  set(${variable} "${root}" PARENT_SCOPE)
endfunction()

# zero_libtorch_problem(<variable> <version> <root>): sets <version> to that of the libtorch in
# <root>, such as 2.11.0, and <variable> to a sentence if zero cannot use it, else to "".
function(zero_libtorch_problem variable version root)
  set(${version} "" PARENT_SCOPE)
  set(how "set Torch_DIR, CMAKE_PREFIX_PATH or TORCH_PATH to one, or activate a Python that has torch")
  if(NOT root)
    set(${variable} "no libtorch was found; ${how}" PARENT_SCOPE)
    return()
  endif()
  # The compiler, the linker and the next configuration have different working folders.
  if(NOT IS_ABSOLUTE "${root}")
    set(${variable} "expected an absolute path of a libtorch, got '${root}'; ${how}" PARENT_SCOPE)
    return()
  endif()
  set(header "${root}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${header}")
    set(header "${root}/include/torch/csrc/api/include/torch/version.h")
  endif()
  if(NOT EXISTS "${header}" OR NOT EXISTS "${root}/lib/libtorch_cpu.so")
    set(${variable} "expected a libtorch with headers in '${root}'; ${how}" PARENT_SCOPE)
    return()
  endif()
  set(numbers)
  foreach(part MAJOR MINOR PATCH)
    file(STRINGS "${header}" line REGEX "define TORCH_VERSION_${part} ")
    string(REGEX MATCH "[0-9]+" number "${line}")
    list(APPEND numbers "${number}")
  endforeach()
  list(JOIN numbers "." found)
  set(${version} "${found}" PARENT_SCOPE)
  set(${variable} "" PARENT_SCOPE)
  if(found VERSION_LESS ZERO_TORCH_MINIMUM)
    set(${variable} "expected libtorch ${ZERO_TORCH_MINIMUM} or later, got ${found} in '${root}'; ${how}" PARENT_SCOPE)
  endif()
endfunction()

# zero_add_libtorch(<root>): the target zero::torch. It links the two libraries that a program of
# the CPU needs, by their paths, so that CMake writes their folder into the programs that it builds.
function(zero_add_libtorch root)
  if(TARGET zero::torch)
    return()
  endif()
  add_library(zero::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(zero::torch SYSTEM INTERFACE
    "${root}/include" "${root}/include/torch/csrc/api/include")
  target_compile_definitions(zero::torch INTERFACE USE_DISTRIBUTED)
  target_compile_features(zero::torch INTERFACE cxx_std_20)
  target_link_libraries(zero::torch INTERFACE "${root}/lib/libtorch_cpu.so" "${root}/lib/libc10.so")
endfunction()

# zero_find_cudart(<variable> <root>): the CUDA runtime beside the wheel in <root>, of the toolkit's
# major version, or "". A program that loads the toolkit's gives that to libtorch too, and it may be
# too old.
function(zero_find_cudart variable root)
  file(REAL_PATH "${root}" root)
  cmake_path(GET root PARENT_PATH site)
  file(GLOB found "${site}/nvidia/*/lib/libcudart.so.${CUDAToolkit_VERSION_MAJOR}")
  list(SUBLIST found 0 1 found)
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()

# zero_toolkit_problem(<variable> <root>): sets <variable> to a sentence if the libtorch in <root>
# cannot be used with the CUDA toolkit that was found, else to "". What is not known is no problem.
function(zero_toolkit_problem variable root)
  set(${variable} "" PARENT_SCOPE)
  set(line "")
  foreach(name IN ITEMS version.py build-version)
    if(NOT line AND EXISTS "${root}/${name}")
      file(STRINGS "${root}/${name}" line REGEX "[+]cu[0-9]+" LIMIT_COUNT 1)
    endif()
  endforeach()
  if(NOT line MATCHES "[+]cu([0-9]+)([0-9])")
    return()
  endif()
  set(major "${CMAKE_MATCH_1}")
  set(oldest "${major}.${CMAKE_MATCH_2}")
  zero_find_cudart(cudart "${root}")
  if(cudart)
    set(oldest "${major}.0")
  endif()
  if(NOT CUDAToolkit_VERSION_MAJOR EQUAL major OR CUDAToolkit_VERSION VERSION_LESS oldest)
    set(${variable} "expected a CUDA toolkit ${oldest} or a later ${major}, as the libtorch in '${root}' needs, got ${CUDAToolkit_VERSION}; set CUDACXX to the nvcc of another, and CUDAToolkit_ROOT" PARENT_SCOPE)
  endif()
endfunction()

# zero_add_libtorch_cuda(<root>): the target zero::torch_cuda, with NCCL's headers and the CUDA
# runtime where a wheel has them. Nothing refers to libtorch_cuda by name: it registers itself when
# it is loaded.
function(zero_add_libtorch_cuda root)
  if(TARGET zero::torch_cuda)
    return()
  endif()
  file(REAL_PATH "${root}" real)
  cmake_path(GET real PARENT_PATH site)
  add_library(zero::torch_cuda INTERFACE IMPORTED GLOBAL)
  target_compile_definitions(zero::torch_cuda INTERFACE USE_C10D_NCCL)
  if(EXISTS "${site}/nvidia/nccl/include/nccl.h")
    target_include_directories(zero::torch_cuda SYSTEM INTERFACE "${site}/nvidia/nccl/include")
  endif()
  target_include_directories(zero::torch_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  zero_find_cudart(cudart "${root}")
  if(NOT cudart)
    set(cudart CUDA::cudart)
  endif()
  target_link_libraries(zero::torch_cuda INTERFACE zero::torch -Wl,--no-as-needed
    "${root}/lib/libtorch_cuda.so" "${root}/lib/libc10_cuda.so" -Wl,--as-needed ${cudart})
endfunction()
