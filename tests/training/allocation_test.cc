// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Once everything has been used, clipping and stepping allocate no memory that grows with the
// model: only the few words of messages. And where there is none, whichever allocation fails,
// every rank has an error at once, or the steps that it goes on to make are the right ones.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/base/error_text.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// Of the thread that allocates, since ranks are threads.
thread_local int64_t largest_allocation = 0;
thread_local bool is_rank = false;
thread_local bool throws_bad_alloc = false;  // as other allocators do
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
// How many allocations succeed before one fails: of this thread, and of all that are no ranks.
thread_local int64_t until_failure = kNever;
std::atomic<int64_t> until_failure_elsewhere{kNever};

class WatchedAllocator final : public c10::Allocator {
 public:
  explicit WatchedAllocator(c10::Allocator& real) : real_(real) {}
  c10::DataPtr allocate(size_t bytes) override {
    largest_allocation = std::max(largest_allocation, static_cast<int64_t>(bytes));
    const int64_t left = is_rank ? until_failure-- : until_failure_elsewhere--;
    if (left == 0 && throws_bad_alloc) throw std::bad_alloc();
    // The error is libtorch's own, which is no c10::OutOfMemoryError.
    constexpr size_t kMoreThanThereIs = size_t{1} << 60;
    return real_.allocate(left != 0 ? bytes : kMoreThanThereIs);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real_.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    real_.copy_data(to, from, bytes);
  }

 private:
  c10::Allocator& real_;
};

void watch_allocations() {
  static WatchedAllocator watched(*c10::GetCPUAllocator());
  c10::SetCPUAllocator(&watched, /*priority=*/255);
}

// A control message has 56 bytes, and each rank receives those of all.
constexpr int64_t kMessage = 1024;

TEST(AllocationTest, ClippingAndSteppingAllocateNothingThatGrows) {
  watch_allocations();
  for (int world_size : {1, 2, 3}) {
    for (Inner inner : {Inner::kAdamW, Inner::kSgdMomentum}) {
      for (auto dtype : {at::kFloat, at::kBFloat16}) {
        run_ranks(world_size,
                  [&](const Group& group) {
                    OddModel model(1, 300);
                    model->to(dtype);
                    ZeroOptimizer optimizer(*model, make_inner(inner, *model), group,
                                            ZeroOptions().bucket_bytes(20000));
                    for (int step = 0; step < 4; ++step) {
                      optimizer.backward(model->loss(random_tensor({3, 17}, group.rank()).to(dtype),
                                                     random_tensor({3, 11}, 9).to(dtype),
                                                     OddModelImpl::kAll));
                      optimizer.reduce_gradients();
                      largest_allocation = 0;
                      optimizer.clip_grad_norm_(1.0);
                      optimizer.step();
                      if (step == 0) {
                        EXPECT_GT(largest_allocation, kMessage) << "the first step makes the state";
                      } else {
                        EXPECT_LE(largest_allocation, kMessage) << "step " << step;
                      }
                    }
                  },
                  {.transport = kRealTransport});
      }
    }
  }
}

// What a rank made of an allocation that failed, of itself or another.
struct Outcome {
  std::vector<at::Tensor> parameters;  // after the last step; none where the optimizer failed
  std::vector<std::string> errors;
  int64_t allocations = 0;  // of the rank
};

// Two steps of a trainer that catches errors: it drops the gradients, and makes the step again.
Outcome train(const Group& group, const ZeroOptions& options, at::ScalarType dtype, int64_t fails) {
  constexpr int kSteps = 2;
  Outcome outcome;
  is_rank = true;
  OddModel model(1, 40);
  model->to(dtype);
  ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group, options);
  const at::Tensor x = random_tensor({3, 17}, group.rank()).to(dtype);
  const at::Tensor target = random_tensor({3, 11}, 9).to(dtype);
  until_failure = fails;
  int steps = 0;
  for (int tries = 0; steps < kSteps && tries < kSteps + 3; ++tries) {
    try {
      const bool drops = steps == 1 && group.rank() == 0;
      optimizer.backward(model->loss(x, target, drops ? OddModelImpl::kLeft : OddModelImpl::kAll));
      if (!options.update_in_backward()) optimizer.clip_grad_norm_(1.0);
      optimizer.step();
      ++steps;
    } catch (const c10::Error& error) {
      outcome.errors.emplace_back(error.what_without_backtrace());
      try {
        optimizer.zero_grad();
      } catch (const c10::Error& failed) {
        outcome.errors.emplace_back(failed.what_without_backtrace());
        break;
      }
    }
  }
  outcome.allocations = fails - until_failure;
  until_failure = kNever;
  if (steps < kSteps) return outcome;
  try {
    optimizer.wait_for(*model);
    for (const at::Tensor& p : model->parameters())
      outcome.parameters.push_back(p.detach().clone());
  } catch (const c10::Error& error) {
    outcome.errors.emplace_back(error.what_without_backtrace());
  }
  return outcome;
}

// No rank has waited in vain.
void expect_at_once(const std::string& error) {
  for (const char* words : {"timeout", "waited"}) {
    EXPECT_EQ(error.find(words), std::string::npos) << error;
  }
}

struct Case {
  std::string name;
  ZeroOptions options;
  at::ScalarType dtype = at::kFloat;
};

bool is_long() { return std::getenv("ZERO_COMBINATIONS") != nullptr; }

class NoMemory : public ::testing::TestWithParam<Case> {
 protected:
  // Of both ranks.
  std::vector<Outcome> train_both(int64_t fails, int64_t fails_elsewhere) {
    std::vector<Outcome> outcomes(2);
    until_failure_elsewhere = fails_elsewhere;
    run_ranks(2, [&](const Group& group) {
      const bool first = group.rank() == 0;
      outcomes[group.rank()] =
          train(group, GetParam().options, GetParam().dtype, first ? kNever : fails);
    });
    left_elsewhere_ = until_failure_elsewhere.exchange(kNever);
    return outcomes;
  }

  int64_t left_elsewhere_ = 0;

  void expect_error_or_steps(const std::vector<Outcome>& found, const std::vector<Outcome>& right) {
    for (size_t rank = 0; rank < 2; ++rank) {
      const auto& [parameters, errors, allocations] = found[rank];
      for (const std::string& error : errors) {
        expect_at_once(error);
      }
      if (parameters.empty()) {
        EXPECT_FALSE(errors.empty()) << "rank " << rank;
        continue;
      }
      for (size_t p = 0; p < parameters.size(); ++p) {
        EXPECT_TRUE(at::equal(parameters[p], right[rank].parameters[p]))
            << "rank " << rank << ", parameter " << p << " after "
            << (errors.empty() ? "no error" : errors.front());
      }
    }
  }
};

TEST_P(NoMemory, EveryRankHasAnErrorOrGoesOnRight) {
  watch_allocations();
  const std::vector<Outcome> right = train_both(kNever, kNever);
  ASSERT_FALSE(right[0].parameters.empty());
  // What the options have in common is seen without them. The long test has all.
  const int64_t stride = is_long() ? 1 : GetParam().name == "stage_2" ? 3 : 6;
  const int64_t offset = static_cast<int64_t>(GetParam().name.size()) % stride;
  for (int64_t n = offset; n < right[1].allocations; n += stride) {
    SCOPED_TRACE(c10::str("allocation ", n, " of rank 1 fails"));
    expect_error_or_steps(train_both(n, kNever), right);
    if (HasFailure()) return;
  }
}

class NoMemoryElsewhere : public NoMemory {};

TEST_P(NoMemoryElsewhere, AThreadOfTheLibraryPassesItOn) {
  watch_allocations();
  const std::vector<Outcome> right = train_both(kNever, kNever);
  int64_t failed = 0;
  do {
    SCOPED_TRACE(c10::str("allocation ", failed, " of other threads fails"));
    expect_error_or_steps(train_both(kNever, failed), right);
  } while (!HasFailure() && left_elsewhere_ < 0 && ++failed > 0);
  EXPECT_GT(failed, 0);
}

// Every allocation of the last rank's constructor fails once. Nothing but c10::Error is thrown, on
// any rank.
void fail_each_allocation(int world_size) {
  constexpr std::chrono::seconds kTimeout{5};
  int failing = 0, told = 0, waited = 0;
  for (bool failed = true; failed; ++failing) {
    failed = false;
    std::vector<std::string> errors(world_size);  // by rank
    const auto start = std::chrono::steady_clock::now();
    run_ranks(world_size,
              [&](const Group& group) {
                const bool last = group.rank() == world_size - 1;
                is_rank = throws_bad_alloc = true;
                OddModel model(1);
                auto inner = make_inner(Inner::kAdamW, *model);
                std::unique_ptr<ZeroOptimizer> optimizer;
                if (last) until_failure = failing;
                const auto end = [&] {
                  if (last) failed = failed || std::exchange(until_failure, kNever) < 0;
                };
                errors[group.rank()] = error_of([&] {
                  optimizer = std::make_unique<ZeroOptimizer>(*model, std::move(inner), group);
                  end();
                  // The last rank may fail after the others have made theirs.
                  optimizer->check_replicas();
                });
                end();
              },
              {.transport = Transport::kGloo, .timeout = kTimeout});
    SCOPED_TRACE(c10::str("allocation ", failing, " of ", world_size, " ranks"));
    bool all_know = failed;
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(errors[rank].empty(), !failed);
      if (failed) expect_words(errors[rank], {"rank " + std::to_string(rank)});
      all_know = all_know && errors[rank].find("out of memory") != std::string::npos;
    }
    told += all_know;
    waited += std::chrono::steady_clock::now() - start >= kTimeout;
  }
  EXPECT_GE(failing, 4) << "the constructor allocates more";
  EXPECT_GE(told, failing / 3) << "many errors give the reason on all ranks";
  EXPECT_LE(waited, 1) << "between the check and the next communicator nothing is connected";
}

// All at once: one allocation of each is a timeout.
TEST(NoMemoryToConstruct, AFailedAllocationIsAnErrorOnAllRanks) {
  watch_allocations();
  std::vector<std::future<void>> all;
  for (const int world_size : {1, 2, 3}) {
    all.push_back(std::async(std::launch::async, fail_each_allocation, world_size));
  }
  for (std::future<void>& one : all) one.get();
}

// Its sums are converted, on a thread of the library.
const Case kSmallState = {"small_state",
                          ZeroOptions()
                              .bucket_bytes(4000)
                              .moments(Moments::kInt8)
                              .split_masters(true)
                              .gradient_shard_dtype(at::kBFloat16),
                          at::kBFloat16};

INSTANTIATE_TEST_SUITE_P(Options, NoMemoryElsewhere, ::testing::Values(kSmallState),
                         [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Options, NoMemory,
    ::testing::Values(
        Case{"stage_2", ZeroOptions().bucket_bytes(4000)},
        Case{"stage_1", ZeroOptions().stage(1).bucket_bytes(4000)}, kSmallState,
        Case{"update_in_backward",
             ZeroOptions().bucket_bytes(4000).update_in_backward(true).skip_nonfinite(false)},
        Case{"overlap_gather", ZeroOptions().bucket_bytes(4000).overlap_gather(true)},
        Case{"protect", ZeroOptions().bucket_bytes(4000).protect(1)}),
    [](const auto& test) { return test.param.name; });

// A backward pass of which this rank leaves layers out, so that their buckets are opened at its
// end, and in which an allocation fails; then what the error asks for, and the batch again.
Outcome repeat_batch(const Group& group, int64_t fails) {
  Outcome outcome;
  is_rank = true;
  OddModel model(1, 40);
  ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                          ZeroOptions().bucket_bytes(4000));
  const auto loss = [&](unsigned parts) {
    return model->loss(random_tensor({3, 17}, group.rank()), random_tensor({3, 11}, 9), parts);
  };
  const auto run = [&](const std::function<void()>& call) {
    try {
      call();
    } catch (const c10::Error& error) {
      outcome.errors.emplace_back(error.what_without_backtrace());
    }
  };
  const at::Tensor dropping = loss(OddModelImpl::kLeft);
  until_failure = fails;
  run([&] { optimizer.backward(dropping); });
  outcome.allocations = fails - until_failure;
  until_failure = kNever;
  if (fails != kNever) run([&] { optimizer.step(); });
  if (fails != kNever && outcome.errors.empty()) return outcome;  // no rank's pass has failed
  run([&] { optimizer.zero_grad(); });
  run([&] { optimizer.backward(loss(OddModelImpl::kAll)); });
  run([&] { optimizer.step(); });
  for (const at::Tensor& p : model->parameters()) outcome.parameters.push_back(p.detach().clone());
  return outcome;
}

// Where other ranks have sent a bucket, this one still has to.
TEST(AllocationTest, AfterAPassWithoutMemoryTheBatchCanBeRepeated) {
  watch_allocations();
  int64_t allocations = 1, repeated = 0;
  std::vector<at::Tensor> right;
  for (int64_t n = -1; n < allocations && !HasFailure(); ++n) {
    SCOPED_TRACE(c10::str("allocation ", n, " of rank 1 fails"));
    std::vector<Outcome> found(2);
    run_ranks(2, [&](const Group& group) {
      // The other rank has none that fails.
      const int64_t fails = n < 0 ? kNever : group.rank() == 1 ? n : kNever - 1;
      found[group.rank()] = repeat_batch(group, fails);
    });
    if (n < 0) allocations = found[1].allocations;
    if (n < 0) right = found[1].parameters;
    if (n >= 0 && found[1].errors.empty()) continue;  // it made fewer this time
    // An exchange that was begun cannot be taken back.
    const bool can_repeat =
        n < 0 || found[0].errors.at(0).find("call zero_grad() on all ranks") != std::string::npos;
    for (const Outcome& outcome : found) {
      for (const std::string& error : outcome.errors) expect_at_once(error);
      if (!can_repeat) continue;
      // Of the pass and of step(), and none after zero_grad().
      EXPECT_LE(outcome.errors.size(), 2U) << outcome.errors.back();
      for (size_t p = 0; p < right.size(); ++p) {
        EXPECT_TRUE(at::equal(outcome.parameters.at(p), right[p])) << "parameter " << p;
      }
    }
    repeated += can_repeat;
  }
  EXPECT_GT(repeated, 4);
}

struct OtherCall {
  std::string name;
  bool twice;  // it is one collective call, which ranks with an error can make again
  // `folder` has a checkpoint in "before".
  std::function<void(ZeroOptimizer&, OddModelImpl&, const std::string& folder)> make;
};

// The end of a rank's calls, where its optimizer lives until the others have come there, too.
class Meeting {
 public:
  explicit Meeting(std::barrier<>& all) : all_(&all) {}
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  ~Meeting() {
    if (all_ != nullptr) all_->arrive_and_drop();
  }
  void meet() { std::exchange(all_, nullptr)->arrive_and_wait(); }

 private:
  std::barrier<>* all_;
};

class NoMemoryBeside : public ::testing::TestWithParam<OtherCall> {};

// A call beside a step, which may leave the optimizer usable or not.
TEST_P(NoMemoryBeside, NoRankWaitsInVain) {
  watch_allocations();
  const std::string folder = fresh_folder("no_memory_" + GetParam().name);
  int64_t allocations = 1;
  // First without a failure. Calls that make hundreds of allocations make most of them in a loop.
  // Over sockets a run takes most of its time to connect.
  const bool over_sockets = GetParam().name == "freeze";
  const auto stride = [&] { return is_long() ? 1 : over_sockets ? 5 : allocations < 40 ? 1 : 3; };
  for (int64_t n = -1; n < allocations; n += n < 0 ? 1 : stride()) {
    SCOPED_TRACE(c10::str("allocation ", n, " of rank 1 fails"));
    const std::string own = folder + "/" + std::to_string(n);
    std::filesystem::create_directories(own);
    std::barrier sync(2);
    run_ranks(2,
              [&](const Group& group) {
                is_rank = true;
                Meeting end(sync);
                OddModel model(1, 40);
                ZeroOptimizer optimizer(
                    *model, make_inner(Inner::kAdamW, *model), group,
                    ZeroOptions().bucket_bytes(4000).stage(1).ema(EmaOptions()));
                const auto backward = [&] {
                  optimizer.backward(model->loss(random_tensor({3, 17}, group.rank()),
                                                 random_tensor({3, 11}, 9), OddModelImpl::kAll));
                };
                backward();
                optimizer.step();
                optimizer.save_checkpoint(own + "/before");
                if (GetParam().name == "gradient") backward();
                const int64_t fails = n < 0 || group.rank() == 0 ? kNever : n;
                until_failure = fails;
                std::string error, second;
                try {
                  GetParam().make(optimizer, *model, own);
                } catch (const std::exception& thrown) {
                  error = error_text(thrown);
                }
                if (n < 0 && group.rank() == 1) allocations = fails - until_failure;
                until_failure = kNever;
                if (!error.empty() && GetParam().twice) {
                  try {
                    GetParam().make(optimizer, *model, own);
                  } catch (const std::exception& thrown) {
                    second = error_text(thrown);
                  }
                }
                if (GetParam().twice) end.meet();
                // A rank that connects sees no connection end. It waits for its timeout, and says
                // what the other one has reported.
                const bool connects = over_sockets && error.find("connect") != std::string::npos;
                if (connects && group.rank() == 0) {
                  EXPECT_NE(error.find("rank 1 had reported: "), std::string::npos) << error;
                  EXPECT_NE(error.find("allocate memory"), std::string::npos) << error;
                } else {
                  expect_at_once(error);
                  expect_at_once(second);
                }
                EXPECT_TRUE(n >= 0 || error.empty()) << error;
              },
              {.transport = over_sockets ? kRealTransport : Transport::kMemory,
               .timeout = std::chrono::seconds(over_sockets && is_long() ? 5 : 30)});
    if (HasFailure()) return;
    std::filesystem::remove_all(own);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, NoMemoryBeside,
    ::testing::Values(
        OtherCall{"save", true,
                  [](auto& o, auto&, const auto& f) { o.save_checkpoint(f + "/after"); }},
        OtherCall{
            "save_async", false,
            [](auto& o, auto&, const auto& f) { o.save_checkpoint_async(f + "/after")->finish(); }},
        OtherCall{"load", true,
                  [](auto& o, auto&, const auto& f) { o.load_checkpoint(f + "/before"); }},
        OtherCall{"use_ema", false, [](auto& o, auto&, const auto&) { o.use_ema().end(); }},
        OtherCall{"gradient", true,
                  [](auto& o, auto& m, const auto&) { o.gradient(m.trunk->weight); }},
        OtherCall{"master", true, [](auto& o, auto& m, const auto&) { o.master(m.trunk->weight); }},
        OtherCall{"freeze", true,
                  [](auto& o, auto& m, const auto&) { o.freeze({m.trunk->weight}); }},
        OtherCall{"refresh_masters", true,
                  [](auto& o, auto&, const auto&) { o.refresh_master_parameters(); }},
        OtherCall{"refresh_working", true,
                  [](auto& o, auto&, const auto&) { o.refresh_working_parameters(); }},
        OtherCall{"broadcast_buffers", true,
                  [](auto& o, auto&, const auto&) { o.broadcast_buffers(); }},
        OtherCall{"check_replicas", true, [](auto& o, auto&, const auto&) { o.check_replicas(); }}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 2); }
