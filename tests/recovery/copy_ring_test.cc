// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/recovery/copy_ring.h: who keeps whose copy, what arrives, and how many bytes are sent.
#include "zero/recovery/copy_ring.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint/shard_copies.h"

namespace zero {
namespace {

at::Tensor host_bytes(int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
}

// A file in memory with `bytes` of values, which are of `rank`.
MemoryFile file_of(int rank, int64_t bytes) {
  const at::Tensor values = host_bytes(bytes);
  auto* const data = values.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 7 + rank);
  MemoryFileWriter writer({"rank " + std::to_string(rank), {{{"w", "buffer", 0, bytes}, values}}},
                          "an id", fresh_memory);
  writer.copy()->copy_all();
  return writer.finish();
}

// Of another size on each rank, the last of several parts.
MemoryFile file_of(int rank) { return file_of(rank, (int64_t{5} << 20) * rank + 3); }

TEST(CopyRingTest, CopiesAreOnAnotherMachineWhereThereIsOne) {
  const std::vector<std::vector<int>> all = {
      {0, 0},       {0, 1},       {0, 0, 0},          {0, 1, 2},          {0, 0, 1, 1},
      {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 0, 0, 1, 1, 2}, {0, 0, 0, 0, 1, 2}, {0, 1, 1, 2, 1, 0, 2}};
  for (const std::vector<int>& machine_of : all) {
    const Topology topology(machine_of);
    const std::vector<int> backups = backup_ranks(topology);
    SCOPED_TRACE(topology.describe());
    const auto world = static_cast<int>(machine_of.size());
    EXPECT_EQ(std::set<int>(backups.begin(), backups.end()).size(), machine_of.size())
        << "each rank keeps one copy";
    int on_the_same = 0;
    int largest = 0;
    for (int r = 0; r < world; ++r) {
      EXPECT_NE(backups[r], r);
      on_the_same += topology.machine_of(backups[r]) == topology.machine_of(r) ? 1 : 0;
      int here = 0;
      for (int s = 0; s < world; ++s) here += topology.machine_of(s) == topology.machine_of(r);
      largest = std::max(largest, here);
    }
    EXPECT_EQ(on_the_same, std::max(0, 2 * largest - world)) << "no fewer are possible";
  }
}

TEST(CopyRingTest, EachRankReceivesItsSourcesFileAndSendsItsOwnOnce) {
  for (const int world_size : {2, 3, 4, 5}) {
    run_ranks(world_size,
              [&](const Group& group) {
                CopyRing ring(group);
                EXPECT_EQ(backup_ranks(group.topology())[ring.primary()], group.rank());
                const MemoryFile own = file_of(group.rank());
                for (int i = 0; i < 2; ++i) {
                  const MemoryFile copy = ring.exchange(own, host_bytes);
                  const MemoryFile expected = file_of(ring.primary());
                  EXPECT_TRUE(copy.bytes.equal(expected.bytes));
                  EXPECT_EQ(files_text({copy.content}), files_text({expected.content}));
                }
                const auto description = static_cast<int64_t>(files_text({own.content}).size());
                EXPECT_EQ(ring.traffic().small_bytes_sent,
                          2 * (own.bytes.numel() + description + 16));
              },
              {.transport = kRealTransport});
  }
}

TEST(CopyRingTest, ACopyThatWasDamagedOnTheWayIsRefused) {
  run_ranks(
      2,
      [&](const Group& group) {
        CopyRing ring(group);
        MemoryFile own = file_of(group.rank());
        if (group.rank() == 1) own.bytes.mutable_data_ptr<uint8_t>()[own.bytes.numel() / 2] ^= 1;
        const std::string text = error_of([&] { ring.exchange(own, host_bytes); });
        if (group.rank() == 1) {
          EXPECT_TRUE(text.empty()) << text;
        } else {
          expect_words(text, {"the copy of rank 1's shard", "checksum", "damaged on the way"});
        }
      },
      {.transport = kRealTransport});
}

// As at the end of a program whose last steps are protected.
TEST(CopyRingTest, AnAbortEndsAnExchangeInItsMiddle) {
  const std::vector<MemoryFile> files = {file_of(0, 16 << 20), file_of(1, 16 << 20)};
  for (int life = 10; life < 90; life += 10) {
    run_ranks(2,
              [&](const Group& group) {
                CopyRing ring(group);
                const MemoryFile& own = files[group.rank()];
                const at::Tensor copy = at::zeros_like(own.bytes);
                std::thread aborter([&] {
                  std::this_thread::sleep_for(std::chrono::milliseconds(life));
                  ring.abort("the optimizer is gone");
                });
                const auto start = std::chrono::steady_clock::now();
                error_of([&] {
                  while (true) ring.exchange(own, [&](int64_t) { return copy; });
                });
                EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
                aborter.join();
              },
              {.transport = kRealTransport});
  }
}

// The two of a pair are ranks 0 and 1 of a group of their own.
TEST(CopyRingTest, AnErrorSaysWhichRanksOfTheJobThePairIs) {
  if (kRealTransport == Transport::kMemory) GTEST_SKIP() << "sends are not waited for";
  std::latch connected(3);
  run_ranks(3,
            [&](const Group& group) {
              CopyRing ring(group);
              connected.arrive_and_wait();
              if (group.rank() == 2) return ring.abort("this rank gives up");
              const std::string text =
                  error_of([&] { ring.exchange(file_of(group.rank()), host_bytes); });
              // First it waits for the rank that keeps its copy.
              if (group.rank() == 1) expect_words(text, {"lost rank 1", "rank 1 is rank 2"});
            },
            {.transport = kRealTransport});
}

// Rank 1 gives up while its neighbours connect to each other, or later. Where sends are not waited
// for, rank 0 waits for rank 2 then, and the reason comes to it from there.
TEST(CopyRingTest, AnAbortEndsTheExchangeOfTheNeighboursToo) {
  for (const auto& [transport, later] :
       {std::pair{kRealTransport, 0}, {kRealTransport, 200}, {Transport::kMemory, 200}}) {
    const int delay = later;  // clang 14 captures no part of a pair
    std::latch done(3);
    run_ranks(3,
              [&](const Group& group) {
                std::optional<CopyRing> ring;
                const std::string text = error_within(std::chrono::seconds(10), [&] {
                  ring.emplace(group);
                  if (group.rank() == 1) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(delay));
                    return ring->abort("this rank gives up");
                  }
                  try {
                    ring->exchange(file_of(group.rank()), host_bytes);
                  } catch (const c10::Error& error) {
                    ring->abort(error.what_without_backtrace());
                    throw;
                  }
                });
                EXPECT_EQ(text.empty(), group.rank() == 1) << text;
                done.arrive_and_wait();  // the destructor of a ring ends them, too
              },
              {.transport = transport, .timeout = std::chrono::seconds(20)});
  }
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
