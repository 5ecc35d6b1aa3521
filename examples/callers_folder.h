// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <unistd.h>

#include <cstdlib>

namespace zero::examples {

// `bazel run` starts programs elsewhere; paths mean what they meant to the user.
inline void enter_callers_folder() {
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  TORCH_CHECK(folder == nullptr || chdir(folder) == 0, "cannot enter the folder ", folder,
              " of BUILD_WORKING_DIRECTORY");
}

}  // namespace zero::examples
