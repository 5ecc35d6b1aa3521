// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows between ranks of one machine, over a transport that counts what is sent through it.
#include "zero/comm/backends/shared_rows.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "tests/comm/all_shared_memory.h"
#include "tests/support/error_of.h"
#include "tests/support/in_memory_backend.h"
#include "zero/base/threads.h"
#include "zero/comm/backends/shared_memory.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr milliseconds kTimeout = std::chrono::seconds(20);
constexpr int64_t kLeast = 64;   // bytes
constexpr int64_t kNumel = 100;  // floats of a row that is shared

struct Rank {
  int rank;
  BackendPtr backend;
  std::shared_ptr<MemoryNetwork> network;

  SharedMemoryBackend* shared() const { return dynamic_cast<SharedMemoryBackend*>(backend.get()); }
  int64_t sent() const { return network->counts(rank).bytes_of(MemoryOp::kSend); }
  // In memory that others can read.
  at::Tensor allocate(int64_t numel) const {
    return backend->allocateTensor(numel, at::TensorOptions().dtype(at::kFloat));
  }
  WorkPtr send(const at::Tensor& row, int to, int tag) const {
    std::vector<at::Tensor> one{row};
    return backend->send(one, to, tag);
  }
  WorkPtr receive(const at::Tensor& row, int from, int tag) const {
    std::vector<at::Tensor> one{row};
    return backend->recv(one, from, tag);
  }
};

using Wrap = std::function<BackendPtr(const BackendPtr& under)>;

void on_ranks(
    int world_size, const std::function<void(const Rank&)>& body, int unwilling = -1,
    const Wrap& wrap = [](const BackendPtr& under) { return under; }) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto network = std::make_shared<MemoryNetwork>();
  std::mutex mutex;
  std::exception_ptr error;  // the first, from which those of other ranks follow
  const auto run = [&](int rank) {
    try {
      const BackendPtr under =
          network->factory(rank)(store, rank, world_size, Purpose::kData, kTimeout).backend;
      body({rank, share_memory(wrap(under), kTimeout, rank != unwilling, kLeast), network});
    } catch (...) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!error) error = std::current_exception();
      }
      network->stop();
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < world_size; ++rank) threads.emplace_back(run, rank);
  run(0);
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

// A transport whose abort() ends no wait, but that of each receive does, and which cannot be asked
// whether a connection has ended.
class WithoutAbort : public c10d::Backend {
 public:
  explicit WithoutAbort(BackendPtr under)
      : Backend(under->getRank(), under->getSize()), under_(std::move(under)) {}
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return under_->send(tensors, to, tag);
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    struct UntilAborted : c10d::Work {
      bool wait(milliseconds timeout) override {
        std::unique_lock<std::mutex> lock(mutex);
        return !aborted.wait_for(lock, timeout, [this] { return is_aborted; });
      }
      void abort() override {
        const std::lock_guard<std::mutex> lock(mutex);
        is_aborted = true;
        aborted.notify_all();
      }
      std::mutex mutex;
      std::condition_variable aborted;
      bool is_aborted = false;
    };
    struct EndsLate : c10d::Work {
      bool wait(milliseconds) override {
        std::this_thread::sleep_for(milliseconds(300));
        return false;
      }
    };
    if (tag == kNeverSent) return c10::make_intrusive<UntilAborted>();
    if (tag == kEndsLate) return c10::make_intrusive<EndsLate>();
    if (tag == kWatched) return c10::make_intrusive<c10d::Work>();
    return under_->recv(tensors, from, tag);
  }
  void abort() override {}

  static constexpr int kNeverSent = 9;
  static constexpr int kEndsLate = 10;
  static constexpr int kWatched = 1 << 30;

 private:
  const BackendPtr under_;
};

at::Tensor values(int from, int to, int64_t numel = kNumel) {
  return at::arange(numel, at::kFloat) + 1000 * from + 10000 * to;
}

TEST(SharedRowsTest, RowsOfEveryPairArriveWhereverTheyAre) {
  for (const int world_size : {2, 3, 4}) {
    for (const bool in_shared_memory : {true, false}) {
      on_ranks(world_size, [&](const Rank& r) {
        const int64_t before = r.sent();
        std::vector<WorkPtr> works;
        std::vector<at::Tensor> sent, received(world_size);
        for (int peer = 0; peer < world_size; ++peer) {
          if (peer == r.rank) continue;
          received[peer] = at::zeros({kNumel});
          works.push_back(r.receive(received[peer], peer, 7));
          sent.push_back(in_shared_memory ? r.allocate(kNumel) : at::empty({kNumel}));
          sent.back().copy_(values(r.rank, peer));
          works.push_back(r.send(sent.back(), peer, 7));
        }
        for (const WorkPtr& work : works) EXPECT_TRUE(work->wait(kTimeout));
        for (int peer = 0; peer < world_size; ++peer) {
          if (peer == r.rank) continue;
          EXPECT_TRUE(at::equal(received[peer], values(peer, r.rank)));
        }
        EXPECT_EQ(r.sent(), before);
      });
    }
  }
}

TEST(SharedRowsTest, ShortRowsAreSentUnderneath) {
  on_ranks(2, [](const Rank& r) {
    ASSERT_NE(r.shared(), nullptr);
    EXPECT_FALSE(r.shared()->reads(1 - r.rank, kLeast - 1));
    EXPECT_TRUE(r.shared()->reads(1 - r.rank, kLeast));
    EXPECT_FALSE(r.shared()->reads(r.rank, kLeast));
    const int64_t before = r.sent();
    const at::Tensor own = values(r.rank, 1 - r.rank, 3), theirs = at::zeros({3});
    const WorkPtr receive = r.receive(theirs, 1 - r.rank, 7), send = r.send(own, 1 - r.rank, 7);
    receive->wait(kTimeout);
    send->wait(kTimeout);
    EXPECT_TRUE(at::equal(theirs, values(1 - r.rank, r.rank, 3)));
    EXPECT_EQ(r.sent() - before, 12);
  });
}

TEST(SharedRowsTest, ARowIsReadInPlaceAndItsSenderWaitsUntilItIsReleased) {
  on_ranks(2, [](const Rank& r) {
    const at::Tensor done = at::zeros({1});
    if (r.rank == 0) {
      const at::Tensor row = r.allocate(kNumel);
      row.copy_(values(0, 1));
      const WorkPtr sent = r.send(row, 1, 7);
      // The receiver has the address now, and what is written there later is what it reads.
      r.receive(done, 1, 8)->wait(kTimeout);
      row.fill_(5);
      r.send(done, 1, 9)->wait(kTimeout);
      EXPECT_TRUE(sent->wait(kTimeout));
    } else {
      const auto row = r.shared()->receive_in_place(kNumel * 4, 0, 7);
      row->wait(kTimeout);
      at::Tensor read = at::empty({kNumel});
      std::memcpy(read.mutable_data_ptr(), row->address(), read.nbytes());
      EXPECT_TRUE(at::equal(read, values(0, 1)));
      const int64_t before = r.sent();
      r.send(done, 0, 8)->wait(kTimeout);
      r.receive(done, 0, 9)->wait(kTimeout);
      std::memcpy(read.mutable_data_ptr(), row->address(), read.nbytes());
      EXPECT_TRUE(at::equal(read, at::full({kNumel}, 5.0)));
      row->release();
      EXPECT_EQ(r.sent() - before, 4);
    }
  });
}

TEST(SharedRowsTest, ARowThatIsNotTakenInTimeIsAnErrorOfItsSender) {
  on_ranks(2, [](const Rank& r) {
    const at::Tensor done = at::zeros({1});
    if (r.rank == 0) {
      const at::Tensor row = r.allocate(kNumel);
      const WorkPtr sent = r.send(row, 1, 7);
      EXPECT_THROW(sent->wait(milliseconds(50)), std::exception);
      r.send(done, 1, 8)->wait(kTimeout);
    } else {
      const auto row = r.shared()->receive_in_place(kNumel * 4, 0, 7);
      r.receive(done, 0, 8)->wait(kTimeout);
      row->wait(kTimeout);
      row->release();
    }
  });
}

TEST(SharedRowsTest, ASenderDoesNotDependOnWhenItsPeerWaits) {
  on_ranks(2, [](const Rank& r) {
    const at::Tensor done = at::zeros({1});
    if (r.rank == 0) {
      const at::Tensor row = r.allocate(kNumel);
      row.copy_(values(0, 1));
      EXPECT_TRUE(r.send(row, 1, 7)->wait(kTimeout));
      r.send(done, 1, 8)->wait(kTimeout);
    } else {
      const at::Tensor into = at::zeros({kNumel});
      const WorkPtr received = r.receive(into, 0, 7);
      r.receive(done, 0, 8)->wait(kTimeout);
      received->wait(kTimeout);
      EXPECT_TRUE(at::equal(into, values(0, 1)));
    }
  });
}

TEST(SharedRowsTest, ARankThatSharesWithNobodyUsesTheTransportItself) {
  on_ranks(
      3,
      [](const Rank& r) {
        EXPECT_EQ(r.shared() == nullptr, r.rank == 1);
        if (r.rank != 1) {
          EXPECT_FALSE(r.shared()->reads(1, kLeast));
          EXPECT_TRUE(r.shared()->reads(2 - r.rank, kLeast));
        }
      },
      /*unwilling=*/1);
}

// As at the limit of processes.
TEST(SharedRowsTest, ARankThatHasNoThreadLeftIsToldWhatToDo) {
  const auto refuse = [](const BackendPtr& under) {
    threads_refused = under->getRank() == 1;
    return under;
  };
  expect_words(error_of([&] {
                 on_ranks(
                     2, [](const Rank&) {}, -1, refuse);
               }),
               {"cannot start a thread", "ulimit -u"});
}

TEST(SharedRowsTest, ARowFollowsWhereThereIsNoRoomForIt) {
  std::vector<at::Tensor> blocks;
  on_ranks(2, [&](const Rank& r) {
    const at::Tensor row = r.rank == 0 ? values(0, 1) : at::zeros({kNumel});
    const int64_t before = r.sent();
    if (r.rank == 0) {
      blocks = all_shared_memory();
      const WorkPtr copied = r.send(row, 1, 7), read = r.send(row, 1, 8);
      EXPECT_TRUE(copied->wait(kTimeout));
      EXPECT_TRUE(read->wait(kTimeout));
      EXPECT_EQ(r.sent() - before, 2 * static_cast<int64_t>(row.nbytes()));
      blocks.clear();
    } else {
      EXPECT_TRUE(r.receive(row, 0, 7)->wait(kTimeout));
      EXPECT_TRUE(at::equal(row, values(0, 1)));
      const auto in_place = r.shared()->receive_in_place(kNumel * 4, 0, 8);
      in_place->wait(kTimeout);
      EXPECT_EQ(std::memcmp(in_place->address(), row.const_data_ptr(), row.nbytes()), 0);
      in_place->release();
    }
  });
}

using Receive = std::function<WorkPtr(const Rank&, int tag)>;
using Abort = std::function<void(const Rank&, c10d::Work&)>;

WorkPtr receive_copied(const Rank& r, int tag) {
  const WorkPtr received = r.receive(at::zeros({kNumel}), 1, tag);
  std::this_thread::sleep_for(milliseconds(50));  // until the copier has it
  return received;
}
WorkPtr receive_in_place(const Rank& r, int tag) {
  return r.shared()->receive_in_place(kNumel * 4, 1, tag);
}
void abort_all(const Rank& r, c10d::Work&) { r.backend->abort(); }
void abort_one(const Rank&, c10d::Work& work) { work.abort(); }

// Of a wait for a row with this tag of WithoutAbort, which an abort ends in the middle.
std::string error_of_aborted_wait(int tag, const Receive& receive = receive_copied,
                                  const Abort& abort = abort_all) {
  std::string error;
  std::vector<at::Tensor> blocks;
  on_ranks(
      2,
      [&](const Rank& r) {
        const at::Tensor row = at::zeros({kNumel}), done = at::zeros({1});
        if (r.rank == 1) {
          blocks = all_shared_memory();  // so that the row is received from the transport
          const WorkPtr sent = r.send(row, 0, tag);
          r.receive(done, 0, 8)->wait(kTimeout);
          blocks.clear();
          return;
        }
        const WorkPtr received = receive(r, tag);
        std::thread other([&] {
          std::this_thread::sleep_for(milliseconds(50));
          abort(r, *received);
        });
        error = error_of([&] { received->wait(kTimeout); });
        other.join();
        r.send(done, 1, 8)->wait(kTimeout);
      },
      /*unwilling=*/-1,
      [](const BackendPtr& under) { return c10::make_intrusive<WithoutAbort>(under); });
  return error;
}

// One of all waits, and one as that of a communicator whose connection has ended in the middle of a
// message.
TEST(SharedRowsTest, AbortEndsAWaitThatTheTransportsOwnDoesNot) {
  const std::pair<Receive, Abort> cases[] = {
      {receive_copied, abort_all}, {receive_copied, abort_one}, {receive_in_place, abort_one}};
  for (const auto& [receive, abort] : cases) {
    const auto began = std::chrono::steady_clock::now();
    EXPECT_NE(error_of_aborted_wait(WithoutAbort::kNeverSent, receive, abort), "");
    EXPECT_LT(std::chrono::steady_clock::now() - began, kTimeout / 2);
  }
}

// The copier has not come back yet when the wait for what it copies ends.
TEST(SharedRowsTest, AWaitThatIsAbortedBlamesNoRank) {
  const std::string text = error_of_aborted_wait(WithoutAbort::kEndsLate);
  EXPECT_NE(text.find("aborted"), std::string::npos) << text;
  EXPECT_EQ(text.find("sent nothing"), std::string::npos) << text;
}

// First at the rank that aborts, and then at the other, while both are there.
TEST(SharedRowsTest, AbortEndsTheWaitsOfBothSides) {
  for (const bool taken : {false, true}) {
    std::latch ended[2] = {std::latch(1), std::latch(1)};
    on_ranks(
        2,
        [&](const Rank& r) {
          const WorkPtr waits = taken ? r.send(r.allocate(kNumel), 1 - r.rank, 7)
                                      : r.receive(at::zeros({kNumel}), 1 - r.rank, 7);
          std::thread other;
          if (r.rank == 0) {
            ended[1].wait();
          } else {
            other = std::thread([&] {
              std::this_thread::sleep_for(milliseconds(20));
              r.backend->abort();
            });
          }
          const auto began = std::chrono::steady_clock::now();
          EXPECT_THROW(waits->wait(kTimeout), std::exception);
          EXPECT_LT(std::chrono::steady_clock::now() - began, kTimeout / 4);
          if (other.joinable()) other.join();
          ended[r.rank].count_down();
          ended[0].wait();
        },
        /*unwilling=*/-1,
        [](const BackendPtr& under) { return c10::make_intrusive<WithoutAbort>(under); });
  }
}

// As when another communicator of this process learns that the sender has been killed.
TEST(SharedRowsTest, ARowIsAnErrorWhereItsMemoryIsGivenBackBeforeItsRelease) {
  on_ranks(2, [](const Rank& r) {
    const at::Tensor done = at::zeros({1});
    if (r.rank == 0) {
      const at::Tensor row = r.allocate(kNumel);
      const WorkPtr sent = r.send(row, 1, 7);
      r.receive(done, 1, 8)->wait(kTimeout);
      EXPECT_THROW(sent->wait(kTimeout), std::exception);
      return;
    }
    const auto row = r.shared()->receive_in_place(kNumel * 4, 0, 7);
    row->wait(kTimeout);
    const void* const address = row->address();
    PeerMemory::open(SharedMemory::instance()->address())->give_back();
    const at::Tensor read = at::full({kNumel}, 5.0);
    std::memcpy(read.mutable_data_ptr(), address, read.nbytes());
    EXPECT_TRUE(at::equal(read, at::zeros({kNumel})));
    EXPECT_THROW(row->release(), c10::Error);
    EXPECT_THROW(r.receive(read, 0, 7)->wait(kTimeout), c10::Error);
    r.send(done, 0, 8)->wait(kTimeout);
  });
}

TEST(SharedRowsTest, ARowOfAnotherSizeIsAnError) {
  on_ranks(2, [](const Rank& r) {
    if (r.rank == 0) {
      const WorkPtr sent = r.send(r.allocate(kNumel), 1, 7);
      EXPECT_THROW(sent->wait(kTimeout), std::exception);  // the other side gives up
    } else {
      try {
        r.receive(at::zeros({kNumel + 1}), 0, 7)->wait(kTimeout);
        ADD_FAILURE() << "expected an error";
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("expected a row of 404 bytes, got 400"),
                  std::string::npos)
            << error.what();
      }
    }
  });
}

// Neither a notice nor an error of a transport says it, as when a process is killed.
TEST(SharedRowsTest, WaitsEndSoonAfterTheirConnection) {
  std::latch seen(1);
  on_ranks(2, [&](const Rank& r) {
    if (r.rank == 1) {
      std::this_thread::sleep_for(milliseconds(50));
      r.network->kill(1);
      seen.wait();
      return;
    }
    const auto began = std::chrono::steady_clock::now();
    const WorkPtr received = r.receive(at::zeros({kNumel}), 1, 7);
    const WorkPtr sent = r.send(r.allocate(kNumel), 1, 7);
    EXPECT_THROW(received->wait(kTimeout), std::exception);
    EXPECT_THROW(sent->wait(kTimeout), std::exception);
    EXPECT_LT(std::chrono::steady_clock::now() - began, kTimeout / 4);
    seen.count_down();
  });
}

}  // namespace
}  // namespace zero
