// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reading gradients and masters, and bringing parameters, masters and buffers
// into step again after they were changed from outside. Compared with plain torch.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <functional>
#include <sstream>
#include <string>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr unsigned kUsed = OddModelImpl::kAll;

at::Tensor batch_loss(OddModelImpl& model, int rank, int batch) {
  const auto seed = static_cast<uint64_t>(100 * batch + rank);
  const auto dtype = model.scale.scalar_type();
  return model.loss(random_tensor({3, 17}, seed).to(dtype),
                    random_tensor({3, 11}, seed + 50).to(dtype), kUsed);
}

void copy_values(OddModel& from, OddModel& to) {
  at::NoGradGuard no_grad;
  const auto source = from->parameters(), target = to->parameters();
  for (size_t i = 0; i < source.size(); ++i) target[i].copy_(source[i]);
}

void expect_near(const at::Tensor& got, const at::Tensor& expected, double tolerance,
                 const std::string& name) {
  ASSERT_EQ(got.defined(), expected.defined()) << name;
  if (!got.defined()) return;
  ASSERT_EQ(got.sizes(), expected.sizes()) << name;
  if (got.numel() == 0) return;
  const double difference =
      (got.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  EXPECT_LE(difference, tolerance) << name;
}

struct Rank {
  Rank(const Group& group, const ZeroOptions& options, c10::ScalarType dtype = at::kFloat)
      : group(group) {
    model->to(dtype);
    optimizer = std::make_unique<ZeroOptimizer>(*model, make_inner(Inner::kSgdMomentum, *model),
                                                group, options);
  }

  void backward(int batch, bool plain = false) {
    const at::Tensor loss = batch_loss(*model, group.rank(), batch);
    plain ? loss.backward() : optimizer->backward(loss);
  }
  void train(int batch) {
    backward(batch);
    optimizer->step();
  }

  // What plain torch gives for the mean over ranks of the sum over `batches`.
  std::vector<at::Tensor> expected_gradients(const std::vector<int>& batches) {
    OddModel plain(1);
    plain->to(model->scale.scalar_type());
    copy_values(model, plain);
    std::vector<at::Tensor> means;
    for (int rank = 0; rank < group.world_size(); ++rank) {
      plain->zero_grad();
      for (int batch : batches) batch_loss(*plain, rank, batch).backward();
      size_t i = 0;
      for (const at::Tensor& p : plain->parameters()) {
        if (rank == 0) means.emplace_back();
        if (p.grad().defined()) {
          const at::Tensor part = p.grad().to(at::kDouble) / group.world_size();
          means[i] = means[i].defined() ? means[i] + part : part;
        }
        ++i;
      }
    }
    return means;
  }

  void expect_gradients(const std::vector<int>& batches, bool readable, double tolerance = 1e-6) {
    const auto expected = expected_gradients(batches);
    size_t i = 0;
    for (const auto& item : model->named_parameters()) {
      const at::Tensor& p = item.value();
      if (p.requires_grad()) {
        const at::Tensor got = optimizer->gradient(p);
        expect_near(got, expected[i], tolerance, "gradient() of " + item.key());
        if (got.defined()) {
          EXPECT_EQ(got.scalar_type(), at::kFloat);
        }
        if (readable || !got.defined()) {
          expect_near(p.grad(), expected[i], tolerance, "grad() of " + item.key());
        } else {
          // A marker: nothing that could be taken for a gradient. All its elements are one number,
          // and its memory has one for each parameter.
          EXPECT_TRUE(p.grad().isnan().all().item<bool>()) << item.key();
          for (int64_t d = 0; d < p.dim(); ++d) {
            EXPECT_TRUE(p.size(d) <= 1 || p.grad().stride(d) == 0) << item.key();
          }
          EXPECT_LE(p.grad().storage().nbytes(), 4 * expected.size()) << item.key();
        }
      }
      ++i;
    }
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

// ---------------------------------------------------------------------
// Gradients

TEST_P(InLayout, Stage1AveragesAreReadableAndNeverAveragedTwice) {
  for (bool plain : {false, true}) {
    SCOPED_TRACE(plain ? "plain" : "ours");
    run_ranks(3, [&](const Group& group) {
      Rank r(group, options_of(1, GetParam()));
      for (int step = 0; step < 2; ++step) {
        r.backward(1, plain);
        r.optimizer->reduce_gradients();
        r.expect_gradients({1}, true);
        r.optimizer->reduce_gradients();  // again: nothing new
        r.expect_gradients({1}, true);
        r.backward(2, plain);  // sets the averages aside
        r.optimizer->reduce_gradients();
        r.expect_gradients({1, 2}, true);
        r.backward(3, plain);
        r.optimizer->clip_grad_norm_(0.01);
        r.expect_gradients({1, 2, 3}, true);  // unclipped
        r.optimizer->step();
        for (const at::Tensor& p : r.model->parameters()) EXPECT_FALSE(p.grad().defined());
      }
      r.backward(1, plain);
      r.optimizer->reduce_gradients();
      r.optimizer->zero_grad();
      for (const at::Tensor& p : r.model->parameters()) EXPECT_FALSE(p.grad().defined());
      r.backward(2, plain);
      r.optimizer->reduce_gradients();
      r.expect_gradients({2}, true);
    });
  }
}

TEST_P(InLayout, Stage2GivesGradientsOnRequest) {
  run_ranks(2, [&](const Group& group) {
    Rank r(group, options_of(2, GetParam()));
    r.backward(1);
    r.expect_gradients({1}, false);
    r.backward(2);
    r.expect_gradients({1, 2}, false);
    r.optimizer->clip_grad_norm_(0.01);
    r.expect_gradients({1, 2}, false);
    r.optimizer->step();
    EXPECT_FALSE(r.optimizer->gradient(r.model->scale).defined());
  });
}

TEST_P(InLayout, SixteenBitParameters) {
  run_ranks(2, [&](const Group& group) {
    Rank r(group, options_of(1, GetParam()), at::kBFloat16);
    r.backward(1);
    r.optimizer->reduce_gradients();
    EXPECT_EQ(r.model->trunk->weight.grad().scalar_type(), at::kBFloat16);
    r.expect_gradients({1}, true, 1e-2);
  });
}

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

// As in torch, what is in p.grad() counts, wherever it comes from.
TEST(GradientAccessTest, GradientsPutThereByHand) {
  for (int64_t stage : {1, 2}) {
    run_ranks(2, [&](const Group& group) {
      Rank r(group, options_of(stage, Layout::kContiguous));
      if (group.rank() == 0) r.model->scale.mutable_grad() = at::full({1}, 6.0F);
      r.backward(1);
      const auto expected = r.expected_gradients({1});
      expect_near(r.optimizer->gradient(r.model->scale), expected[0] + 3, 1e-6, "scale");
      r.optimizer->step();

      // Without any backward pass, and only on one rank.
      const float before = r.model->never->bias.detach()[0].item<float>();
      if (group.rank() == 1) r.model->never->bias.mutable_grad() = at::full({3}, 4.0F);
      r.optimizer->step();
      EXPECT_EQ(r.optimizer->stats().steps, 2);
      const float decayed = before - 0.1F * (2.0F + 0.001F * before);
      EXPECT_NEAR(r.model->never->bias.detach()[0].item<float>(), decayed, 1e-6);
    });
  }
}

// ---------------------------------------------------------------------
// Masters

TEST_P(InLayout, MastersRoundToWorkingParameters) {
  for (c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    run_ranks(3, [&](const Group& group) {
      Rank r(group, options_of(2, GetParam()), dtype);
      for (int step = 0; step < 3; ++step) r.train(step);
      double rounding = 0;
      for (const at::Tensor& p : r.model->parameters()) {
        if (!p.requires_grad()) continue;
        const at::Tensor master = r.optimizer->master(p);
        EXPECT_EQ(master.scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(master.to(dtype), p));
        if (p.numel() > 0) {
          rounding += (master - p.detach().to(at::kFloat)).abs().sum().item<double>();
        }
      }
      EXPECT_EQ(rounding > 0, dtype != at::kFloat);
    });
  }
}

// Each way to change parameters from outside, on rank 0 or on all ranks.
using Change = std::function<void(OddModel&)>;

std::vector<std::pair<std::string, Change>> changes() {
  return {
      {"in place",
       [](OddModel& model) {
         at::NoGradGuard no_grad;
         for (at::Tensor& p : model->parameters()) p.mul_(0.5);
       }},
      {"set_data",
       [](OddModel& model) {
         for (at::Tensor& p : model->parameters()) p.set_data(p.detach() * 0.5);
       }},
      {"set_data in another memory order",
       [](OddModel& model) {
         for (at::Tensor& p : model->parameters()) p.set_data((p.detach() * 0.5).contiguous());
       }},
      {"torch::load",
       [](OddModel& model) {
         OddModel other(1);
         copy_values(model, other);
         {
           at::NoGradGuard no_grad;
           for (at::Tensor& p : other->parameters()) p.mul_(0.5);
         }
         std::stringstream stream;
         torch::save(other, stream);
         torch::load(model, stream);
       }},
  };
}

TEST_P(InLayout, RefreshMasterParameters) {
  for (const auto& [name, change] : changes()) {
    for (bool everywhere : {false, true}) {
      SCOPED_TRACE(name + (everywhere ? " on all ranks" : " on rank 0"));
      // The same in plain torch, with both ranks' gradients one after another.
      OddModel plain(1);
      const auto sgd = make_inner(Inner::kSgdMomentum, *plain);
      const auto plain_step = [&](int batch) {
        plain->zero_grad();
        for (int rank : {0, 1}) (batch_loss(*plain, rank, batch) / 2).backward();
        sgd->step();
      };
      plain_step(1);
      change(plain);
      plain_step(2);
      run_ranks(2, [&, &change = change](const Group& group) {
        Rank r(group, options_of(1, GetParam()));
        r.train(1);
        if (everywhere || group.rank() == 0) change(r.model);
        const at::Tensor expected = r.model->last.detach().clone();
        r.optimizer->refresh_master_parameters();
        EXPECT_TRUE(group.rank() != 0 || at::equal(r.model->last, expected));
        EXPECT_TRUE(at::equal(r.optimizer->master(r.model->last), r.model->last));
        r.optimizer->check_replicas();
        r.train(2);
        EXPECT_LE(largest_difference({r.model->parameters()}, {plain->parameters()}), 1e-6);
      });
    }
  }
}

TEST_P(InLayout, RefreshWorkingParameters) {
  for (c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    run_ranks(2, [&](const Group& group) {
      Rank r(group, options_of(2, GetParam()), dtype);
      r.train(1);
      std::vector<at::Tensor> before;
      for (const at::Tensor& p : r.model->parameters()) before.push_back(p.detach().clone());
      // Moved elsewhere; in fp32 in the arena an edit in place would hit the masters.
      if (group.rank() == 1) {
        for (at::Tensor& p : r.model->parameters()) {
          if (p.requires_grad()) p.set_data(p.detach() * 3);
        }
      }
      r.optimizer->refresh_working_parameters();
      EXPECT_EQ(differing_elements({r.model->parameters()}, {before}), 0);
      if (dtype != at::kFloat || GetParam() == Layout::kPerParameter) {
        for (at::Tensor& p : r.model->parameters()) {
          if (p.requires_grad()) p.data().add_(1);
        }
        r.optimizer->refresh_working_parameters();
        EXPECT_EQ(differing_elements({r.model->parameters()}, {before}), 0);
      }
      r.optimizer->check_replicas();
      r.train(2);
    });
  }
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

TEST(GradientAccessTest, BroadcastBuffers) {
  run_ranks(3, [](const Group& group) {
    OddModel model(1);
    model->register_buffer("mean", at::zeros({5, 4}).t());
    ZeroOptimizer optimizer(*model, make_inner(Inner::kSgd, *model), group);
    const auto buffers = model->named_buffers();
    for (const auto& buffer : buffers) buffer.value().fill_(10 + group.rank());
    optimizer.broadcast_buffers();
    for (const auto& buffer : buffers) {
      EXPECT_TRUE(at::equal(buffer.value(), at::full_like(buffer.value(), 10))) << buffer.key();
    }
  });
}

// ---------------------------------------------------------------------
// Replicas

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
