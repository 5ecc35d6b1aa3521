// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/version.h"

#include <torch/version.h>

#if defined(__clang__)
#define ZERO_COMPILER \
  "clang " ZERO_VERSION_TEXT_OF(__clang_major__, __clang_minor__, __clang_patchlevel__)
#elif defined(__GNUC__)
#define ZERO_COMPILER "g++ " ZERO_VERSION_TEXT_OF(__GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__)
#else
#define ZERO_COMPILER "unknown compiler"
#endif

#ifdef ZERO_CUDA
#define ZERO_DEVICES "cpu cuda"
#define ZERO_TRANSPORTS "gloo shared-memory nccl"
#else
#define ZERO_DEVICES "cpu"
#define ZERO_TRANSPORTS "gloo shared-memory"
#endif

namespace zero {

std::string version_string() {
  return "zero " ZERO_VERSION_TEXT ", libtorch " TORCH_VERSION ", " ZERO_COMPILER
         ", devices: " ZERO_DEVICES ", transports: " ZERO_TRANSPORTS;
}

}  // namespace zero
