// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The figures of //examples:plan, held to hand arithmetic and to the plan itself.
#include "examples/plan/plan_figures.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <utility>

#include "tests/support/error_of.h"
#include "tests/support/files.h"

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
  EXPECT_EQ(model_shape("mlp25m").numel(), 25190400);
  EXPECT_EQ(model_shape("gpt2").numel(), 124439808);
  EXPECT_EQ(model_shape("llama_7b").numel(), 6738415616);
  EXPECT_EQ(model_shape("llama_70b").numel(), 68976648192);
  EXPECT_EQ(model_shape("llama3_405b").numel(), 405853388800);
  EXPECT_EQ(model_shape("mixtral_8x7b").numel(), 46702792704);
  EXPECT_THROW(model_shape("gpt5"), c10::Error);
}

TEST(ModelShapesTest, AFileThatIsNoneIsRefusedWithItsLine) {
  const std::string path = ::testing::TempDir() + "shapes.txt";
  const std::pair<std::string, std::string> refused[] = {
      {"a 3\na 4\n", "line 2: expected different names, got a twice"},
      {"a 3 x\n", "line 1: expected a name and whole numbers"},
      {"a -3\n", "line 1: expected sizes"},
      {"a 2147483648 2147483648\n", "line 1: expected sizes"},
      {"# a 3\n", "expected a parameter with elements, got none"}};
  for (const auto& [text, error] : refused) {
    overwrite(path, text);
    expect_words(error_of([&] { read_shapes(path); }), {error});
  }
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
      const Plan bf16 = plan_job(model, job(world_size));
      // Stage 2: 2P + 4P/W + (4 + 8)P/W.
      const PlanFigures two = plan_figures(bf16, {.stage = 2});
      near(two.memory.working_parameters, 2 * p);
      near(two.memory.gradient_shards, 4 * p / w);
      near(two.memory.master_parameters, 4 * p / w);
      near(two.memory.optimizer_state, 8 * p / w);
      EXPECT_EQ(two.memory.full_gradients, 0);
      near(two.memory.total(), 2 * p + 16 * p / w);
      EXPECT_EQ(two.memory.ema, 0);
      near(plan_figures(bf16, {.stage = 2, .ema = true}).memory.total(), 2 * p + 20 * p / w);
      // 8-bit moments have a scale of 4 bytes for each 256 elements.
      const PlanFigures small =
          plan_figures(bf16, {.stage = 2,
                              .state_bytes = adam_state_bytes(Moments::kInt8),
                              .split_masters = true,
                              .gradient_shard_dtype = c10::ScalarType::BFloat16});
      // Where a rank has few elements, its last blocks are not full.
      EXPECT_NEAR(static_cast<double>(small.memory.optimizer_state), (2 + 8.0 / 256) * p / w,
                  0.003 * 2 * p / w + 200);
      near(small.memory.master_parameters, 2 * p / w);
      near(small.memory.gradient_shards, 2 * p / w);
      near(small.memory.total(), 2 * p + (6 + 8.0 / 256) * p / w);
      // Without gradient shards, nor in stage 1 their averages.
      for (const int64_t stage : {1, 2}) {
        near(plan_figures(bf16, {.stage = stage, .update_in_backward = true}).memory.total(),
             2 * p + 12 * p / w);
      }
      // Stage 1 keeps averaged gradients in full.
      near(plan_figures(bf16, {.stage = 1}).memory.total(), 4 * p + 16 * p / w);
      // fp32, stage 2: the master is the working row. 4P + 4P/W + 8P/W.
      const Plan fp32 = plan_job(model, job(world_size, c10::ScalarType::Float));
      near(plan_figures(fp32, {.stage = 2}).memory.total(), 4 * p + 12 * p / w);
    }
  }
}

TEST(PlanFiguresTest, KeptBuffersAreThoseOfTheEightLargestBuckets) {
  const PlanFigures many = plan_figures(plan_job(model_shape("gpt2"), job(8)), {.stage = 2});
  EXPECT_GT(many.buckets, 8);
  EXPECT_EQ(many.kept_bucket_bytes, 8 * many.largest_bucket_bytes);
  JobOptions small = job(8);
  small.plan.bucket_bytes = 1 << 20;
  const PlanFigures twenty = plan_figures(plan_job(model_shape("gpt2"), small), {.stage = 2});
  EXPECT_NEAR(static_cast<double>(twenty.kept_bucket_bytes), 20 << 20, 1 << 20);
  JobOptions one_bucket = job(8);
  one_bucket.plan.bucket_bytes = 0;
  const PlanFigures one = plan_figures(plan_job(model_shape("gpt2"), one_bucket), {.stage = 2});
  EXPECT_EQ(one.buckets, 1);
  EXPECT_EQ(one.kept_bucket_bytes, one.largest_bucket_bytes);
}

TEST(PlanFiguresTest, LargestModelAtLargestScale) {
  const PlanFigures figures =
      plan_figures(plan_job(model_shape("llama3_405b"), job(16384)), {.stage = 2});
  EXPECT_LT(figures.padding_share, 0.001);
  EXPECT_LT(figures.imbalance, 0.001);
  // Gradients out and parameters back: 2 (W - 1) / W * 2 bytes of each parameter.
  const double expected = 2.0 * 16383 / 16384 * 2 * 405853388800.0;
  EXPECT_NEAR(static_cast<double>(figures.bytes_sent), expected, 0.001 * expected);
  EXPECT_EQ(figures.collective_calls, 2 * figures.buckets);
}

TEST(PlanFiguresTest, OneRankSendsNothing) {
  const PlanFigures figures = plan_figures(plan_job(model_shape("gpt2"), job(1)), {.stage = 2});
  EXPECT_EQ(figures.bytes_sent, 0);
  EXPECT_EQ(figures.collective_calls, 0);
}

TEST(PlanFiguresTest, ExpertsOfADomainAreSharedByFewerRanks) {
  const ModelShape model = model_shape("mixtral_8x7b");
  JobOptions options = job(64);
  options.expert_parallel = 8;
  const PlanFigures figures = plan_figures(plan_job(model, options), {.stage = 2});
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

// One bucket of 1536 elements on 2 machines of 3 ranks: rows of 256 elements.
Plan one_bucket(c10::ScalarType dtype) {
  JobOptions options = job(6, dtype);
  options.plan.bucket_bytes = 0;
  ModelShape model;
  model.parameters.push_back({"p", 1536, false});
  return plan_job(model, options);
}

// Numbers that are easy to divide by: a link of 1000 B/s, memory of 2000 B/s.
Machines slow_machines(int64_t ranks_per_machine) {
  return {ranks_per_machine, 1000, 2000, 1, 0.1};
}

void expect_cost(const ExchangeCost& cost, int64_t machine_bytes, int64_t local_bytes,
                 int64_t link_messages, int64_t local_messages, double wire_seconds,
                 double latency_seconds) {
  EXPECT_EQ(cost.machine_bytes, machine_bytes);
  EXPECT_EQ(cost.local_bytes, local_bytes);
  EXPECT_EQ(cost.link_messages, link_messages);
  EXPECT_EQ(cost.local_messages, local_messages);
  EXPECT_DOUBLE_EQ(cost.wire_seconds, wire_seconds);
  EXPECT_DOUBLE_EQ(cost.latency_seconds, latency_seconds);
}

TEST(CommunicationTest, PairsSendEveryRowOfEveryRankOverTheLink) {
  // bf16: rows of 512 bytes; 3 ranks send 3 rows each to the other machine, and 2 inside.
  const Communication sent =
      communication(one_bucket(c10::kBFloat16), 2, slow_machines(3), ExchangeAlgorithm::kPairwise);
  expect_cost(sent.reductions, 9 * 512, 2 * 512, 3, 2, 4.608, 3.2);
  expect_cost(sent.gathers, 9 * 512, 2 * 512, 3, 2, 4.608, 3.2);
}

TEST(CommunicationTest, ARingSendsAllRowsButOneOverEachLink) {
  // 5 steps, 1 of them to the other machine.
  const Communication sent =
      communication(one_bucket(c10::kBFloat16), 2, slow_machines(3), ExchangeAlgorithm::kRing);
  expect_cost(sent.reductions, 5 * 512, 5 * 512, 1, 4, 2.56, 1.4);
  expect_cost(sent.gathers, 5 * 512, 5 * 512, 1, 4, 2.56, 1.4);
}

TEST(CommunicationTest, TwoLevelsSendEachSumAndEachRowOnceOverTheLink) {
  // 3 sums of 1024 bytes, then 3 rows of 512; inside, 2 machines' rows to 2 ranks.
  const Communication sent =
      communication(one_bucket(c10::kBFloat16), 2, slow_machines(3), ExchangeAlgorithm::kTwoLevels);
  expect_cost(sent.reductions, 3 * 1024, 4 * 512, 1, 4, 3.072 + 1.024, 1.4);
  expect_cost(sent.gathers, 3 * 512, 4 * 512, 1, 4, 1.536 + 1.024, 1.4);
  expect_cost(sent.total(), 4608, 4096, 2, 8, 6.656, 2.8);
  // Stage 1 gathers averages as well.
  const Communication stage1 =
      communication(one_bucket(c10::kBFloat16), 1, slow_machines(3), ExchangeAlgorithm::kTwoLevels);
  expect_cost(stage1.gathers, 6 * 512, 8 * 512, 2, 8, 3.072 + 2.048, 2.8);
}

TEST(CommunicationTest, Log2StepsSendTheSameBytesInFewerMessages) {
  JobOptions options = job(4096);
  options.plan.bucket_bytes = 0;
  const Plan plan = plan_job(model_shape("gpt2"), options);
  const auto cost = [&](ExchangeAlgorithm algorithm) {
    return communication(plan, 2, slow_machines(8), algorithm).reductions;
  };
  const ExchangeCost two = cost(ExchangeAlgorithm::kTwoLevels);
  const ExchangeCost log2 = cost(ExchangeAlgorithm::kTwoLevelsLog2Steps);
  EXPECT_EQ(two.machine_bytes, log2.machine_bytes);
  EXPECT_EQ(two.link_messages, 511);
  EXPECT_EQ(two.local_messages, 7);
  EXPECT_EQ(log2.link_messages, 9);
  EXPECT_EQ(log2.local_messages, 7);
  EXPECT_NEAR(log2.latency_seconds, 9 + 0.7, 1e-9);
}

// The default on a GPU, with log2 steps between machines.
TEST(CommunicationTest, DefaultBucketsOfALargeJobWaitLittle) {
  JobOptions options;
  options.world_size = 16384;
  options.plan.on_gpu = true;
  const Plan plan = plan_job(model_shape("llama3_405b"), options);
  const ExchangeCost cost =
      communication(plan, 2, Machines{}, ExchangeAlgorithm::kTwoLevelsLog2Steps).total();
  EXPECT_LT(cost.seconds(), 1.2 * cost.wire_seconds);
  EXPECT_GT(cost.seconds(), 1.1 * cost.wire_seconds);
}

TEST(CommunicationTest, OneRankAMachineOrOneMachineNeedsNoSums) {
  const Plan plan = one_bucket(c10::kBFloat16);
  expect_cost(communication(plan, 2, slow_machines(1), ExchangeAlgorithm::kTwoLevels).reductions,
              5 * 512, 0, 5, 0, 2.56, 5);
  for (const ExchangeAlgorithm algorithm :
       {ExchangeAlgorithm::kPairwise, ExchangeAlgorithm::kRing, ExchangeAlgorithm::kTwoLevels,
        ExchangeAlgorithm::kTwoLevelsLog2Steps}) {
    expect_cost(communication(plan, 2, slow_machines(6), algorithm).reductions, 0, 5 * 512, 0, 5,
                1.28, 0.5);
  }
  EXPECT_THROW(communication(plan, 2, slow_machines(4), ExchangeAlgorithm::kRing), c10::Error);
}

// 8 ranks on 2 machines, 2 experts of one layer: the 4 ranks with one expert are 2 on each machine,
// and two such groups share a link.
TEST(CommunicationTest, GroupsOfExpertsShareALink) {
  ModelShape model;
  model.experts = 2;
  for (int i = 0; i < 6; ++i) model.parameters.push_back({"e", 128, true});
  model.parameters.push_back({"dense", 512, false});
  JobOptions options = job(8, c10::ScalarType::Float);
  options.expert_parallel = 2;
  options.plan.bucket_bytes = 0;
  const Plan plan = plan_job(model, options);
  // Dense: 4 rows of 256 bytes. Experts: 2 groups with 2 rows of 3 * 128 * 4 / 4 bytes.
  EXPECT_EQ(
      communication(plan, 2, slow_machines(4), ExchangeAlgorithm::kTwoLevels).gathers.machine_bytes,
      4 * 256 + 2 * 2 * 384);
  EXPECT_THROW(communication(plan, 2, slow_machines(3), ExchangeAlgorithm::kRing), c10::Error);
}

TEST(CommunicationTest, LatencyAddsTheShareAtTheSizeOfBuckets) {
  const ModelShape model = model_shape("gpt2");
  const Machines machines;
  const auto cost = [&](int64_t bucket_bytes) {
    JobOptions options = job(64);
    options.plan.bucket_bytes = bucket_bytes;
    return communication(plan_job(model, options), 2, machines, ExchangeAlgorithm::kTwoLevels);
  };
  const double bytes = bucket_bytes_for_latency(cost(int64_t{1} << 20), 3);
  const ExchangeCost total = cost(static_cast<int64_t>(bytes)).total();
  EXPECT_NEAR(total.latency_seconds / total.wire_seconds, 3, 0.15);
}

TEST(StepTest, AStepHidesReductionsButNotGathers) {
  Communication sent;
  sent.buckets = 10;
  sent.reductions.wire_seconds = 4;
  sent.gathers.wire_seconds = 3;
  const Compute compute = split_compute(3);
  EXPECT_DOUBLE_EQ(compute.forward_seconds, 1);
  EXPECT_DOUBLE_EQ(compute.backward_seconds, 2);
  // The first bucket is complete after 0.2 s of backward.
  EXPECT_DOUBLE_EQ(step_seconds(sent, compute, false), 1 + (0.2 + 4) + 3);
  // The last tenth of forward follows the last bucket.
  EXPECT_DOUBLE_EQ(step_seconds(sent, compute, true), (0.2 + 4) + (3 + 0.1));
  // A fast link leaves the last bucket to reduce after backward.
  sent.reductions.wire_seconds = 1;
  EXPECT_DOUBLE_EQ(step_seconds(sent, compute, false), 1 + (2 + 0.1) + 3);
}

// Measured on simulated hosts (examples/benchmark/compare_hosts.py): 909 ms on 2 hosts with 1 or 2
// ranks each over links of 1 Gbit/s; forward and backward take 98 ms on a rank alone.
TEST(StepTest, TheEstimateOfMlp25mIsWithin15PercentOfTheMeasuredStep) {
  Machines machines;
  machines.link_bytes_per_second = 125e6;
  machines.local_bytes_per_second = 10e9;
  machines.link_latency_seconds = 50e-6;
  for (const int64_t local : {1, 2}) {
    machines.ranks_per_machine = local;
    const Plan plan = plan_job(model_shape("mlp25m"), job(2 * local, c10::ScalarType::Float));
    const Communication sent = communication(plan, 2, machines, ExchangeAlgorithm::kTwoLevels);
    // Half of all gradients, and half of all parameters.
    EXPECT_EQ(sent.reductions.machine_bytes, 50380800);
    EXPECT_EQ(sent.gathers.machine_bytes, 50380800);
    EXPECT_NEAR(step_seconds(sent, split_compute(0.098), false), 0.909, 0.15 * 0.909);
  }
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
