// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Collectives between emulated devices that behave as NCCL's do. Ranks are threads of this process,
// each with a device of its own.
//
//   Each communicator has a stream, where its collectives run one after the other. A collective
//   waits for the stream that is current at the call, and starts when all ranks have called it.
//   Work::wait() makes the current stream wait, never the host.
//   The first call of a kind and size connects: it holds the host until all ranks have called it.
//   An abort ends the collectives of one rank, and waits until no collective runs on its device, of
//   other communicators either. Peers have an error then (Backend::getError()), and their own
//   collectives go on waiting. So has a rank whose collective was not done within nccl_timeout().
//   A shutdown waits for those of the peers.
//   Collectives of a section (Backend::startCoalescing()) start and connect at its end.
//   A device has room for a number of collectives at once, of all communicators. One that has
//   started holds its place until all ranks have done it; others wait, in no order.
//   What NCCL forbids is a violation: another call or size on another rank, calls on one
//   communicator by two threads at once, memory of another device, a wait for one collective of a
//   section, and a section that is left open or goes on in another thread. Rules that follow from
//   the order of calls alone are in collective_rules.h.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/in_memory_backend.h"
#include "zero/process_group.h"

namespace zero {

class EmulatedNetwork {
 public:
  // Each device has room for so many collectives at once.
  //   ring_sums  a reduce-scatter adds up in an order that depends on the row, as a ring does, and
  //              not in rank order
  explicit EmulatedNetwork(int room = 1, bool ring_sums = false);
  ~EmulatedNetwork();
  // For the Group of rank `rank`, whose data is on device `rank`; control messages use the host.
  BackendFactory factory(int rank);
  // From now on nothing gets through the communicators that there are, while all ranks live: each
  // of them has an error, and its collectives wait until it is aborted.
  void break_links();
  // The rank is dead: its control messages throw on every rank, and the others see nothing of its
  // device any more, not even an error.
  void kill(int rank);
  // Ends all collectives.
  void stop();

  struct State;

 private:
  const std::shared_ptr<State> state_;
  MemoryNetwork host_;
};

struct DeviceRunOptions {
  int ranks_per_machine = 0;  // as in RunOptions
  bool over_host = false;     // data of devices is staged through the host, as with Gloo
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
  int room = 1;  // for collectives on a device; with several optimizers each needs a place
  bool ring_sums = false;  // as in EmulatedNetwork
  bool finishes = true;    // false: a rank leaves out calls that others make
  std::vector<std::string>* violations = nullptr;  // where expected ones go
  EmulatedNetwork* network = nullptr;              // in place of one with `room` and `ring_sums`
};

// Calls body(group) on `world_size` threads, each with a device of its own, which is not made
// current. Then expects that there was no violation, or puts those that there were where the
// options say. Rethrows what the first failing rank threw.
void run_device_ranks(int world_size, const std::function<void(const Group&)>& body,
                      const DeviceRunOptions& options = {});

}  // namespace zero
