// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/tcp_store.h"

#include <cstdlib>
#include <exception>

namespace zero {

c10::intrusive_ptr<c10d::TCPStore> open_tcp_store(const std::string& host,
                                                  c10d::TCPStoreOptions options) {
  const char* wanted = std::getenv("USE_LIBUV");
  options.useLibUV = wanted == nullptr || std::string(wanted) != "0";
  try {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& error) {
    // The message for a libtorch without libuv tells to set USE_LIBUV=0.
    if (!options.useLibUV || std::string(error.what()).find("USE_LIBUV") == std::string::npos) {
      throw;
    }
  }
  options.useLibUV = false;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

}  // namespace zero
