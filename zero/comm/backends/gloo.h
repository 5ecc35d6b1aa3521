// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Makes Gloo transports: host memory over TCP, the transport of CPU training
// and of every control message.
//
// Gloo's own headers are not part of a libtorch wheel, so that the one source
// file behind this header is the only one that sees ProcessGroupGloo.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace zero {

// Collective over the ranks 0..world_size-1 that share `store`, which must hold
// nothing of another transport. Returns when this rank is connected to all
// others; throws when that takes longer than `timeout`, which also bounds every
// operation that brings no timeout of its own. Each wait for a key of `store` that Gloo makes has a
// fifth of `timeout`, unless `store` has a limit of its own (BoundedStore::within).
//
// `hostname` is a name or address of this machine that the other ranks can
// reach. When it is empty, Gloo listens on the interface that
// GLOO_SOCKET_IFNAME names, or else on the address that the machine's own name
// resolves to. Several interfaces are refused: Gloo would send all data over the
// first, and a failed rank could not close the connections of the others. So is one that this
// machine does not have. An error of connections at a loopback address, or at addresses of IPv4
// and IPv6, says what to set.
//
// The first call makes this process ignore SIGPIPE unless it handles it: Gloo
// would let a peer that ends take this process with it, without a message.
//
// Connections are made here and not at first use, whatever
// TORCH_GLOO_LAZY_INIT says: a lazy connection to a rank that has died can wait
// for ever.
//
// Programs that this process starts do not inherit the connections.
//
// abort() ends the connections, so that transfers under way fail here and on the peers. It and the
// end of the backend take as long for many connections as for one.
//
// A write to a connection to another address holds little that is not sent, so that a thread that
// sends a long row keeps others from the connection only for a short time.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& hostname);

// Why make_gloo_backend() would refuse what this process was started with; empty if it would not.
std::string gloo_problem(const std::string& hostname);

// How many descriptors make_gloo_backend() opens: a connection to each peer, and a few to listen
// and to wait.
int gloo_descriptors(int world_size);

}  // namespace zero
