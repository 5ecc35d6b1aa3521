// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/backends/shared_peers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

namespace zero {
namespace {

using std::chrono::milliseconds;

constexpr int kWatchTag = 1 << 30;  // see share_memory()
// After so long a wait asks whether the peer is still there, and again each time after that.
constexpr milliseconds kWatchInterval{100};

// Sends row r of `rows` to rank r, and returns what each rank has sent to this one.
at::Tensor exchange_rows(c10d::Backend& ranks, const at::Tensor& rows, milliseconds timeout) {
  const int world = ranks.getSize();
  at::Tensor received = at::zeros_like(rows);
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int k = 1; k < world; ++k) {
    const int peer = (ranks.getRank() + k) % world;
    std::vector<at::Tensor> to{rows[peer]};
    std::vector<at::Tensor> from{received[peer]};
    works.push_back(ranks.send(to, peer, 0));
    works.push_back(ranks.recv(from, peer, 0));
  }
  for (const auto& work : works) TORCH_CHECK(work->wait(timeout), "aborted");
  return received;
}

// As exchange_rows(), for plain values.
template <typename T>
std::vector<T> exchange_values(c10d::Backend& ranks, const std::vector<T>& values,
                               milliseconds timeout) {
  at::Tensor rows =
      at::empty({static_cast<int64_t>(values.size()), static_cast<int64_t>(sizeof(T))}, at::kByte);
  std::memcpy(rows.mutable_data_ptr(), values.data(), rows.nbytes());
  rows = exchange_rows(ranks, rows, timeout);
  std::vector<T> received(values.size());
  std::memcpy(received.data(), rows.const_data_ptr(), rows.nbytes());
  return received;
}

}  // namespace

std::unique_ptr<SharedPeers> SharedPeers::find(const BackendPtr& under,
                                               const std::shared_ptr<SharedMemory>& memory,
                                               milliseconds timeout) {
  PeerMemory::give_back_ended();
  // 1. Tell all ranks where the shared memory of this one is.
  const auto world = static_cast<size_t>(under->getSize());
  const SharedMemoryAddress own = memory ? memory->address() : SharedMemoryAddress();
  const auto memories =
      exchange_values(*under, std::vector<SharedMemoryAddress>(world, own), timeout);

  // 2. Map that of each peer, and make a page of notices for it.
  std::vector<Peer> peers(world);
  std::vector<RowNotices::Address> here(world);
  for (size_t r = 0; r < world; ++r) {
    if (static_cast<int>(r) == under->getRank() || !memory) continue;
    peers[r].memory = PeerMemory::open(memories[r]);
    if (peers[r].memory) peers[r].notices = RowNotices::make(memory);
    if (peers[r].notices) here[r] = peers[r].notices->address();
  }
  // 3. Tell each peer where its page is, and find the one that it has made for this rank. One may
  //    see the other and not be seen, as with different users.
  const auto there = exchange_values(*under, here, timeout);
  std::vector<uint8_t> connects(world);
  for (size_t r = 0; r < world; ++r) {
    RowNotices* const notices = peers[r].notices.get();
    connects[r] = notices != nullptr && notices->connect(peers[r].memory, there[r]);
  }
  // 4. Two ranks share memory if both can: each must know which way the other takes.
  const auto connected = exchange_values(*under, connects, timeout);
  bool any = false;
  for (size_t r = 0; r < world; ++r) {
    if (connects[r] == 0 || connected[r] == 0) peers[r] = {};
    any = any || peers[r].notices;
  }
  if (!any) return nullptr;
  return std::unique_ptr<SharedPeers>(new SharedPeers(under, std::move(peers), timeout));
}

SharedPeers::SharedPeers(const BackendPtr& under, std::vector<Peer> peers, milliseconds timeout)
    : under_(under),
      peers_(std::move(peers)),
      timeout_(timeout),
      watch_(*under_, calls_, kWatchTag, timeout) {}

SharedPeers::~SharedPeers() { PeerMemory::give_back_ended(); }

uint64_t SharedPeers::announce(int to, int tag, int64_t offset, int64_t bytes) {
  RowNotices& notices = *peers_[to].notices;
  const std::lock_guard<std::mutex> lock(announce_mutex_);
  await(to, RowNotices::Kind::kTaken, timeout_, [&] { return notices.has_slot(); });
  return notices.announce(tag, offset, bytes);
}

void SharedPeers::await_taken(int by, uint64_t number, milliseconds timeout) {
  const RowNotices& notices = *peers_[by].notices;
  await(by, RowNotices::Kind::kTaken, timeout, [&] { return notices.is_taken(number); });
}

RowNotices::Row SharedPeers::await_row(int from, int tag, int64_t bytes, milliseconds timeout) {
  RowNotices& notices = *peers_[from].notices;
  std::optional<RowNotices::Row> row;
  const auto found = [&] { return (row = notices.find(tag)).has_value(); };
  await(from, RowNotices::Kind::kAnnounced, timeout, found);
  TORCH_CHECK(row->bytes == bytes, "shared memory: expected a row of ", bytes, " bytes, got ",
              row->bytes, "; all ranks must make the same calls in the same order");
  return *row;
}

const void* SharedPeers::at(int from, const RowNotices::Row& row) const {
  return peers_[from].memory->at(row.offset, row.bytes);
}

void SharedPeers::take(int from, uint64_t number) {
  TORCH_CHECK(peers_[from].memory->is_there(), "its process has ended");
  peers_[from].notices->take(number);
}

void SharedPeers::await(int peer, RowNotices::Kind kind, milliseconds timeout,
                        c10::function_ref<bool()> ready) {
  using Clock = std::chrono::steady_clock;
  const RowNotices& notices = *peers_[peer].notices;
  const Clock::time_point start = Clock::now();
  milliseconds next_look = kWatchInterval;
  bool has_ended = false;
  while (true) {
    const uint32_t seen = notices.count(kind);
    has_ended = has_ended || notices.is_closed();
    // What a peer has said before it ended counts.
    const bool is_ready = ready();
    TORCH_CHECK(!stop_, "aborted");
    if (is_ready) return;
    TORCH_CHECK(!has_ended, "its connection has ended");
    const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
    TORCH_CHECK(waited < timeout, "shared memory: the peer said nothing in ", timeout.count(),
                " ms");
    if (waited < next_look) {
      notices.wait(kind, seen, std::min(timeout, next_look) - waited);
    } else {
      next_look = waited + kWatchInterval;
      has_ended = watch_.has_ended(peer);
    }
  }
}

void SharedPeers::stop() noexcept {
  stop_ = true;
  for (const Peer& peer : peers_) {
    if (!peer.notices) continue;
    peer.notices->close();
    peer.notices->wake();
  }
}

}  // namespace zero
