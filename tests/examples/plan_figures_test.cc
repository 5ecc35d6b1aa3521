// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What //examples:plan prints, held to hand arithmetic and to the plan itself.
#include "examples/plan/plan_figures.h"

#include <gtest/gtest.h>

#include <numeric>

namespace zero::examples {
namespace {

JobOptions job(int64_t world_size, c10::ScalarType dtype = c10::ScalarType::BFloat16) {
  JobOptions options;
  options.world_size = world_size;
  options.dtype = dtype;
  options.plan.bucket_bytes = int64_t{4} << 20;
  return options;
}

TEST(ModelShapesTest, ModelsHaveTheirPublishedNumberOfParameters) {
  EXPECT_EQ(model_shape("gpt2").numel(), 124439808);
  EXPECT_EQ(model_shape("llama_7b").numel(), 6738415616);
  EXPECT_EQ(model_shape("llama_70b").numel(), 68976648192);
  EXPECT_EQ(model_shape("llama3_405b").numel(), 405853388800);
  EXPECT_EQ(model_shape("mixtral_8x7b").numel(), 46702792704);
  EXPECT_THROW(model_shape("gpt5"), c10::Error);
}

TEST(PlanFiguresTest, MemoryIsTheFormulaUpToPadding) {
  for (const std::string& name : model_names()) {
    const ModelShape model = model_shape(name);
    const auto p = static_cast<double>(model.numel());
    for (int64_t world_size : {1, 8, 1000}) {
      const auto w = static_cast<double>(world_size);
      const auto near = [](int64_t bytes, double expected) {
        EXPECT_NEAR(static_cast<double>(bytes), expected, 0.002 * expected);
      };
      // bf16, stage 2: 2P + 4P/W + (4 + 8)P/W.
      const PlanFigures two = plan_figures(plan_job(model, job(world_size)), 2);
      near(two.memory.working_parameters, 2 * p);
      near(two.memory.gradient_shards, 4 * p / w);
      near(two.memory.master_parameters, 4 * p / w);
      near(two.memory.optimizer_state, 8 * p / w);
      EXPECT_EQ(two.memory.full_gradients, 0);
      near(two.memory.total(), 2 * p + 16 * p / w);
      // Stage 1 keeps averaged gradients in full.
      near(plan_figures(plan_job(model, job(world_size)), 1).memory.total(), 4 * p + 16 * p / w);
      // fp32, stage 2: the master is the working row. 4P + 4P/W + 8P/W.
      const Plan fp32 = plan_job(model, job(world_size, c10::ScalarType::Float));
      near(plan_figures(fp32, 2).memory.total(), 4 * p + 12 * p / w);
    }
  }
}

TEST(PlanFiguresTest, LargestModelAtLargestScale) {
  const PlanFigures figures = plan_figures(plan_job(model_shape("llama3_405b"), job(16384)), 2);
  EXPECT_LT(figures.padding_share, 0.001);
  EXPECT_LT(figures.imbalance, 0.001);
  // Gradients out and parameters back: 2 (W - 1) / W * 2 bytes of each parameter.
  const double expected = 2.0 * 16383 / 16384 * 2 * 405853388800.0;
  EXPECT_NEAR(static_cast<double>(figures.bytes_sent), expected, 0.001 * expected);
  EXPECT_EQ(figures.collective_calls, 2 * figures.buckets);
  EXPECT_EQ(figures.ring_messages, figures.collective_calls * 16383);
  EXPECT_EQ(figures.tree_messages, figures.collective_calls * 14);
}

TEST(PlanFiguresTest, OneRankSendsNothing) {
  const PlanFigures figures = plan_figures(plan_job(model_shape("gpt2"), job(1)), 2);
  EXPECT_EQ(figures.bytes_sent, 0);
  EXPECT_EQ(figures.collective_calls, 0);
}

TEST(PlanFiguresTest, ExpertsOfADomainAreSharedByFewerRanks) {
  const ModelShape model = model_shape("mixtral_8x7b");
  JobOptions options = job(64);
  options.expert_parallel = 8;
  const PlanFigures figures = plan_figures(plan_job(model, options), 2);
  const int64_t experts = int64_t{32} * 8 * 3 * 4096 * 14336;
  const int64_t dense = model.numel() - experts;
  // A rank has one expert of eight a layer; its state is split over 8 ranks, not 64. So the
  // state of the whole model is still split over 64, and only working parameters shrink.
  EXPECT_EQ(figures.parameters, dense + experts / 8);
  const double state = 16.0 * static_cast<double>(model.numel()) / 64;
  EXPECT_NEAR(static_cast<double>(figures.memory.total()),
              2.0 * static_cast<double>(figures.parameters) + state, 0.001 * state);
  options.expert_parallel = 3;
  EXPECT_THROW(plan_job(model, options), c10::Error);
  options.expert_parallel = 8;
  EXPECT_THROW(plan_job(model_shape("gpt2"), options), c10::Error);
}

TEST(PlanFiguresTest, OwnedElementsAreThoseOfTheSegments) {
  ModelShape model;
  for (int64_t numel : {1, 7, 123 * 253, 253, 64, 3, 1021, 16, 2, 4096, 5}) {
    model.parameters.push_back({"p", numel, false});
  }
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    for (int64_t world_size : {1, 2, 3, 8, 64}) {
      for (int64_t bucket_bytes : {0, 300, 20000}) {
        JobOptions options = job(world_size);
        options.plan = {layout, bucket_bytes};
        const Plan plan = plan_job(model, options);
        const std::vector<int64_t> owned = owned_elements(plan);
        ASSERT_EQ(static_cast<int64_t>(owned.size()), world_size);
        EXPECT_EQ(std::accumulate(owned.begin(), owned.end(), int64_t{0}), model.numel());
        for (int64_t rank = 0; rank < world_size; ++rank) {
          int64_t expected = 0;
          for (size_t b = 0; b < plan.buckets.size(); ++b) {
            for (const Segment& s : plan.segments(static_cast<int64_t>(b), rank)) {
              expected += s.numel;
            }
          }
          EXPECT_EQ(owned[rank], expected) << "rank " << rank << " of " << world_size;
        }
      }
    }
  }
}

}  // namespace
}  // namespace zero::examples
