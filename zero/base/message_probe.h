// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A place where tests see each message before it is sent.
#pragma once

#include <atomic>
#include <string>

namespace zero {

// Called before each value that this process writes to a store, and before each operation of a
// communicator that it starts, with its name. Null but in tests.
using MessageProbe = void (*)(const std::string& what);
inline std::atomic<MessageProbe> message_probe{nullptr};

inline void probe_message(const std::string& what) {
  if (const MessageProbe probe = message_probe.load(std::memory_order_relaxed)) probe(what);
}

}  // namespace zero
