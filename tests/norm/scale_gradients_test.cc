// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/norm/scale_gradients.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/support/random_tensors.h"

namespace zero {
namespace {

// The way of a GPU, tried in host memory, and that of the host.
TEST(ScaleGradientsTest, BothWaysMultiplyByTheFactorOfTheClip) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const double norm : {0.0, 0.5, 2.0, 7.0}) {
      const double factor = std::min(1.0, 1.5 / (norm + 1e-6));
      const auto make = [&] {
        const at::Tensor a = random_tensor({5, 7}, 1).to(dtype),
                         b = random_tensor({6, 8}, 2).to(dtype);
        const at::Tensor c = random_tensor({6, 8}, 3).to(dtype);
        return std::vector<at::Tensor>{a, b.t(), c.select(1, 3)};
      };
      const auto expect_scaled = [&](const std::vector<at::Tensor>& gradients) {
        std::vector<at::Tensor> expected = make();
        for (at::Tensor& e : expected) {
          e.copy_((e.to(at::kDouble) * factor).to(dtype));
        }
        for (size_t i = 0; i < expected.size(); ++i) {
          const double tolerance = dtype == at::kDouble ? 1e-14 : 1e-6;
          EXPECT_TRUE(at::allclose(gradients[i].to(at::kDouble), expected[i].to(at::kDouble),
                                   dtype == at::kFloat || dtype == at::kDouble ? tolerance : 8e-3,
                                   tolerance))
              << dtype << " norm " << norm << " tensor " << i;
        }
      };
      std::vector<at::Tensor> host = make(), device = make();
      scale_by_norm(host, 1.5, at::full({}, norm, at::kDouble), true);
      scale_by_norm(device, 1.5, at::full({}, norm, at::kDouble), false);
      expect_scaled(host);
      expect_scaled(device);
      for (size_t i = 0; i < host.size() && host[i].element_size() > 2; ++i) {
        EXPECT_TRUE(host[i].equal(make()[i].mul_(factor)));
      }
      if (factor == 1.0) {
        for (size_t i = 0; i < device.size(); ++i) EXPECT_TRUE(device[i].equal(make()[i]));
      }
    }
  }
}

// More than are widened at a time.
TEST(ScaleGradientsTest, ManyValuesOf16BitsAreEachScaledOnce) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor host = at::ones({(1 << 18) + 8}, dtype), device = host.clone();
    // 0.49999975 rounds to 0.5
    scale_by_norm({host}, 1.0, at::full({}, 2.0, at::kDouble), true);
    scale_by_norm({device}, 1.0, at::full({}, 2.0, at::kDouble), false);
    for (const at::Tensor& t : {host, device}) EXPECT_TRUE(t.eq(0.5).all().item<bool>()) << dtype;
  }
}

}  // namespace
}  // namespace zero
