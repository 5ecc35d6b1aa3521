// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/norm/clipping.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/communicator.h"

namespace zero {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double factor(double max_norm, double norm) { return std::min(1.0, max_norm / (norm + 1e-6)); }

// One rank with a gradient of 20 elements.
struct Rank {
  explicit Rank(const Group& group)
      : world_size(group.world_size()),
        rank(group.rank()),
        norms(group.make_communicator("norm", Purpose::kData)),
        clipping(segments, weights, at::kCPU, *norms) {
    SegmentTensors segment;
    segment.segment.numel = 20;
    segment.gradient = at::empty({20});
    segments.push_back(segment);
    set_gradients(0);
  }
  void set_gradients(int step) { segments[0].gradient.copy_(gradient(rank, step)); }
  static at::Tensor gradient(int rank, int step) { return random_tensor({20}, 10 * step + rank); }
  // By torch, in double, over all ranks.
  double plain_norm(double norm_type, int step) const {
    std::vector<at::Tensor> all;
    for (int r = 0; r < world_size; ++r) all.push_back(gradient(r, step).to(at::kDouble));
    return at::linalg_vector_norm(at::cat(all), norm_type).item<double>();
  }
  double clip(double max_norm, double norm_type, int64_t rounds) {
    const at::Tensor norm = clipping.norm(norm_type, rounds);
    clipping.clip(max_norm, norm_type, norm, rounds);
    return norm.item<double>();
  }
  double coefficient() const { return clipping.coefficient().item<double>(); }
  int64_t messages() const { return norms->traffic().small_calls; }

  const int world_size, rank;
  std::vector<SegmentTensors> segments;
  std::vector<double> weights{1};
  const std::unique_ptr<Communicator> norms;
  Clipping clipping;
};

void on_ranks(int world_size, const std::function<void(Rank&)>& body) {
  run_ranks(world_size, [&](const Group& group) {
    Rank rank(group);
    body(rank);
  });
}

TEST(ClippingTest, TheCoefficientIsThatOfTorchsClip) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const double norm_type : {1.0, 2.0, kInfinity}) {
      for (const double max_norm : {0.1, 1000.0}) {
        on_ranks(world_size, [&](Rank& r) {
          EXPECT_EQ(r.coefficient(), 1);
          EXPECT_FALSE(r.clipping.has_clips());
          const double norm = r.plain_norm(norm_type, 0);
          EXPECT_NEAR(r.clip(max_norm, norm_type, 1), norm, 1e-6);
          EXPECT_TRUE(r.clipping.has_clips());
          EXPECT_NEAR(r.coefficient(), factor(max_norm, norm), 1e-6);
        });
      }
    }
  }
}

TEST(ClippingTest, ALaterNormIsThatOfTheClippedGradient) {
  on_ranks(2, [](Rank& r) {
    const double norm = r.plain_norm(2, 0), largest = r.plain_norm(kInfinity, 0);
    r.clip(1, 2, 1);
    EXPECT_NEAR(r.clipping.norm(2, 1).item<double>(), norm * factor(1, norm), 1e-6);
    EXPECT_NEAR(r.clip(0.01, kInfinity, 1), largest * factor(1, norm), 1e-6);
    EXPECT_NEAR(r.coefficient(), factor(1, norm) * factor(0.01, largest * factor(1, norm)), 1e-6);
  });
}

// What step() makes of the gradient.
at::Tensor clipped(Rank& r) {
  const at::Tensor bound = r.clipping.bound();
  const at::Tensor gradient = r.segments[0].gradient;
  return (bound.defined() ? gradient.clamp(-bound, bound) : gradient) *
         r.clipping.coefficient().to(at::kFloat);
}

TEST(ClippingTest, ClipsByValueAndByNormAreTorchsInTheirOrder) {
  for (const int world_size : {1, 2, 3, 4}) {
    // > 0 by value, < 0 by norm.
    for (const std::vector<double>& clips :
         std::vector<std::vector<double>>{{0.3}, {0.3, -1}, {-1, 0.1}, {0.3, -1, 0.05, -0.2}}) {
      on_ranks(world_size, [&](Rank& r) {
        std::vector<at::Tensor> plain;
        for (int rank = 0; rank < world_size; ++rank) plain.push_back(Rank::gradient(rank, 0));
        for (const double clip : clips) {
          if (clip > 0) {
            r.clipping.clip_value(clip, 1);
            for (at::Tensor& g : plain) g = g.clamp(-clip, clip);
          } else {
            const double norm =
                at::linalg_vector_norm(at::cat(plain).to(at::kDouble), 2).item<double>();
            EXPECT_NEAR(r.clip(-clip, 2, 1), norm, 1e-5);
            for (at::Tensor& g : plain) g = g * factor(-clip, norm);
          }
        }
        EXPECT_TRUE(r.segments[0].gradient.equal(Rank::gradient(r.rank, 0))) << "until the step";
        EXPECT_TRUE(at::allclose(clipped(r), plain[r.rank], 1e-5, 1e-6));
        r.clipping.reset();
        EXPECT_FALSE(r.clipping.has_clips());
        r.set_gradients(1);
        EXPECT_TRUE(clipped(r).equal(Rank::gradient(r.rank, 1)));
      });
    }
  }
}

TEST(ClippingTest, AClipByValueSendsNothingAndHidesNoInfinity) {
  on_ranks(3, [](Rank& r) {
    if (r.rank == 2) r.segments[0].gradient[7] = kInfinity;
    r.clipping.clip_value(0.5, 1);
    EXPECT_EQ(r.messages(), 0);
    EXPECT_TRUE(std::isfinite(r.clip(0.1, 2, 1)));
    EXPECT_EQ(r.messages(), 1);
    EXPECT_NE(r.clipping.nonfinite(1).item<double>(), 0);
    EXPECT_NE(r.clipping.nonfinite(1).item<double>(), 0);
    EXPECT_EQ(r.messages(), 2);
  });
}

TEST(ClippingTest, ClipsByValueAreRenewedForGradientsThatWereAddedLater) {
  on_ranks(3, [](Rank& r) {
    r.clip(1, 2, 1);
    r.clipping.clip_value(0.02, 1);
    r.set_gradients(1);
    r.clipping.replay_clips(2);
    const double first = factor(1, r.plain_norm(2, 1));
    EXPECT_TRUE(at::allclose(clipped(r), (Rank::gradient(r.rank, 1) * first).clamp(-0.02, 0.02),
                             1e-5, 1e-6));
  });
}

TEST(ClippingTest, ANormIsSentOncePerGradient) {
  on_ranks(2, [](Rank& r) {
    r.clipping.norm(2, 1);
    r.clipping.norm(2, 1);
    EXPECT_EQ(r.clipping.nonfinite(1).item<double>(), 0);
    EXPECT_EQ(r.messages(), 1);
    r.clipping.norm(1, 1);
    EXPECT_EQ(r.messages(), 2);
    r.clipping.norm(1, 2);
    EXPECT_EQ(r.messages(), 3);
    r.clipping.reset();
    r.clipping.norm(1, 2);
    EXPECT_EQ(r.messages(), 4);
  });
}

TEST(ClippingTest, ClipsAreRenewedForGradientsThatWereAddedLater) {
  on_ranks(3, [](Rank& r) {
    r.clip(1, 2, 1);
    r.clip(0.5, 1, 1);
    const int64_t before = r.messages();
    r.clipping.replay_clips(1);
    EXPECT_EQ(r.messages(), before);
    r.set_gradients(1);
    r.clipping.replay_clips(2);
    const double first = factor(1, r.plain_norm(2, 1));
    const double second = factor(0.5, r.plain_norm(1, 1) * first);
    EXPECT_NEAR(r.coefficient(), first * second, 1e-6);
    EXPECT_EQ(r.messages(), before + 2);
  });
}

TEST(ClippingTest, WithoutAClipThereIsNothingToRenew) {
  on_ranks(2, [](Rank& r) {
    r.clipping.replay_clips(2);
    EXPECT_EQ(r.messages(), 0);
    r.clip(0.1, 2, 1);
    r.clipping.reset();
    EXPECT_EQ(r.coefficient(), 1);
    EXPECT_FALSE(r.clipping.has_clips());
    r.clipping.replay_clips(2);
    EXPECT_EQ(r.messages(), 1);
  });
}

TEST(ClippingTest, NanOfOneRankIsInTheCoefficientOfAll) {
  on_ranks(3, [](Rank& r) {
    if (r.rank == 2) r.segments[0].gradient[7] = std::nan("");
    r.clip(1, 2, 1);
    EXPECT_TRUE(std::isnan(r.coefficient()));
    EXPECT_NE(r.clipping.nonfinite(1).item<double>(), 0);
  });
}

}  // namespace
}  // namespace zero
