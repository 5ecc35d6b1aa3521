// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/backends/gloo.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Synchronized.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "zero/base/descriptors.h"
#include "zero/base/error_text.h"
#include "zero/base/own_process.h"

namespace zero {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Devices = decltype(c10d::ProcessGroupGloo::Options::devices);

// No operation reaches this tag.
constexpr int kCloseTag = std::numeric_limits<int>::max();

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

// The interfaces on which Gloo can listen; empty if the system does not say.
std::set<std::string> interfaces_with_address() {
  std::set<std::string> names;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return names;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    const int family = one->ifa_addr == nullptr ? AF_UNSPEC : one->ifa_addr->sa_family;
    if (family == AF_INET || family == AF_INET6) names.insert(one->ifa_name);
  }
  freeifaddrs(first);
  return names;
}

// The names of hosts and interfaces on which Gloo has listened in this process. Such a name was
// right: where it is without an address later, a name server or a network is away for a moment.
c10::Synchronized<std::set<std::string>>& known_names() {
  // Never destroyed: a thread may still connect while the process ends.
  static auto& names = *new c10::Synchronized<std::set<std::string>>;
  return names;
}

void add_known(const std::string& name) {
  known_names().withLock([&](auto& names) { names.insert(name); });
}

bool is_known(const std::string& name) {
  return known_names().withLock([&](const auto& names) { return names.contains(name); });
}

Devices make_devices(const std::string& hostname) {
  constexpr bool kLazy = false;
  if (!hostname.empty()) {
    try {
      Devices devices{c10d::ProcessGroupGloo::createDeviceForHostname(hostname, kLazy)};
      add_known(hostname);
      return devices;
    } catch (const std::exception& error) {
      TORCH_CHECK_VALUE(
          error_line(error).find("Cannot resolve") == std::string::npos || is_known(hostname),
          "InitOptions::hostname: expected a name or address of this machine, got ", hostname,
          "; give each machine its own, or name its interface by GLOO_SOCKET_IFNAME");
      throw;
    }
  }
  const std::vector<std::string> names = interface_names();
  if (names.empty()) return {c10d::ProcessGroupGloo::createDefaultDevice(kLazy)};
  Devices devices{c10d::ProcessGroupGloo::createDeviceForInterface(names.front(), kLazy)};
  add_known(names.front());
  return devices;
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

// Returns what to do about `error` where Gloo listens at an address that ranks of other machines
// cannot use; empty for other errors. `epoll` is that of the device.
std::string address_advice(const std::string& error, int epoll) {
  std::string own = "an unknown address";
  for (const int descriptor : watched_by(epoll)) {
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0) {
      own = address_of(descriptor, getsockname);
    }
  }
  const auto has = [&](const char* words) { return error.find(words) != std::string::npos; };
  const bool is_loopback = own.starts_with("127.") || own == "::1" || has("remote=[127.");
  const bool two_families = has("ss_family");  // IPv4 and IPv6
  if (!two_families && !(is_loopback && has("connect"))) return {};
  return c10::str("Gloo listens at ", own,
                  ": if ranks are on several machines, set GLOO_SOCKET_IFNAME on each to the "
                  "interface that reaches the others, or InitOptions::hostname to its address");
}

// A socket that is known again after its number may have been given to another one.
struct Connection {
  int descriptor;
  ino_t inode;
};

// Returns the inode of a socket that has a peer; nothing for other descriptors.
std::optional<ino_t> inode_of_connection(int descriptor) {
  struct stat status {};
  if (address_of(descriptor, getpeername).empty() || fstat(descriptor, &status) != 0) return {};
  return status.st_ino;
}

std::vector<Connection> connections_among(const std::vector<int>& descriptors) {
  std::vector<Connection> result;
  for (const int descriptor : descriptors) {
    if (const auto inode = inode_of_connection(descriptor)) result.push_back({descriptor, *inode});
  }
  return result;
}

// ProcessGroupGloo with an end that does not take longer for more connections.
//
// Gloo has no call that closes a connection, and where it does so on a thread of ours, it waits for
// the next turn of its event loop, up to 10 ms, before it turns to the next connection:
// Loop::unregisterDescriptor(), called by Pair::changeState(). Its event thread closes a connection
// that it finds ended without such a wait. So this ends all sockets, by their descriptors, and
// leaves the rest to that thread.
class GlooBackend : public c10d::Backend {
 public:
  GlooBackend(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<Connection> connections)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        connections_(std::move(connections)) {}
  ~GlooBackend() override { end_connections(); }

  const std::string getBackendName() const override { return gloo_->getBackendName(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return gloo_->send(tensors, to, tag);
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return gloo_->recv(tensors, from, tag);
  }
  void shutdown() override { gloo_->shutdown(); }
  void abort() override {
    end_connections();
    close_connections();
  }

 private:
  void end_connections() const noexcept;
  void close_connections();

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::vector<Connection> connections_;
  const OwnProcess process_;
  std::mutex mutex_;  // c10d numbers calls without a lock
};

// A forked child shares the sockets. And what Gloo has closed meanwhile may be another's by now: so
// a copy of the descriptor is looked at before it is used, which nobody else can close.
void GlooBackend::end_connections() const noexcept {
  if (!process_.here()) return;
  for (const Connection& connection : connections_) {
    const int copy = fcntl(connection.descriptor, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) continue;
    struct stat status {};
    if (fstat(copy, &status) == 0 && S_ISSOCK(status.st_mode) &&
        status.st_ino == connection.inode) {
      ::shutdown(copy, SHUT_RDWR);
    }
    close(copy);
  }
}

// Closes what the event thread does not: connections that end_connections() does not know, and one
// in the middle of a message that nobody receives any more, which the thread would look at again
// and again. Gloo closes all connections of a group when a wait times out. A wait for a peer whose
// connection is closed already ends without closing the others, so each has a turn.
void GlooBackend::close_connections() {
  for (int i = 1; i < getSize(); ++i) {
    try {
      std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
      recv(nothing, (getRank() + i) % getSize(), kCloseTag)->wait(std::chrono::milliseconds(1));
    } catch (...) {  // This is how it succeeds.
    }
  }
}

// A device, and its epoll instance; -1 if that is not known.
struct Device {
  Devices list;
  int epoll = -1;
};

Device make_device(const std::string& hostname) {
  // So that what is new is of this call.
  static auto& mutex = *new std::mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const NewDescriptors descriptors;
  Device device{make_devices(hostname)};
  const std::vector<int> epolls = descriptors.epolls();
  if (epolls.size() == 1) device.epoll = epolls.front();
  return device;
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
  const Device device = make_device(hostname);
  options->devices = device.list;
  // For collectives, which nothing here calls. With more, c10d ends the process where it can start
  // one of them and not the next.
  options->threads = 1;
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend =
        c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, world_size, std::move(options));
  } catch (const std::exception& error) {
    const std::string line = error_line(error);
    const std::string advice = hostname.empty() ? address_advice(line, device.epoll) : "";
    if (advice.empty()) throw;
    throw_communication_error(c10::str(line, ". ", advice));
  }
  backend->setTimeout(timeout);
  // All connections are there: Gloo makes none later.
  descriptors.close_watched_on_exec();
  bound_writes(descriptors.watched());
  return c10::make_intrusive<GlooBackend>(std::move(backend),
                                          connections_among(watched_by(device.epoll)));
}

std::string gloo_problem(const std::string& hostname) {
  const std::vector<std::string> names = interface_names();
  if (!hostname.empty() || names.empty()) return {};
  if (names.size() > 1) {
    return c10::str("GLOO_SOCKET_IFNAME: expected one network interface, got ", names.size(), ": ",
                    std::getenv("GLOO_SOCKET_IFNAME"),
                    "; name the one that reaches the other ranks");
  }
  const std::set<std::string> there = interfaces_with_address();
  if (there.empty() || there.contains(names.front()) || is_known(names.front())) {
    return {};
  }
  return c10::str("GLOO_SOCKET_IFNAME: expected an interface of this machine with an address, got ",
                  names.front(), "; name one of ", c10::Join(", ", there),
                  ", in full and without the ^ or = of NCCL_SOCKET_IFNAME");
}

int gloo_descriptors(int world_size) {
  constexpr int kOfDevice = 4;  // the listener, an epoll instance and a pipe
  return world_size - 1 + kOfDevice;
}

}  // namespace zero
