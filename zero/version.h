// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The version of the library, which the CMake package, the pkg-config file and CHANGELOG.md repeat.
// While the first number is 0, a change of the second may change interfaces, and sources have to be
// compiled again.
//
//   #if ZERO_VERSION < ZERO_VERSION_OF(0, 2, 0)
#pragma once

#include <string>

#define ZERO_VERSION_MAJOR 0
#define ZERO_VERSION_MINOR 1
#define ZERO_VERSION_PATCH 0

#define ZERO_VERSION_OF(major, minor, patch) ((major)*10000 + (minor)*100 + (patch))
#define ZERO_VERSION ZERO_VERSION_OF(ZERO_VERSION_MAJOR, ZERO_VERSION_MINOR, ZERO_VERSION_PATCH)

#define ZERO_VERSION_TEXT_OF_(major, minor, patch) #major "." #minor "." #patch
#define ZERO_VERSION_TEXT_OF(major, minor, patch) ZERO_VERSION_TEXT_OF_(major, minor, patch)
// "0.1.0"; checkpoints name the version that wrote them.
#define ZERO_VERSION_TEXT \
  ZERO_VERSION_TEXT_OF(ZERO_VERSION_MAJOR, ZERO_VERSION_MINOR, ZERO_VERSION_PATCH)

namespace zero {

// Returns one line about the library as it was built, for logs and reports: its version, the
// libtorch and the compiler it was built with, the kinds of devices it has kernels for, and its
// transports. For example:
//
//   zero 0.1.0, libtorch 2.11.0, g++ 12.2.0, devices: cpu, transports: gloo shared-memory
std::string version_string();

}  // namespace zero
