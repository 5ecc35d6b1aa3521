// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/rendezvous/tcp_store.h"

#include <c10/util/Exception.h>
#include <c10/util/Synchronized.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <future>
#include <memory>
#include <thread>

#include "zero/base/descriptors.h"
#include "zero/base/detached_call.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using TcpStorePtr = c10::intrusive_ptr<c10d::TCPStore>;

// How much longer than its timeout c10d may take, so that it reports its error before ours.
constexpr milliseconds kErrorSlack{400};
constexpr milliseconds kRetryInterval{50};

TcpStorePtr open(const std::string& host, const c10d::TCPStoreOptions& options) {
  if (options.useLibUV || !options.isServer) {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  }
  // The server without libuv has a pipe that programs would inherit. Nothing else of a store is.
  const NewDescriptors descriptors;
  auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
  descriptors.close_pipes_on_exec();
  return store;
}

TcpStorePtr open_once(const std::string& host, c10d::TCPStoreOptions options) {
  const char* wanted = std::getenv("USE_LIBUV");
  options.useLibUV = wanted == nullptr || std::string(wanted) != "0";
  try {
    return open(host, options);
  } catch (const std::exception& error) {
    // The message for a libtorch without libuv says to set USE_LIBUV=0.
    if (!options.useLibUV || std::string(error.what()).find("USE_LIBUV") == std::string::npos) {
      throw;
    }
  }
  options.useLibUV = false;
  return open(host, options);
}

// Why the last try failed, if one did.
using Failure = c10::Synchronized<std::exception_ptr>;

// c10d connects once or twice, each time for the whole timeout, with a pause of up to a second.
TcpStorePtr open_in_time(const std::string& host, c10d::TCPStoreOptions options, Failure& failure) {
  const milliseconds timeout = options.timeout;
  const auto deadline = Clock::now() + timeout;
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    options.timeout = std::max(left / 3, milliseconds(1));
    try {
      TcpStorePtr store = open_once(host, options);
      store->setTimeout(timeout);
      return store;
    } catch (const c10::DistNetworkError&) {
      if (options.isServer || Clock::now() + timeout / 10 >= deadline) throw;
      failure.withLock([](auto& last) { last = std::current_exception(); });
    }
    std::this_thread::sleep_for(kRetryInterval);
  }
}

}  // namespace

int store_descriptors(int world_size) {
  constexpr int kOwn = 12;  // the listener, libuv's loop, and a client of its own
  return world_size + kOwn;
}

TcpStorePtr open_tcp_store(const std::string& host, c10d::TCPStoreOptions options) {
  survive_broken_pipes();
  const auto failure = std::make_shared<Failure>();
  auto opened = start_detached([=] { return open_in_time(host, options, *failure); });
  if (opened.wait_for(options.timeout + kErrorSlack) != std::future_status::ready) {
    failure->withLock([](const auto& last) {
      if (last) std::rethrow_exception(last);
    });
    TORCH_CHECK(false, "what listens at ", host, ":", options.port,
                " does not answer as a store does: the process that serves it is stopped, its "
                "machine is silent, or another program has the port");
  }
  return opened.get();
}

}  // namespace zero
