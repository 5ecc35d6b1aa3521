// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptions::split_masters beside the same run with fp32 masters: masters and moments have equal
// bits, and working parameters differ in ties alone.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "bookkeeping/memory.h"
#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/state_snapshot.h"
#include "tests/support/training.h"
#include "zero/checkpoint.h"
#include "zero/lion.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// The third one is fp32, whose masters are in place anyway.
std::vector<at::Tensor> initial_values() {
  return {random_tensor({67, 130}, 1).to(at::kBFloat16), random_tensor({41}, 2).to(at::kBFloat16),
          random_tensor({300}, 3), random_tensor({4500}, 4).to(at::kBFloat16)};
}

// The second parameter has one in two of three steps.
std::vector<at::Tensor> gradients(int rank, int step) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& value : initial_values()) {
    result.push_back(random_tensor(
        value.sizes(), static_cast<uint64_t>(1000 * step + 100 * rank) + result.size()));
  }
  if (step % 3 == 1) result[1] = at::Tensor();
  return result;
}

enum class Class { kAdamW, kAdam, kSgd, kLion };

std::unique_ptr<torch::optim::Optimizer> inner_of(Class c, const std::vector<at::Tensor>& p) {
  using namespace torch::optim;
  switch (c) {
    case Class::kAdamW:
      return std::make_unique<AdamW>(p, AdamWOptions(0.01).weight_decay(0.1));
    case Class::kAdam:
      return std::make_unique<Adam>(p, AdamOptions(0.01).amsgrad(true));
    case Class::kSgd:
      return std::make_unique<SGD>(p, SGDOptions(0.01).momentum(0.9));
    case Class::kLion:
      return std::make_unique<Lion>(p, LionOptions(0.001));
  }
  return nullptr;
}

// The upper half of the bits of a master, as split masters round.
at::Tensor upper_half(const at::Tensor& master) {
  const at::Tensor bits = master.contiguous().view(at::kInt);
  return ((bits + 0x8000).bitwise_right_shift(16))
      .to(at::kShort)
      .view(at::kBFloat16)
      .view(master.sizes());
}

struct SplitRun {
  SplitRun(const Group& group, Class c, const ZeroOptions& options)
      : group(group),
        model(initial_values()),
        optimizer(std::make_unique<ZeroOptimizer>(model, inner_of(c, model.parameters()), group,
                                                  options)) {}
  void step(int number) {
    optimizer->backward(model.loss(gradients(group.rank(), number)));
    optimizer->clip_grad_norm_(10.0);
    optimizer->step();
  }
  std::vector<at::Tensor> masters() {
    std::vector<at::Tensor> result;
    for (const at::Tensor& p : model.values) result.push_back(optimizer->master(p));
    return result;
  }
  std::vector<at::Tensor> working() const {
    std::vector<at::Tensor> result;
    for (const at::Tensor& p : model.values) result.push_back(p.detach().clone());
    return result;
  }

  const Group& group;
  GivenGradients model;
  std::unique_ptr<ZeroOptimizer> optimizer;
};

// Every bit of a run that this class can read: masters, and working values as they follow.
void expect_same(SplitRun& split, SplitRun& whole, const std::string& when) {
  const auto masters = split.masters();
  EXPECT_TRUE(same_bits(masters, whole.masters())) << when;
  const auto working = split.working();
  for (size_t p = 0; p < masters.size(); ++p) {
    const bool is_split = working[p].scalar_type() == at::kBFloat16;
    EXPECT_TRUE(at::equal(working[p], is_split ? upper_half(masters[p]) : masters[p]))
        << when << " parameter " << p;
  }
}

ZeroOptions small_buckets() { return ZeroOptions().bucket_bytes(4096); }
ZeroOptions split(ZeroOptions options) { return options.split_masters(true); }

class SplitMastersAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, SplitMastersAt, ::testing::Values(1, 2, 3, 4));

TEST_P(SplitMastersAt, HaveTheBitsOfThoseInFp32) {
  struct Case {
    Class inner;
    ZeroOptions options;
  };
  const Case cases[] = {
      {Class::kAdamW, small_buckets()},
      {Class::kAdamW, ZeroOptions().stage(1).moments(Moments::kInt8)},
      {Class::kAdam, small_buckets().layout(Layout::kWholeParameters)},
      {Class::kSgd, small_buckets().moments(Moments::kBFloat16).overlap_gather(true)},
      {Class::kLion, small_buckets().moments(Moments::kInt8).ema(EmaOptions().decay(0.8))},
  };
  run_ranks(GetParam(), [&](const Group& group) {
    for (const Case& c : cases) {
      // All at two ranks, and in turns at the other numbers.
      if (GetParam() != 2 && (&c - cases + GetParam()) % 2 == 0) continue;
      SCOPED_TRACE(::testing::Message() << "case " << &c - cases);
      SplitRun in_halves(group, c.inner, split(c.options)), whole(group, c.inner, c.options);
      for (int n = 0; n < 4; ++n) {
        in_halves.step(n);
        whole.step(n);
        expect_same(in_halves, whole, "step " + std::to_string(n));
        if (!c.options.ema()) continue;
        const auto before = in_halves.working();
        {
          const auto a = in_halves.optimizer->use_ema(), b = whole.optimizer->use_ema();
          EXPECT_TRUE(same_bits(in_halves.working(), whole.working())) << n;
        }
        EXPECT_TRUE(same_bits(in_halves.working(), before)) << n;
      }
      in_halves.optimizer->check_replicas();
    }
  });
}

TEST_P(SplitMastersAt, TakeTwoBytes) {
  run_ranks(GetParam(), [&](const Group& group) {
    SplitRun run(group, Class::kAdamW, split(small_buckets()));
    run.step(0);
    MemoryOptions expected;
    expected.split_masters = true;
    const MemoryReport report = expected_memory(run.optimizer->plan(), group.rank(), expected);
    EXPECT_EQ(run.optimizer->memory().master_parameters, report.master_parameters);
    expected.split_masters = false;
    EXPECT_EQ(2 * report.master_parameters,
              expected_memory(run.optimizer->plan(), group.rank(), expected).master_parameters);
    // What has no memory cannot be read by mistake.
    const at::Tensor& master = run.optimizer->inner().param_groups()[0].params()[0];
    if (master.numel() != 300) {
      expect_words(error_of([&] { master.sum(); }),
                   {"expected master(parameter)", "split_masters(true)"});
    }
  });
}

// Halves and fp32 masters load what the other has saved, on other ranks and layouts.
TEST(SplitMastersTest, GoOnFromACheckpointOfEitherForm) {
  const std::string folder = ::testing::TempDir() + "split";
  for (const bool saved_split : {false, true}) {
    for (const auto& [saved_by, loaded_by] :
         {saved_split ? std::pair(2, 3) : std::pair(1, 4), {3, 1}}) {
      std::filesystem::remove_all(folder);
      std::vector<at::Tensor> saved;
      run_ranks(saved_by, [&](const Group& group) {
        SplitRun run(group, Class::kAdamW, saved_split ? split(small_buckets()) : small_buckets());
        for (int n = 0; n < 3; ++n) run.step(n);
        run.optimizer->save_checkpoint(folder);
        const auto masters = run.masters();
        if (group.rank() == 0) saved = masters;
      });
      run_ranks(loaded_by, [&](const Group& group) {
        SplitRun in_halves(group, Class::kAdamW, split(ZeroOptions().bucket_bytes(9000))),
            whole(group, Class::kAdamW, small_buckets().layout(Layout::kPerParameter));
        in_halves.optimizer->load_checkpoint(folder);
        whole.optimizer->load_checkpoint(folder);
        EXPECT_TRUE(same_bits(in_halves.masters(), saved));
        for (int n = 3; n < 6; ++n) {
          in_halves.optimizer->backward(in_halves.model.loss(gradients(group.rank(), n)));
          in_halves.optimizer->step();
          whole.optimizer->backward(whole.model.loss(gradients(group.rank(), n)));
          whole.optimizer->step();
          expect_same(in_halves, whole, "step " + std::to_string(n));
        }
      });
    }
  }
}

TEST(SplitMastersTest, AnAsynchronousSaveHasTheMastersOfItsStep) {
  const std::string folder = ::testing::TempDir() + "split_async";
  std::filesystem::remove_all(folder);
  run_ranks(2, [&](const Group& group) {
    SplitRun run(group, Class::kAdamW, split(small_buckets()));
    for (int n = 0; n < 3; ++n) run.step(n);
    const auto masters = run.masters();
    const auto pending = run.optimizer->save_checkpoint_async(folder);
    for (int n = 3; n < 6; ++n) run.step(n);
    pending->finish();
    SplitRun again(group, Class::kAdamW, split(small_buckets()));
    again.optimizer->load_checkpoint(folder);
    EXPECT_TRUE(same_bits(again.masters(), masters));
  });
}

TEST(SplitMastersTest, StayWhereParametersChange) {
  run_ranks(3, [&](const Group& group) {
    SplitRun in_halves(group, Class::kAdamW, split(small_buckets())),
        whole(group, Class::kAdamW, small_buckets());
    const auto both = [&](const auto& call) {
      call(in_halves);
      call(whole);
    };
    for (int n = 0; n < 3; ++n) both([&](SplitRun& run) { run.step(n); });
    both([&](SplitRun& run) { run.optimizer->freeze({run.model.values[1]}); });
    for (int n = 3; n < 5; ++n) {
      both([&](SplitRun& run) {
        auto given = gradients(group.rank(), n);
        given[1] = at::Tensor();
        run.optimizer->backward(run.model.loss(given));
        run.optimizer->step();
      });
      for (const size_t p : {size_t{0}, size_t{3}}) {
        EXPECT_TRUE(at::equal(in_halves.optimizer->master(in_halves.model.values[p]),
                              whole.optimizer->master(whole.model.values[p])))
            << n << " " << p;
      }
    }
    both([&](SplitRun& run) { run.optimizer->unfreeze({run.model.values[1]}); });
    for (int n = 5; n < 7; ++n) both([&](SplitRun& run) { run.step(n); });
    for (size_t p = 0; p < 4; ++p) {
      EXPECT_TRUE(at::equal(in_halves.optimizer->master(in_halves.model.values[p]),
                            whole.optimizer->master(whole.model.values[p])))
          << p;
    }
  });
}

TEST(SplitMastersTest, StayInRowsThatAreKept) {
  run_ranks(2, [&](const Group& group) {
    SplitRun in_halves(group, Class::kAdamW, split(small_buckets())),
        whole(group, Class::kAdamW, small_buckets());
    at::Tensor rows = at::arange(60, at::kLong);  // seven go, and one is there twice
    rows[5] = 6;
    for (SplitRun* run : {&in_halves, &whole}) {
      for (int n = 0; n < 3; ++n) run->step(n);
      const at::Tensor before = run->optimizer->master(run->model.values[0]);
      run->optimizer->resize_rows({{run->model.values[0], rows}});
      const at::Tensor after = run->optimizer->master(run->model.values[0]);
      EXPECT_TRUE(at::equal(after.narrow(0, 0, 5), before.narrow(0, 0, 5)));
      EXPECT_TRUE(at::equal(after.narrow(0, 6, 54), before.narrow(0, 6, 54)));
    }
    EXPECT_TRUE(at::equal(in_halves.optimizer->master(in_halves.model.values[0]),
                          whole.optimizer->master(whole.model.values[0])));
    in_halves.optimizer->check_replicas();
  });
}

// 1 + 2^-8 is a tie, which torch's cast rounds to 1 and halves round to 1 + 2^-7.
TEST(SplitMastersTest, TiesStayInRowsThatAreKept) {
  run_ranks(2, [&](const Group& group) {
    GivenGradients model({at::ones({64, 40}, at::kBFloat16)});
    const at::Tensor& p = model.values[0];
    ZeroOptimizer optimizer(
        model, std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(1)),
        group, split(small_buckets()));
    optimizer.backward(model.loss({at::full({64, 40}, -1.0 / 256)}));
    optimizer.step();
    optimizer.resize_rows({{p, at::arange(60, at::kLong)}});
    EXPECT_TRUE(at::equal(optimizer.master(p), at::full({60, 40}, 1 + 1.0 / 256)));
    EXPECT_TRUE(at::equal(p.detach().to(at::kFloat), at::full({60, 40}, 1 + 1.0 / 128)));
  });
}

// A value that a program writes is the master from then on, as with fp32 parameters.
TEST(SplitMastersTest, TakeWhatAProgramWrites) {
  run_ranks(2, [&](const Group& group) {
    SplitRun run(group, Class::kSgd, split(small_buckets()));
    run.step(0);
    {
      const at::NoGradGuard no_grad;
      run.model.values[0].fill_(2.0);
    }
    run.optimizer->refresh_master_parameters();
    EXPECT_TRUE(at::equal(run.optimizer->master(run.model.values[0]), at::full({67, 130}, 2.0)));
    run.optimizer->check_replicas();
    // Another storage does not stay.
    const auto working = run.working();
    run.model.values[3].set_data(at::zeros({4500}, at::kBFloat16));
    run.optimizer->refresh_working_parameters();
    EXPECT_TRUE(same_bits(run.working(), working));
  });
}

TEST(SplitMastersTest, AreRefusedWhereTheyCannotBe) {
  run_ranks(2, [&](const Group& group) {
    const auto refusal = [&](std::vector<at::Tensor> values, ZeroOptions options,
                             bool rmsprop = false) {
      GivenGradients model(values);
      std::unique_ptr<torch::optim::Optimizer> inner = inner_of(Class::kAdamW, model.parameters());
      if (rmsprop) inner = std::make_unique<torch::optim::RMSprop>(model.parameters(), 0.1);
      return error_of(
          [&] { ZeroOptimizer(model, std::move(inner), group, options.split_masters(true)); });
    };
    const at::Tensor fp32 = at::ones({10});
    // As a pipeline stage may have, and what freeze() may leave.
    EXPECT_EQ(refusal({fp32}, {}), "");
    expect_words(refusal({fp32.to(at::kBFloat16), fp32.to(at::kHalf)}, {}),
                 {"split_masters: expected bfloat16 parameters", "value1 of half"});
    expect_words(refusal({fp32.to(at::kBFloat16)}, ZeroOptions().layout(Layout::kPerParameter)),
                 {"split_masters", "value0", "kPerParameter"});
    expect_words(refusal({fp32.to(at::kBFloat16)}, ZeroOptions().fused(false)),
                 {"split_masters", "a fused kernel for parameter value0"});
    expect_words(refusal({fp32.to(at::kBFloat16)}, {}, /*rmsprop=*/true),
                 {"split_masters", "a fused kernel for parameter value0"});
  });
}

}  // namespace
}  // namespace zero
