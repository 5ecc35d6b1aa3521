// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Optimizers that look at whole parameters, and every optimizer in the layout that keeps parameters
// whole, beside plain torch in one process: the same bits after every step.
#include <c10/util/accumulate.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bookkeeping/whole_parameters.h"
#include "tests/support/error_of.h"
#include "tests/support/training.h"
#include "zero/adafactor.h"
#include "zero/base/message_probe.h"
#include "zero/combined_optimizer.h"
#include "zero/lamb.h"
#include "zero/muon.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr Inner kOfWholeParameters[] = {Inner::kMuon, Inner::kLamb, Inner::kAdafactor};
constexpr Inner kAndMuonInFp32[] = {Inner::kMuonFp32, Inner::kMuon, Inner::kLamb,
                                    Inner::kAdafactor};

// With the optimizers' own step(), which rounds as plain torch does.
Training whole(Inner inner, int world_size) {
  Training t;
  t.inner = inner;
  t.world_size = world_size;
  t.reference_in_fp32 = true;
  t.options.layout(Layout::kWholeParameters).fused(false).bucket_bytes(2000);
  return t;
}

void expect_same_bits(const Training& t) {
  EXPECT_EQ(differing_elements(train_on_ranks(t), train_reference(t)), 0)
      << "inner " << static_cast<int>(t.inner) << " W " << t.world_size << " stage "
      << t.options.stage();
}

// The limit of largest_difference() between two runs whose fp32 values differ in last bits, which
// is `fp32` for optimizers without other roundings. In Muon's default, last bits decide how a value
// is rounded to bf16, to within 2^-8 of it. An element is about 1 / sqrt(m * n) in the normalised
// matrix, and ns_steps iterations multiply its error by up to a^ns_steps in the direction of a
// small singular value, which gradients of few examples have. A parameter moves by lr times the
// result.
double limit_of(const Training& t, double fp32) {
  if (t.inner != Inner::kMuon) return fp32;
  const MuonOptions muon(0.02);  // as in make_inner()
  const double growth = std::pow(std::get<0>(muon.ns_coefficients()), muon.ns_steps());
  const double element = 1 / std::sqrt(11.0 * static_cast<double>(t.width));
  return t.steps * muon.lr() * growth * element * 0x1p-8;
}

TEST(WholeParameterTrainingTest, TwentyStepsHaveTheBitsOfOneProcess) {
  for (const Inner inner : {Inner::kMuon, Inner::kLamb, Inner::kAdafactor, Inner::kAdamW,
                            Inner::kSgd, Inner::kSgdMomentum}) {
    // Each class at two numbers of ranks, and in both stages.
    for (const int world_size : {1, 2, 3, 4}) {
      if ((static_cast<int>(inner) + world_size) % 2 == 0) continue;
      Training t = whole(inner, world_size);
      t.steps = 20;
      t.options.stage(world_size < 3 ? 1 : 2).overlap_gather(world_size > 2);
      expect_same_bits(t);
    }
  }
}

// Muon's groups are whole and AdamW's are cut, in fp32 and in the layout that copies.
TEST(WholeParameterTrainingTest, LayoutsMayDifferByGroup) {
  for (const int world_size : {2, 3}) {
    for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
      Training t = whole(Inner::kMuon, world_size);
      t.options.layout(layout);
      expect_same_bits(t);
      t.options.stage(1).bucket_bytes(0);
      expect_same_bits(t);
      t.inner = Inner::kSgdMomentum;
      t.options.layout(1, Layout::kWholeParameters);
      expect_same_bits(t);
    }
  }
}

TEST(WholeParameterTrainingTest, MicroBatchesAreAddedUpBeforeTheUpdate) {
  for (const Inner inner : kAndMuonInFp32) {
    for (const bool no_sync : {false, true}) {
      Training t = whole(inner, 2);
      t.micro_batches = 3;
      t.no_sync = no_sync;
      // Sums of three passes over two ranks have another order than the reference's.
      EXPECT_LT(largest_difference(train_on_ranks(t), train_reference(t)), limit_of(t, 1e-4))
          << static_cast<int>(inner) << no_sync;
    }
  }
}

TEST(WholeParameterTrainingTest, LayersThatARankOrAllRanksDrop) {
  for (const Inner inner : kOfWholeParameters) {
    for (const int world_size : {2, 3}) {
      Training t = whole(inner, world_size);
      t.steps = 8;
      t.use = [](int rank, int step, int) -> unsigned {
        if (step == 3) return 0;                    // no layer on any rank
        if (step == 5) return OddModelImpl::kLeft;  // all drop the rest
        return (rank + step) % 2 == 0 ? OddModelImpl::kAll : OddModelImpl::kTrunk;
      };
      expect_same_bits(t);
      t.options.stage(1);
      expect_same_bits(t);
    }
  }
}

// The fused kernel of AdamW's groups beside the own step() of Muon's. The two differ by rounding.
TEST(WholeParameterTrainingTest, FusedGroupsBesideOthers) {
  for (const Inner inner : {Inner::kMuon, Inner::kMuonFp32}) {
    for (const int world_size : {1, 2, 4}) {
      for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        Training t = whole(inner, world_size);
        t.dtype = dtype;
        const double limit = dtype == at::kBFloat16 ? 2e-2 : limit_of(t, 1e-5);
        const Trajectory plain = train_on_ranks(t);
        t.options.fused(true);
        EXPECT_LT(largest_difference(train_on_ranks(t), plain), limit) << world_size;
        t.options.layout(Layout::kContiguous);
        EXPECT_LT(largest_difference(train_on_ranks(t), plain), limit) << world_size;
      }
    }
  }
}

// The order of what this rank does in a step.
thread_local std::vector<std::string> events;

// A class that has no fused kernel.
class Spy : public torch::optim::SGD {
 public:
  using SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    events.emplace_back("step");
    return SGD::step(std::move(closure));
  }
};

TEST(WholeParameterTrainingTest, GathersOfFusedGroupsBeginBeforeTheStepOfTheOthers) {
  message_probe = [](const std::string& what) {
    if (what.rfind("gather_rows of parameter bucket", 0) == 0) events.emplace_back("gather");
  };
  run_ranks(2, [](const Group& group) {
    OddModel model(1);
    auto others = model->parameters();
    const at::Tensor last = others.back();
    others.pop_back();
    std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
    parts.push_back(std::make_unique<torch::optim::AdamW>(others, 0.01));
    parts.push_back(std::make_unique<Spy>(std::vector<at::Tensor>{last}, 0.01));
    ZeroOptimizer optimizer(*model, std::make_unique<CombinedOptimizer>(std::move(parts)), group,
                            ZeroOptions().elementwise(true).bucket_bytes(600));
    optimizer.backward(
        model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
    events.clear();
    optimizer.step();
    const auto step = std::ranges::find(events, "step");
    ASSERT_NE(step, events.end());
    EXPECT_EQ(std::count(events.begin(), events.end(), "step"), 1);
    EXPECT_GE(step - events.begin(), 3) << "gathers of fused buckets";
    EXPECT_EQ(events.end() - step, 2) << "and one of the other";
  });
  message_probe = nullptr;
}

TEST(WholeParameterTrainingTest, MachinesExchangeInOneLevel) {
  for (const int ranks_per_machine : {1, 2}) {
    RunOptions options;
    options.ranks_per_machine = ranks_per_machine;
    Training t = whole(Inner::kMuon, 4);
    const Trajectory expected = train_reference(t);
    run_ranks(
        4,
        [&](const Group& group) {
          EXPECT_EQ(differing_elements(train_sharded(t, group), expected), 0);
        },
        options);
  }
}

struct Pair {
  OddModel model{1};
  std::unique_ptr<ZeroOptimizer> optimizer;

  Pair(const Group& group, Inner inner, ZeroOptions options = {}) {
    optimizer = std::make_unique<ZeroOptimizer>(*model, make_inner(inner, *model), group, options);
  }
};

// Every owner has its parameters whole, in the model's shapes, and nothing is sent for the update.
TEST(WholeParameterTrainingTest, OwnersHoldWholeParametersAndSendNothingToUpdateThem) {
  run_ranks(4, [](const Group& group) {
    Pair run(group, Inner::kLamb);
    const Plan& plan = run.optimizer->plan();
    std::multiset<std::vector<int64_t>> expected, got;
    const auto parameters = run.model->named_parameters();
    // Managed parameters in registration order.
    std::vector<at::Tensor> managed;
    for (const auto& item : parameters) {
      if (item.value().requires_grad()) managed.push_back(item.value());
    }
    for (size_t p = 0; p < managed.size(); ++p) {
      if (plan.parameter_owner[p] == group.rank() && managed[p].numel() > 0) {
        expected.insert(managed[p].sizes().vec());
      }
    }
    run.optimizer->backward(
        run.model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
    run.optimizer->clip_grad_norm_(1.0);
    const auto before = run.optimizer->stats().data;
    run.optimizer->step();
    const auto after = run.optimizer->stats().data;
    for (const auto& g : run.optimizer->inner().param_groups()) {
      for (const at::Tensor& p : g.params()) got.insert(p.sizes().vec());
    }
    got.erase(got.find({1, 1}));  // of the library, which notices a step() of the user
    EXPECT_EQ(got, expected);
    int64_t own = 0;
    for (const Bucket& bucket : plan.buckets) own += bucket.rows.numel(group.rank());
    EXPECT_EQ(after.gather_bytes_sent - before.gather_bytes_sent, 3 * 4 * own);
    EXPECT_EQ(after.exchange_bytes_sent, before.exchange_bytes_sent);
    EXPECT_EQ(run.optimizer->memory().master_parameters, 0);  // fp32 rows are the masters
  });
}

// The costs decide who owns what, and must agree.
TEST(WholeParameterTrainingTest, OwnersFollowTheCosts) {
  run_ranks(2, [](const Group& group) {
    // Large parameters cost nothing.
    const auto cost = [](c10::IntArrayRef sizes) {
      return c10::multiply_integers(sizes) > 100 ? int64_t{0} : int64_t{1000};
    };
    ZeroOptions options;
    options.owner_cost(cost);
    Pair run(group, Inner::kLamb, options);
    std::vector<ParameterInfo> with, without;
    for (const auto& item : run.model->named_parameters()) {
      const at::Tensor& p = item.value();
      if (!p.requires_grad()) continue;
      without.push_back({p.numel()});
      with.push_back({p.numel()});
      with.back().cost = cost(p.sizes());
    }
    const PlanOptions whole{Layout::kWholeParameters};
    const auto& owners = run.optimizer->plan().parameter_owner;
    EXPECT_EQ(owners, make_plan(with, {2}, whole).parameter_owner);
    EXPECT_NE(owners, make_plan(without, {2}, whole).parameter_owner);
    options.owner_cost([&](c10::IntArrayRef) { return group.rank(); });
    OddModel model{1};
    expect_words(error_of([&] {
                   ZeroOptimizer optimizer(*model, make_inner(Inner::kLamb, *model), group,
                                           options);
                 }),
                 {"cost of parameter"});
  });
}

}  // namespace
}  // namespace zero
