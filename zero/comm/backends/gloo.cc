// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/backends/gloo.h"

#include <c10/util/Exception.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "zero/base/broken_pipes.h"
#include "zero/base/descriptors.h"

namespace zero {
namespace {

using Devices = decltype(c10d::ProcessGroupGloo::Options::devices);

// The interfaces of GLOO_SOCKET_IFNAME.
std::vector<std::string> interface_names() {
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  std::istringstream text(interfaces == nullptr ? "" : interfaces);
  std::vector<std::string> names;
  for (std::string name; std::getline(text, name, ',');) {
    if (!name.empty()) names.push_back(name);
  }
  return names;
}

Devices make_devices(const std::string& hostname) {
  constexpr bool kLazy = false;
  if (!hostname.empty()) {
    return {c10d::ProcessGroupGloo::createDeviceForHostname(hostname, kLazy)};
  }
  const std::vector<std::string> names = interface_names();
  if (names.empty()) return {c10d::ProcessGroupGloo::createDefaultDevice(kLazy)};
  return {c10d::ProcessGroupGloo::createDeviceForInterface(names.front(), kLazy)};
}

// Gloo waits five times its timeout for a peer to connect.
std::chrono::milliseconds connect_timeout(std::chrono::milliseconds timeout) {
  return std::max(timeout / 5, std::chrono::milliseconds(1));
}

// While one lives, threads that this thread starts do not preempt others when they wake up.
//
// The wake-up of Gloo's event thread is mostly a small write of another thread, which still holds
// the connection's lock. An event thread that took its core at once would spin on that lock for as
// long as the scheduler lets it: a tenth of a step, with as many ranks as cores.
class PatientThreads {
 public:
  PatientThreads() : policy_(sched_getscheduler(0)) {
    const sched_param none{};
    changed_ = policy_ == SCHED_OTHER && sched_setscheduler(0, SCHED_BATCH, &none) == 0;
  }
  ~PatientThreads() {
    const sched_param none{};
    if (changed_) sched_setscheduler(0, policy_, &none);
  }
  PatientThreads(const PatientThreads&) = delete;
  PatientThreads& operator=(const PatientThreads&) = delete;

 private:
  const int policy_;
  bool changed_ = false;
};

// Returns the address without the port; empty if there is none.
std::string address_of(int descriptor, int (*get)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (get(descriptor, reinterpret_cast<sockaddr*>(&address), &size) != 0) return {};
  std::array<char, NI_MAXHOST> text{};
  const int error = getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, text.data(),
                                text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? std::string(text.data()) : std::string();
}

// Bytes that a connection takes from a writer before it sends them: 1 ms of a link of 1 Gbit/s.
constexpr int kUnsentBytes = 128 << 10;

// A thread that sends writes as much of a row as its connection takes, and holds the lock of that
// connection meanwhile. If something arrives there, the event thread finds the lock taken and asks
// again and again: for a row of 2 MiB, which the socket's buffer takes whole, a twentieth of the
// processor time of a step, and longer if it takes the core of the thread that writes. With little
// in the buffer the event thread writes the rest. What is in flight has no such limit, so that the
// link stays full.
//
// Between ranks of one machine rows seldom take sockets, and sends come before receives
// (pairwise_exchange.cc): there the event thread writes anyway.
void bound_writes(const std::vector<int>& descriptors) {
  for (const int descriptor : descriptors) {
    const std::string peer = address_of(descriptor, getpeername);
    if (peer.empty() || peer == address_of(descriptor, getsockname)) continue;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof(kUnsentBytes));
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& hostname) {
  const std::string problem = gloo_problem(hostname);
  TORCH_CHECK(problem.empty(), problem);
  survive_broken_pipes();
  const PatientThreads threads;
  const NewDescriptors descriptors;
  auto options = c10d::ProcessGroupGloo::Options::create(connect_timeout(timeout));
  options->devices = make_devices(hostname);
  // For collectives, which nothing here calls. With more, c10d ends the process where it can start
  // one of them and not the next.
  options->threads = 1;
  auto backend =
      c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, world_size, std::move(options));
  backend->setTimeout(timeout);
  // All connections are there: Gloo makes none later.
  descriptors.close_watched_on_exec();
  bound_writes(descriptors.watched());
  return backend;
}

std::string gloo_problem(const std::string& hostname) {
  const std::vector<std::string> names = interface_names();
  if (!hostname.empty() || names.size() <= 1) return {};
  return c10::str("GLOO_SOCKET_IFNAME: expected one network interface, got ", names.size(), ": ",
                  std::getenv("GLOO_SOCKET_IFNAME"), "; name the one that reaches the other ranks");
}

int gloo_descriptors(int world_size) {
  constexpr int kOfDevice = 4;  // the listener, an epoll instance and a pipe
  return world_size - 1 + kOfDevice;
}

}  // namespace zero
