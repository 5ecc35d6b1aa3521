// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Opens c10d's key-value store, with or without libuv.
#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <string>

namespace zero {

// c10d uses libuv by default and throws if libtorch was built without it. This uses the other
// implementation then, and with USE_LIBUV=0 as in Python. Throws what TCPStore throws, within
// options.timeout and half a second, also when a server accepts the connection and sends nothing.
c10::intrusive_ptr<c10d::TCPStore> open_tcp_store(const std::string& host,
                                                  c10d::TCPStoreOptions options);

// How many descriptors a store that serves `world_size` ranks opens.
int store_descriptors(int world_size);

}  // namespace zero
