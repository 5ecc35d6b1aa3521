# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
#
# cmake --install: the library, the public headers, the files of find_package and pkg-config.

include(CMakePackageConfigHelpers)
set(package "${CMAKE_INSTALL_LIBDIR}/cmake/zero")
foreach(header IN LISTS zero_public_headers)
  cmake_path(GET header PARENT_PATH folder)
  install(FILES "${header}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/${ZERO_INCLUDE_NAME}/${folder}")
endforeach()
install(TARGETS zero EXPORT zeroTargets)
install(EXPORT zeroTargets NAMESPACE zero:: DESTINATION "${package}")

string(REGEX MATCH "^[0-9]+\\.[0-9]+" ZERO_TORCH_MINOR "${ZERO_TORCH_VERSION}")
configure_package_config_file(cmake/zeroConfig.cmake.in zeroConfig.cmake INSTALL_DESTINATION "${package}")
write_basic_package_version_file(zeroConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/zeroConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/zeroConfigVersion.cmake"
  cmake/zero_libtorch.cmake DESTINATION "${package}")

set(folder "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
file(RELATIVE_PATH ZERO_PC_PREFIX "/prefix/${folder}" "/prefix")
string(REGEX REPLACE "/$" "" ZERO_PC_PREFIX "${ZERO_PC_PREFIX}")
set(ZERO_PC_STATIC "")
set(ZERO_PC_CUDA "")
set(ZERO_PC_RUN_PATH "")
if(BUILD_SHARED_LIBS)
  set(ZERO_PC_RUN_PATH "-Wl,-rpath,\${prefix}/${CMAKE_INSTALL_LIBDIR}")
endif()
if(NOT BUILD_SHARED_LIBS)
  set(ZERO_PC_STATIC "${OpenMP_CXX_FLAGS}")
  if(ZERO_CUDA)
    zero_find_cudart(cudart "${ZERO_TORCH_ROOT}")
    if(cudart)
      cmake_path(GET cudart PARENT_PATH folder_of_cudart)
      set(cudart "-Wl,-rpath,${folder_of_cudart} ${cudart}")
    else()
      set(cudart "-L${CUDAToolkit_LIBRARY_DIR} -lcudart")
    endif()
    set(ZERO_PC_CUDA "-Wl,--no-as-needed -ltorch_cuda -lc10_cuda -Wl,--as-needed ${cudart}")
  endif()
endif()
configure_file(cmake/zero.pc.in zero.pc @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/zero.pc" DESTINATION "${folder}")
