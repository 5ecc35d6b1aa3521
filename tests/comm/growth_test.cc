// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The messages, bytes and connections of one rank, at world sizes that no test can run: counted on
// a transport that says yes to everything. Prints a table.

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zero/comm/exchange/doubling_steps.h"
#include "zero/comm/row_communicator.h"
#include "zero/process_group.h"

namespace zero {
namespace {

struct Counts {
  int64_t messages = 0;
  int64_t bytes = 0;
  std::set<std::pair<const void*, int>> connections;  // by transport and peer
};

class DoneWork : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

// Sends and receives succeed at once; what is received keeps its value.
class CountingBackend : public c10d::Backend {
 public:
  CountingBackend(int rank, int world_size, std::shared_ptr<Counts> counts)
      : Backend(rank, world_size), counts_(std::move(counts)) {}
  const std::string getBackendName() const override { return "counting"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer,
                                      int /*tag*/) override {
    ++counts_->messages;
    counts_->bytes += static_cast<int64_t>(tensors.at(0).nbytes());
    counts_->connections.insert({this, peer});
    return c10::make_intrusive<DoneWork>();
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer,
                                      int /*tag*/) override {
    tensors.at(0).zero_();
    counts_->connections.insert({this, peer});
    return c10::make_intrusive<DoneWork>();
  }
  void shutdown() override {}

 private:
  const std::shared_ptr<Counts> counts_;
};

// A rank of a job with `ranks_per_machine`, alone.
Group counted_group(int world_size, int ranks_per_machine, const std::shared_ptr<Counts>& counts) {
  const BackendFactory factory = [counts](const c10::intrusive_ptr<c10d::Store>&, int rank,
                                          int ranks, Purpose, std::chrono::milliseconds) {
    return NewBackend(c10::make_intrusive<CountingBackend>(rank, ranks, counts));
  };
  return Group(c10::make_intrusive<c10d::HashStore>(), world_size / 2, world_size, "counted",
               factory, at::kCPU, std::chrono::seconds(30),
               Topology::of_equal_machines(world_size, ranks_per_machine));
}

constexpr int64_t kControlBytes = 56;

// The messages of a step without gradients and parameters: three calls and a norm.
void send_control(Communicator& control, Communicator& norm) {
  for (int call = 0; call < 3; ++call) {
    control.all_reduce_max(at::zeros({kControlBytes / 4}, at::kInt), "call").wait();
  }
  norm.all_reduce_sum(at::zeros({2}, at::kDouble), "norm").wait();
}

TEST(GrowthTest, ControlMessagesGrowLikeTheLogarithm) {
  std::printf("ranks  machines | control and norm: messages  bytes | connections\n");
  for (const int world_size : {8, 64, 1024, 16384}) {
    for (const int local : {8, 1}) {
      const auto counts = std::make_shared<Counts>();
      const Group group = counted_group(world_size, local, counts);
      const auto control = group.make_communicator("control", Purpose::kControl);
      const auto norm = group.make_communicator("norm", Purpose::kData);
      send_control(*control, *norm);
      EXPECT_EQ(counts->bytes,
                control->traffic().small_bytes_sent + norm->traffic().small_bytes_sent);
      const int machines = world_size / local;
      std::printf("%5d  %8d | %26ld %6ld | %11zu\n", world_size, machines,
                  static_cast<long>(counts->messages), static_cast<long>(counts->bytes),
                  counts->connections.size());
      // 4 messages; up to 8 ranks exchange with all, more with one in each step and one more where
      // the number is no power of two.
      const auto steps = [](int ranks) {
        return ranks <= 8 ? ranks - 1 : static_cast<int>(std::ceil(std::log2(ranks))) + 1;
      };
      const int64_t most = 4 * (steps(local) + steps(machines));
      EXPECT_LE(counts->messages, most);
      EXPECT_LE(counts->bytes, most * kControlBytes);
    }
  }
}

// A row of one element for each rank, so that only messages count.
TEST(GrowthTest, RowsNeedAConnectionWithinTheMachineAndOneForEachOther) {
  std::printf("ranks  machines | reduce and gather: messages     bytes | connections\n");
  for (const int world_size : {8, 64, 1024, 16384}) {
    const int local = 8, machines = world_size / local;
    const auto counts = std::make_shared<Counts>();
    const Group group = counted_group(world_size, local, counts);
    const auto data = group.make_communicator("data", Purpose::kData);
    const at::Tensor rows = at::zeros({world_size, 1});
    const at::Tensor buffer = at::zeros({RowCommunicator(*data).reduction_bytes(rows)}, at::kByte);
    RowCommunicator(*data)
        .reduce_rows(
            rows, buffer, [](const SummandRows&) {}, "bucket")
        .wait();
    data->gather_rows(rows, "bucket").wait();
    std::printf("%5d  %8d | %27ld %9ld | %11zu\n", world_size, machines,
                static_cast<long>(counts->messages), static_cast<long>(counts->bytes),
                counts->connections.size());
    EXPECT_EQ(static_cast<int>(counts->connections.size()), local - 1 + machines - 1);
    EXPECT_EQ(data->traffic().link_bytes_sent, 2 * (machines - 1) * 4);
    EXPECT_EQ(counts->bytes,
              data->traffic().exchange_bytes_sent + data->traffic().gather_bytes_sent);
  }
}

// The steps of all ranks meet: every step of one has its counterpart on the other.
TEST(GrowthTest, DoublingReachesEveryRankOnce) {
  for (const int world_size : {1, 2, 3, 4, 5, 7, 8, 9, 12, 31, 64, 100}) {
    std::vector<std::vector<DoublingStep>> steps;
    for (int r = 0; r < world_size; ++r) steps.push_back(doubling_steps(r, world_size));
    std::vector<std::multiset<int>> known;  // whose values each rank has
    for (int r = 0; r < world_size; ++r) known.push_back({r});
    std::vector<size_t> next(world_size, 0);
    bool moved = true;
    while (moved) {
      moved = false;
      for (int r = 0; r < world_size; ++r) {
        if (next[r] == steps[r].size()) continue;
        const DoublingStep& mine = steps[r][next[r]];
        if (next[mine.peer] == steps[mine.peer].size()) continue;
        const DoublingStep& other = steps[mine.peer][next[mine.peer]];
        if (other.peer != r) continue;
        EXPECT_EQ(mine.tag, other.tag);
        EXPECT_LT(mine.tag, kDoublingTags);
        EXPECT_EQ(mine.sends, other.receives);
        EXPECT_EQ(mine.receives, other.sends);
        const std::multiset<int> before = known[r];
        const auto receive = [](const DoublingStep& step, std::multiset<int>& own,
                                const std::multiset<int>& from) {
          if (!step.receives) return;
          if (!step.combines) own.clear();
          own.insert(from.begin(), from.end());
        };
        receive(mine, known[r], known[mine.peer]);
        receive(other, known[mine.peer], before);
        ++next[r];
        ++next[mine.peer];
        moved = true;
      }
    }
    std::multiset<int> all;
    for (int r = 0; r < world_size; ++r) all.insert(r);
    for (int r = 0; r < world_size; ++r) {
      EXPECT_EQ(next[r], steps[r].size());
      EXPECT_EQ(known[r], all) << "rank " << r << " of " << world_size;
    }
  }
}

}  // namespace
}  // namespace zero
