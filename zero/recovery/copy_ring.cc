// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/recovery/copy_ring.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "zero/checkpoint/file_exchange.h"
#include "zero/checkpoint/format/stored_file.h"

namespace zero {
namespace {

// Small parts let the training's own messages through in between.
constexpr int64_t kPart = int64_t{4} << 20;

at::Tensor part_of(const at::Tensor& bytes, int64_t begin) {
  if (begin >= bytes.numel()) return {};
  return bytes.narrow(0, begin, std::min(kPart, bytes.numel() - begin));
}

struct Ring {
  std::vector<int> backups;
  std::vector<int> turns;  // in which each primary connects: two of one rank differ, mostly
};

Ring make_ring(const Topology& topology) {
  const int world = topology.world_size();
  std::vector<int> order(static_cast<size_t>(world));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return topology.machine_of(a) < topology.machine_of(b); });
  std::vector<int> ranks_on(static_cast<size_t>(topology.machines()));
  for (int r = 0; r < world; ++r) ++ranks_on[static_cast<size_t>(topology.machine_of(r))];
  const int largest = *std::max_element(ranks_on.begin(), ranks_on.end());
  const int shift = largest == world ? 1 : largest;
  Ring ring{std::vector<int>(order.size()), std::vector<int>(order.size())};
  for (int i = 0; i < world; ++i) {
    ring.backups[order[i]] = order[(i + shift) % world];
    ring.turns[order[i]] = i / shift % 2;
  }
  return ring;
}

}  // namespace

std::vector<int> backup_ranks(const Topology& topology) { return make_ring(topology).backups; }

CopyRing::CopyRing(const Group& group) {
  const auto [backups, turns] = make_ring(group.topology());
  const int rank = group.rank();
  primary_ = static_cast<int>(std::find(backups.begin(), backups.end(), rank) - backups.begin());
  const auto connect = [&](int primary, int backup) {
    // Errors and lines about long waits have the numbers here.
    const std::string name =
        c10::str("copies (here rank 0 is rank ", primary, " and rank 1 is rank ", backup, ")");
    return group.subgroup({primary, backup}, name)
        .make_communicator("shard", Purpose::kControl, /*two_level=*/false);
  };
  // Making one waits for its ranks, so all ranks have one order. Turns keep it from being a chain.
  const bool own_first = std::pair(turns[rank], rank) < std::pair(turns[primary_], primary_);
  if (own_first) to_backup_ = connect(rank, backups[rank]);
  from_primary_ = connect(primary_, rank);
  if (!to_backup_) to_backup_ = connect(rank, backups[rank]);
}

void CopyRing::pass(const at::Tensor& out, const at::Tensor& in, const std::string& label) {
  Pending sent, received;
  if (out.defined()) sent = to_backup_->broadcast(out, 0, label);
  if (in.defined()) received = from_primary_->broadcast(in, 0, label);
  waiting_ = true;
  const auto at_end = c10::make_scope_exit([this] { waiting_ = false; });
  sent.wait();
  received.wait();
}

MemoryFile CopyRing::exchange(const MemoryFile& own,
                              const std::function<at::Tensor(int64_t bytes)>& allocate) {
  const std::string own_text = files_text({own.content});
  at::Tensor own_sizes = at::empty({2}, at::TensorOptions().dtype(at::kLong));
  own_sizes.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(own_text.size());
  own_sizes.mutable_data_ptr<int64_t>()[1] = own.bytes.numel();
  const at::Tensor sizes = at::empty({2}, own_sizes.options());
  pass(own_sizes, sizes, "sizes of a copy");

  const at::Tensor out = host_bytes(own_text.size());
  std::memcpy(out.mutable_data_ptr(), own_text.data(), own_text.size());
  const at::Tensor in = host_bytes(sizes.const_data_ptr<int64_t>()[0]);
  pass(out, in, "description of a copy");

  MemoryFile copy;
  copy.bytes = allocate(sizes.const_data_ptr<int64_t>()[1]);
  for (int64_t at = 0; at < std::max(own.bytes.numel(), copy.bytes.numel()); at += kPart) {
    pass(part_of(own.bytes, at), part_of(copy.bytes, at), "copy of a shard");
  }
  const std::string origin = "the copy of rank " + std::to_string(primary_) + "'s shard";
  const auto files =
      parse_files(std::string(static_cast<const char*>(in.const_data_ptr()), in.nbytes()), origin);
  TORCH_CHECK(files.size() == 1 && files[0].about.bytes == copy.bytes.nbytes(), origin,
              ": expected a description of ", copy.bytes.nbytes(), " bytes, got another one");
  copy.content = files[0];
  FileParts bytes{{0, copy.bytes}};
  auto memory = std::make_unique<MemoryReader>(origin, copy.bytes.nbytes(), std::move(bytes));
  try {
    StoredFile(std::move(memory), copy.content.about).verify_rest(nullptr);
  } catch (const c10::Error&) {
    TORCH_CHECK(false, origin,
                ": expected the checksums of what was sent, got others; it was "
                "damaged on the way");
  }
  return copy;
}

void CopyRing::abort(const std::string& reason) noexcept {
  to_backup_->abort(reason);
  from_primary_->abort(reason);
}

Traffic CopyRing::traffic() const {
  // The other communicator sends nothing here.
  return to_backup_->traffic();
}

}  // namespace zero
