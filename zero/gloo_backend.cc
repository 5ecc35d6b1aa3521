// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/gloo_backend.h"

#include <csignal>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

namespace zero {
namespace {

using Devices = decltype(c10d::ProcessGroupGloo::Options::devices);

Devices make_devices(const std::string& hostname) {
  constexpr bool kLazy = false;
  if (!hostname.empty()) {
    return {c10d::ProcessGroupGloo::createDeviceForHostname(hostname, kLazy)};
  }
  Devices devices;
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  std::istringstream names(interfaces == nullptr ? "" : interfaces);
  for (std::string name; std::getline(names, name, ',');) {
    if (!name.empty()) {
      devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name, kLazy));
    }
  }
  if (devices.empty()) devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice(kLazy));
  return devices;
}

}  // namespace

namespace {

// Gloo writes to sockets without MSG_NOSIGNAL, so a peer that ends would end this
// process without a word. Python programs ignore the signal from the start; others
// keep a handler of their own if they have one.
void survive_broken_pipes() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    if (sigaction(SIGPIPE, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0 &&
        action.sa_handler == SIG_DFL) {
      std::signal(SIGPIPE, SIG_IGN);
    }
  });
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& hostname) {
  survive_broken_pipes();
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices = make_devices(hostname);
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, world_size, std::move(options));
}

}  // namespace zero
