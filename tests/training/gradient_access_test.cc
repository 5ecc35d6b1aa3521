// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients and masters that are read are copies, refreshes take values in any memory order, a
// graph notices what they change, and checks of replicas name what differs. Their values are
// compared in call_sequence_test.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

at::Tensor batch_loss(OddModelImpl& model, int rank, int batch) {
  const auto seed = static_cast<uint64_t>(100 * batch + rank);
  const auto dtype = model.scale.scalar_type();
  return model.loss(random_tensor({3, 17}, seed).to(dtype),
                    random_tensor({3, 11}, seed + 50).to(dtype), OddModelImpl::kAll);
}

struct Rank {
  Rank(const Group& group, const ZeroOptions& options, c10::ScalarType dtype = at::kFloat)
      : group(group) {
    model->to(dtype);
    optimizer = std::make_unique<ZeroOptimizer>(*model, make_inner(Inner::kSgdMomentum, *model),
                                                group, options);
  }

  void backward(int batch) { optimizer->backward(batch_loss(*model, group.rank(), batch)); }
  void train(int batch) {
    backward(batch);
    optimizer->step();
  }

  const Group group;
  OddModel model{1};
  std::unique_ptr<ZeroOptimizer> optimizer;
};

ZeroOptions options_of(int64_t stage, Layout layout) {
  return ZeroOptions().stage(stage).layout(layout).bucket_bytes(600);
}

class InLayout : public ::testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(Layout, InLayout,
                         ::testing::Values(Layout::kContiguous, Layout::kPerParameter,
                                           Layout::kWholeParameters));

TEST(GradientAccessTest, GradientsAndMastersAreCopies) {
  run_ranks(2, [](const Group& group) {
    Rank touched(group, options_of(2, Layout::kContiguous));
    Rank untouched(group, options_of(2, Layout::kContiguous));
    for (Rank* r : {&touched, &untouched}) {
      r->backward(1);
      if (r == &touched) {
        r->optimizer->gradient(r->model->trunk->weight).fill_(7);
        r->optimizer->master(r->model->trunk->weight).fill_(7);
      }
      r->optimizer->step();
    }
    EXPECT_EQ(differing_elements({touched.model->parameters()}, {untouched.model->parameters()}),
              0);
  });
}

// A graph that saved a parameter notices that it was refreshed.
TEST(GradientAccessTest, StaleGraphIsAnErrorAfterRefreshAndStep) {
  run_ranks(2, [](const Group& group) {
    Rank r(group, options_of(2, Layout::kContiguous), at::kBFloat16);
    for (bool step : {true, false}) {
      const at::Tensor stale = batch_loss(*r.model, group.rank(), 1);
      step ? r.train(2) : r.optimizer->refresh_working_parameters();
      expect_words(error_of([&] { r.optimizer->backward(stale); }),
                   {"modified by an inplace operation"});
      r.optimizer->zero_grad();
    }
    r.train(3);
  });
}

TEST_P(InLayout, RefreshTakesValuesInAnotherMemoryOrder) {
  for (c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    run_ranks(2, [&](const Group& group) {
      Rank r(group, options_of(2, GetParam()), dtype);
      r.train(1);
      at::Tensor &rows = r.model->trunk->weight, &channels_last = r.model->last;
      const at::Tensor new_rows = random_tensor(rows.sizes(), 5).to(dtype);
      const at::Tensor new_last = random_tensor(channels_last.sizes(), 6).to(dtype);
      ASSERT_NE(channels_last.strides(), new_last.strides());
      if (group.rank() == 0) {
        rows.set_data(new_rows.t().contiguous().t());
        channels_last.set_data(new_last.clone());
      }
      r.optimizer->refresh_master_parameters();
      for (const auto& [parameter, expected] :
           {std::pair{rows, new_rows}, std::pair{channels_last, new_last}}) {
        EXPECT_TRUE(at::equal(parameter, expected));
        EXPECT_TRUE(at::equal(r.optimizer->master(parameter), expected.to(at::kFloat)));
      }
    });
  }
}

TEST_P(InLayout, CheckReplicasNamesTheFirstParameterThatDiffersAndTheRanks) {
  for (c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    run_ranks(3, [&](const Group& group) {
      Rank r(group, options_of(2, GetParam()), dtype);
      r.train(1);
      r.optimizer->check_replicas();
      if (group.rank() == 1) {  // p.data() hides the edit from the version counter
        r.model->left->weight.data().select(0, 10).add_(1);
        r.model->right->bias.data().add_(1);
      }
      const std::string text = error_of([&] { r.optimizer->check_replicas(); });
      expect_words(text, {"rank " + std::to_string(group.rank()) + ": ", "parameter left.weight",
                          "expected the same values on every rank", "ranks 0 2 hold hash",
                          "ranks 1 hold hash", "refresh_master_parameters()"});
      EXPECT_EQ(text.find("right.bias"), std::string::npos) << text;
      r.optimizer->refresh_master_parameters();
      r.optimizer->check_replicas();
      r.train(2);
      r.optimizer->check_replicas();
    });
  }
}

// Equal on all ranks, but not what the masters say.
TEST(GradientAccessTest, CheckReplicasComparesMastersWithWorkingParameters) {
  run_ranks(2, [](const Group& group) {
    Rank r(group, options_of(2, Layout::kContiguous), at::kBFloat16);
    r.train(1);
    // The last rows belong to the last rank that has a segment of it.
    r.model->trunk->weight.data().add_(1);
    expect_words(error_of([&] { r.optimizer->check_replicas(); }),
                 {"rank " + std::to_string(group.rank()) + ": ", "parameter trunk.weight",
                  "expected working values that are the rounded masters, got others on rank",
                  "refresh_working_parameters()"});
    r.optimizer->refresh_working_parameters();
    r.optimizer->check_replicas();
  });
}

}  // namespace
}  // namespace zero
