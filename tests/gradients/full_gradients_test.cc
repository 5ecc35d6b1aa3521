// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/full_gradients.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/flat_model.h"
#include "tests/support/random_tensors.h"
#include "tests/support/reducer_options.h"
#include "tests/support/run_ranks.h"
#include "zero/communicator.h"

namespace zero {
namespace {

using Tensors = std::vector<at::Tensor>;

// The second is in another memory order, and one has no element.
Tensors zeros(c10::ScalarType dtype) {
  return {at::zeros({3, 5}, dtype),
          at::zeros({2, 3, 4, 5}, dtype).contiguous(at::MemoryFormat::ChannelsLast),
          at::zeros({0}, dtype), at::zeros({33}, dtype)};
}

struct Rank {
  Rank(const Group& group, Layout layout, c10::ScalarType dtype)
      : world_size(group.world_size()),
        rank(group.rank()),
        flat(zeros(dtype), world_size, {layout, 256}),
        data(group.make_communicator("data", Purpose::kData)),
        reducer(flat.plan, flat.table, {{data.get(), nullptr, 0}}, flat.pool,
                reducer_options(flat.plan)),
        full(flat.plan, flat.table, {{data.get(), nullptr, 0}}, flat.pool) {}

  at::Tensor gradient(size_t p, int of_rank, int step) const {
    const at::Tensor& like = flat.model.values[p];
    return at::empty_like(like).copy_(
        random_tensor(like.sizes(), 100 * of_rank + 10 * step + p).mul_(64).round_().div_(8));
  }
  at::Tensor mean(size_t p, int step) const {
    at::Tensor sum = at::zeros(flat.model.values[p].sizes(), at::kDouble);
    for (int r = 0; r < world_size; ++r) sum += gradient(p, r, step);
    return (sum / world_size).to(flat.model.values[p].scalar_type());
  }
  void reduce(int step) {
    for (size_t p = flat.model.values.size(); p-- > 0;) {
      flat.model.values[p].mutable_grad() = gradient(p, rank, step);
      reducer.gradient_ready(static_cast<int64_t>(p));
    }
    reducer.complete(1);
  }

  const int world_size, rank;
  FlatModel flat;
  const std::unique_ptr<Communicator> data;
  GradientReducer reducer;
  FullGradients full;
};

void on_ranks(const std::function<void(Rank&, Layout)>& body) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        run_ranks(world_size, [&](const Group& group) {
          Rank rank(group, layout, dtype);
          body(rank, layout);
        });
      }
    }
  }
}

TEST(FullGradientsTest, EveryRankReadsTheMeanInEachParametersOrder) {
  on_ranks([](Rank& r, Layout layout) {
    EXPECT_EQ(r.full.bytes(), 0);
    for (const int step : {0, 1}) {
      r.reduce(step);
      r.full.gather(r.reducer, {1, 1, 1, 1});
      for (size_t p = 0; p < r.flat.model.values.size(); ++p) {
        const at::Tensor& grad = r.flat.model.values[p].grad();
        ASSERT_TRUE(grad.defined());
        EXPECT_EQ(grad.strides(), r.flat.model.values[p].strides());
        EXPECT_EQ(grad.scalar_type(), r.flat.model.values[p].scalar_type());
        EXPECT_TRUE(at::allclose(grad, r.mean(p, step), 1e-2, 0)) << p;
        if (grad.scalar_type() == at::kFloat) {
          EXPECT_TRUE(at::allclose(grad, r.mean(p, step), 1e-6, 0)) << p;
        }
      }
      // They are averages, which no later round sends again.
      EXPECT_EQ(r.reducer.rounds_needed(), 1);
      EXPECT_EQ(r.reducer.local_bytes(), 0);
      r.reducer.consume();
    }
    const int64_t elements = 15 + 120 + 33;
    const auto size = static_cast<int64_t>(r.flat.model.values[0].element_size());
    const int64_t flat = r.flat.plan.arenas[0].numel;
    EXPECT_EQ(r.full.bytes(), size * (layout == Layout::kContiguous ? flat : elements));
  });
}

TEST(FullGradientsTest, AnUnusedParameterHasNoAverage) {
  on_ranks([](Rank& r, Layout) {
    r.reduce(0);
    r.full.gather(r.reducer, {1, 0, 1, 0});
    EXPECT_TRUE(r.flat.model.values[0].grad().defined());
    for (const int p : {1, 3}) EXPECT_TRUE(is_marker(r.flat.model.values[p].grad()));
    // That of a used one is only to be read.
    r.reducer.verify();
    r.flat.model.values[0].mutable_grad().add_(1);
    expect_words(error_of([&] { r.reducer.verify(); }), {"parameter value0", "only read"});
  });
}

TEST(FullGradientsTest, AFewBucketsAtATimeHoldMemory) {
  run_ranks(2, [](const Group& group) {
    constexpr int64_t kBuckets = 12, kBytes = 256;
    Tensors values;
    for (int64_t b = 0; b < kBuckets; ++b) values.push_back(at::zeros({kBytes / 4}));
    FlatModel flat(values, 2, {Layout::kPerParameter, kBytes});
    ASSERT_EQ(flat.buckets(), kBuckets);
    const auto data = group.make_communicator("data", Purpose::kData);
    const std::vector<DomainCommunicators> comms = {{data.get(), nullptr, 0}};
    GradientReducer reducer(flat.plan, flat.table, comms, flat.pool, reducer_options(flat.plan));
    for (int64_t p = kBuckets - 1; p >= 0; --p) {
      flat.model.values[p].mutable_grad() = at::ones({kBytes / 4});
      reducer.gradient_ready(p);
    }
    reducer.complete(1);
    BufferPool pool(at::kCPU, 1 << 20);
    FullGradients full(flat.plan, flat.table, comms, pool);
    full.gather(reducer, std::vector<uint8_t>(kBuckets, 1));
    EXPECT_EQ(pool.peak_bytes(), 4 * kBytes);
  });
}

}  // namespace
}  // namespace zero
