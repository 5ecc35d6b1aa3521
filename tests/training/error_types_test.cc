// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which errors are a CommunicationError, as zero/errors.h promises, on the rank that has one and on
// the others; and loops that catch nothing else.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/frozen_store.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/errors.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

enum class Kind { kNone, kOwn, kCommunication, kForeign };

std::ostream& operator<<(std::ostream& out, Kind kind) {
  static constexpr const char* kNames[] = {"nothing", "c10::Error", "CommunicationError",
                                           "an exception of the program"};
  return out << kNames[static_cast<int>(kind)];
}

Kind kind_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommunicationError&) {
    return Kind::kCommunication;
  } catch (const c10::Error&) {
    return Kind::kOwn;
  } catch (const std::exception&) {
    return Kind::kForeign;
  }
  return Kind::kNone;
}

std::unique_ptr<torch::optim::Optimizer> sgd(OddModelImpl& model) {
  return make_inner(Inner::kSgdMomentum, model);
}

struct Rank {
  explicit Rank(const Group& group, const ZeroOptions& options = ZeroOptions().bucket_bytes(600))
      : group(group),
        optimizer(std::make_unique<ZeroOptimizer>(*model, sgd(*model), group, options)) {}
  at::Tensor loss() {
    return model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll);
  }
  void backward() { optimizer->backward(loss()); }
  void train() {
    backward();
    optimizer->step();
  }

  const Group group;
  OddModel model{1};
  std::unique_ptr<ZeroOptimizer> optimizer;
};

RunOptions with_timeout(milliseconds timeout) {
  RunOptions options{.transport = kRealTransport};
  options.timeout = timeout;
  return options;
}

// For each number of ranks, and each of them as the one that is different.
void on_each(const std::function<void(Rank&, bool different)>& body,
             const ZeroOptions& options = ZeroOptions().bucket_bytes(600)) {
  for (const int world_size : {1, 2, 3}) {
    for (int different = 0; different < world_size; ++different) {
      SCOPED_TRACE("rank " + std::to_string(different) + " of " + std::to_string(world_size));
      run_ranks(
          world_size,
          [&](const Group& group) {
            Rank rank(group, options);
            rank.train();
            body(rank, group.rank() == different);
          },
          with_timeout(std::chrono::seconds(20)));
    }
  }
}

// Both at once: what takes time is waiting.
void at_2_and_3_ranks(const std::function<void(int world_size)>& body) {
  auto two = std::async(std::launch::async, body, 2);
  body(3);
  two.get();
}

TEST(ErrorTypesTest, AMisuseOfOneRankIsNoCommunicationErrorOnAnyRank) {
  on_each([](Rank& r, bool different) {
    r.backward();
    EXPECT_EQ(kind_of([&] { r.optimizer->clip_grad_norm_(different ? -1.0 : 1.0); }), Kind::kOwn);
    // One that is noticed at once, and thrown by the others in their next call.
    if (different) {
      const auto guard = r.optimizer->no_sync();
      EXPECT_EQ(kind_of([&] { const auto second = r.optimizer->no_sync(); }), Kind::kOwn);
    }
    EXPECT_EQ(kind_of([&] { r.optimizer->step(); }), Kind::kOwn);
    EXPECT_EQ(kind_of([&] { r.optimizer->step(); }), Kind::kNone);
    // Parameters that one rank changed.
    if (different) r.model->trunk->weight.requires_grad_(false);
    EXPECT_EQ(kind_of([&] { r.optimizer->step(); }), Kind::kOwn);
    if (different) r.model->trunk->weight.requires_grad_(true);
    r.train();
  });
}

TEST(ErrorTypesTest, DifferentCallsAndArgumentsAreNoCommunicationErrors) {
  on_each([](Rank& r, bool different) {
    if (r.group.world_size() == 1) return;
    r.backward();
    EXPECT_EQ(kind_of([&] { r.optimizer->clip_grad_norm_(different ? 2.0 : 1.0); }), Kind::kOwn);
    EXPECT_EQ(
        kind_of([&] { different ? r.optimizer->step(), 0 : (r.optimizer->reduce_gradients(), 0); }),
        Kind::kOwn);
    r.optimizer->step();
  });
}

TEST(ErrorTypesTest, ABrokenPassIsTheProgramsOwnErrorOnItsRankAndNoCommunicationErrorOnOthers) {
  on_each([](Rank& r, bool different) {
    unsigned hook = 0;
    if (different) {
      hook = r.model->trunk->weight.register_hook(
          [](const at::Tensor&) { throw std::runtime_error("the program's own"); });
    }
    EXPECT_EQ(kind_of([&] { r.backward(); }), different ? Kind::kForeign : Kind::kNone);
    EXPECT_EQ(kind_of([&] { r.optimizer->step(); }), Kind::kOwn);
    if (different) r.model->trunk->weight.remove_hook(hook);
    r.optimizer->zero_grad();
    r.train();
  });
}

TEST(ErrorTypesTest, AFileThatOneRankCannotWriteIsNoCommunicationErrorOnAnyRank) {
  on_each([](Rank& r, bool) {
    EXPECT_EQ(kind_of([&] { r.optimizer->save_checkpoint("/proc/nowhere/checkpoint"); }),
              Kind::kOwn);
    EXPECT_EQ(kind_of([&] { r.optimizer->load_checkpoint("/proc/nowhere/checkpoint"); }),
              Kind::kOwn);
    r.train();
  });
}

// Whichever call it is that notices the end of another rank.
TEST(ErrorTypesTest, EachCallThatNoticesTheEndOfARankThrowsACommunicationError) {
  const std::vector<std::function<void(Rank&)>> calls = {
      [](Rank& r) { r.optimizer->step(); },
      [](Rank& r) { r.optimizer->clip_grad_norm_(1.0); },
      [](Rank& r) { r.optimizer->master(r.model->scale); },
      [](Rank& r) { r.optimizer->broadcast_buffers(); },
      [](Rank& r) { r.optimizer->check_replicas(); },
      [](Rank& r) { r.optimizer->save_checkpoint("nowhere"); },
      [](Rank& r) { r.optimizer->load_checkpoint("nowhere"); },
      [](Rank& r) { r.optimizer->freeze({r.model->scale}); },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    run_ranks(2,
              [&](const Group& group) {
                Rank r(group);
                r.train();
                if (group.rank() == 1) return;
                EXPECT_EQ(kind_of([&] { calls[i](r); }), Kind::kCommunication) << "call " << i;
              },
              {.transport = kRealTransport});
  }
}

TEST(ErrorTypesTest, ARankThatDoesNotConnectIsACommunicationError) {
  std::latch done(1);
  run_ranks(
      2,
      [&](const Group& group) {
        if (group.rank() == 1) {
          done.wait();
          return;
        }
        EXPECT_EQ(kind_of([&] { group.make_communicator("own", Purpose::kControl); }),
                  Kind::kCommunication);
        EXPECT_EQ(kind_of([&] { Rank rank(group); }), Kind::kCommunication);
        done.count_down();
      },
      with_timeout(milliseconds(1500)));
}

TEST(ErrorTypesTest, OperationsOfACommunicatorThatFailedAreCommunicationErrors) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size,
              [&](const Group& group) {
                const auto own = group.make_communicator("own", Purpose::kControl);
                const auto other = group.make_communicator("other", Purpose::kControl);
                const int64_t before = group.failures();
                const auto sum = [&] {
                  own->all_reduce_sum(at::zeros({3}, at::kDouble), "numbers").wait();
                };
                EXPECT_EQ(kind_of(sum), Kind::kNone);
                EXPECT_EQ(group.failures(), before);
                other->all_gather_text("", "ranks that are here");
                if (world_size > 1) {
                  if (group.rank() == 0) own->abort("as in a test");
                  EXPECT_EQ(kind_of(sum), Kind::kCommunication);
                  EXPECT_EQ(kind_of(sum), Kind::kCommunication);
                  EXPECT_EQ(group.failures(), before + 1);
                  EXPECT_EQ(group.subgroup({group.rank()}, "own").failures(), before + 1);
                }
                // What is wrong with arguments is not.
                EXPECT_EQ(kind_of([&] { other->all_reduce_sum(at::zeros({3}), "numbers").wait(); }),
                          Kind::kOwn);
              },
              {.transport = kRealTransport});
  }
}

// Its next allocation on a thread that copies protected steps fails.
class FailingCopies : public c10::Allocator {
 public:
  FailingCopies() : under_(c10::GetAllocator(c10::kCPU)) {
    c10::SetAllocator(c10::kCPU, this, /*priority=*/1);
  }
  ~FailingCopies() override { c10::SetAllocator(c10::kCPU, under_, /*priority=*/1); }
  c10::DataPtr allocate(size_t bytes) override {
    std::array<char, 16> name{};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    if (std::string(name.data()) == "zero copies" && fails.exchange(false)) throw std::bad_alloc();
    return under_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return under_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    under_->copy_data(to, from, bytes);
  }

  std::atomic<bool> fails = false;

 private:
  c10::Allocator* const under_;
};

TEST(ErrorTypesTest, ACopyThatOneRankHasNoMemoryForIsACommunicationErrorOnTheOthersAlone) {
  for (const int world_size : {2, 3}) {
    FailingCopies copies;
    std::atomic<int> own = 0, of_communication = 0;
    run_ranks(
        world_size,
        [&](const Group& group) {
          Rank r(group, ZeroOptions().protect(1));
          r.train();
          if (group.rank() == 0) copies.fails = true;
          const Kind kind = kind_of([&] {
            for (int i = 0; i < 10; ++i) r.train();
          });
          if (kind == Kind::kOwn) ++own;
          if (kind == Kind::kCommunication) ++of_communication;
          // All that follows from it.
          EXPECT_EQ(kind_of([&] { r.optimizer->step(); }), kind);
        },
        with_timeout(std::chrono::seconds(10)));
    EXPECT_EQ(own, 1);
    EXPECT_EQ(of_communication, world_size - 1);
  }
}

// What it has changed cannot be taken back, and no step after it could be protected.
TEST(ErrorTypesTest, ACallThatCannotProtectWhatItHasChangedClosesTheOptimizer) {
  const std::string folder = ::testing::TempDir() + "/unprotected";
  const std::vector<std::function<void(Rank&)>> calls = {
      [&](Rank& r) { r.optimizer->load_checkpoint(folder); },
      [](Rank& r) {
        r.optimizer->resize_rows({{r.model->trunk->weight, at::arange(20), {}}});
      },
      [](Rank& r) { r.optimizer->freeze({r.model->scale}); },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    FailingCopies copies;
    std::latch done(2);
    run_ranks(
        2,
        [&](const Group& group) {
          Rank r(group, ZeroOptions().protect(100));
          if (i == 0) r.optimizer->save_checkpoint(folder, SaveOptions().overwrite(true));
          if (group.rank() == 1) copies.fails = true;
          EXPECT_EQ(kind_of([&] { calls[i](r); }), Kind::kOwn) << "call " << i;
          const std::string text = error_of([&] { r.optimizer->step(); });
          expect_words(text, {"expected a working optimizer", "out of memory"});
          done.arrive_and_wait();
        },
        with_timeout(std::chrono::seconds(10)));
  }
}

TEST(ErrorTypesTest, RecoverSaysAtOnceThatThereIsNothingToRecoverFrom) {
  on_each(
      [](Rank& r, bool different) {
        const auto recover = [&] { r.optimizer->recover(); };
        r.backward();
        EXPECT_EQ(kind_of([&] { r.optimizer->clip_grad_norm_(different ? -1.0 : 1.0); }),
                  Kind::kOwn);
        EXPECT_EQ(kind_of(recover), Kind::kOwn);
        expect_words(error_of(recover), {"recover(): expected a rank that ended", "got none"});
        // Nothing has changed.
        r.optimizer->step();
        r.train();
        EXPECT_EQ(r.optimizer->stats().steps, 3);
      },
      ZeroOptions().bucket_bytes(600).protect(1));
}

// The loop of docs/recovery.md. Returns how it ended.
struct Ending {
  Kind kind = Kind::kNone;
  int recoveries = 0;
  int64_t steps = 0;
};

Ending loop(Rank& r, int64_t steps, const std::function<void(int64_t step)>& before) {
  Ending ending;
  ending.kind = kind_of([&] {
    for (int64_t& step = ending.steps; step < steps;) {
      try {
        before(step);
        r.train();
        ++step;
      } catch (const CommunicationError&) {
        ++ending.recoveries;
        step = r.optimizer->recover().steps;
      }
    }
  });
  return ending;
}

TEST(RecoveryLoopTest, ABatchThatCannotBeComputedEndsItOnAllRanks) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      Rank r(group, ZeroOptions().protect(1));
      const Ending ending = loop(r, 10, [&](int64_t step) {
        if (step == 3) r.optimizer->backward(at::zeros({2}));
      });
      EXPECT_EQ(ending.kind, Kind::kOwn);
      EXPECT_EQ(ending.recoveries, 0);
      EXPECT_EQ(ending.steps, 3);
    });
  }
}

TEST(RecoveryLoopTest, AMisuseOfOneRankEndsItOnAllRanks) {
  for (const int world_size : {1, 2, 3}) {
    for (int different = 0; different < world_size; ++different) {
      run_ranks(world_size, [&](const Group& group) {
        Rank r(group, ZeroOptions().protect(1));
        const Ending ending = loop(r, 10, [&](int64_t step) {
          if (step == 3 && group.rank() == different) {
            r.optimizer->param_groups()[0].options().set_lr(0.5);
            r.model->trunk->weight.requires_grad_(false);
          }
        });
        EXPECT_EQ(ending.kind, Kind::kOwn);
        EXPECT_EQ(ending.recoveries, 0);
      });
    }
  }
}

TEST(RecoveryLoopTest, AnErrorOfOneRankAloneEndsItAndTheOthersGoOnWithoutIt) {
  for (const int world_size : {2, 3}) {
    const int different = 1;
    run_ranks(
        world_size,
        [&](const Group& group) {
          Rank r(group, ZeroOptions().protect(1));
          const Ending ending = loop(r, 6, [&](int64_t step) {
            if (step == 3 && group.rank() == different) throw std::runtime_error("out of data");
          });
          if (group.rank() == different) {
            EXPECT_EQ(ending.kind, Kind::kForeign);
            EXPECT_EQ(ending.steps, 3);
            return;
          }
          EXPECT_EQ(ending.kind, Kind::kNone);
          EXPECT_EQ(ending.recoveries, 1);
          EXPECT_EQ(r.optimizer->group().world_size(), world_size - 1);
        },
        with_timeout(std::chrono::seconds(10)));
  }
}

TEST(RecoveryLoopTest, AStoreThatIsLateInARecoveryDoesNotEndIt) {
  at_2_and_3_ranks([](int world_size) {
    const auto store = c10::make_intrusive<FrozenStore>();
    std::barrier together(world_size);
    run_ranks(world_size, [&](const Group& threads) {
      const Group group(store, threads.rank(), world_size, "job", gloo_factory(false), at::kCPU,
                        milliseconds(3000), Topology::of_equal_machines(world_size, world_size));
      Rank r(group, ZeroOptions().protect(1));
      for (int i = 0; i < 3; ++i) r.train();
      const auto own = group.make_communicator("own", Purpose::kControl);
      together.arrive_and_wait();
      store->freeze(true);
      own->abort("as in a test");
      std::string text;
      EXPECT_EQ(kind_of([&] {
                  try {
                    r.optimizer->recover();
                  } catch (const c10::Error& error) {
                    text = error.what_without_backtrace();
                    throw;
                  }
                }),
                Kind::kCommunication);
      expect_words(text, {"recover(): ", "the store", "did not answer"});
      EXPECT_EQ(kind_of([&] { r.backward(); }), Kind::kCommunication);
      together.arrive_and_wait();
      store->freeze(false);
      // As the loop of docs/recovery.md calls it again.
      EXPECT_EQ(r.optimizer->recover().members, group.global_ranks());
      r.train();
    });
  });
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 4); }
