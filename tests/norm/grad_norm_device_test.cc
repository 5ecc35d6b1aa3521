// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/grad_norm.h on devices with room for one collective at a time.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "tests/norm/norm_on_mesh.h"
#include "tests/support/device/emulated_network.h"
#include "zero/grad_norm.h"
#include "zero/mesh.h"

namespace zero {
namespace {

TEST(GradNormDeviceTest, CollectivesOfSeveralGroupsHaveOneOrder) {
  run_device_ranks(4, [](const Group& world) {
    const c10::DeviceGuard here(world.device());
    const Mesh mesh(world, {{"tp", 2}, {"ep", 2}});
    const auto ones_there = [&] { return parameter(at::ones({8}, world.device())); };
    const auto groups = group_parameters_for_norm(
        {{ones_there(), Placement().sharded_over({mesh.group({"tp"})})},
         {ones_there(), Placement().sharded_over({mesh.group({"ep"})}).expert(true)}});
    for (int i = 0; i < 3; ++i) {
      EXPECT_DOUBLE_EQ(clip_grad_norm_(groups, std::nullopt).item<double>(), std::sqrt(32.0));
    }
  });
}

// As with an embedding in host memory.
TEST(GradNormDeviceTest, GradientsOfSeveralDevicesAreInOneNorm) {
  run_device_ranks(1, [](const Group& world) {
    const c10::DeviceGuard here(world.device());
    const at::Tensor host = parameter(at::ones({8}));
    const at::Tensor device = parameter(at::ones({8}, world.device()));
    const auto groups = group_parameters_for_norm({{host, {}}, {device, {}}});
    EXPECT_DOUBLE_EQ(clip_grad_norm_(groups, std::nullopt, 1.0).item<double>(), 16);
    EXPECT_EQ(clip_grad_norm_(groups, std::nullopt, kInfinity).item<double>(), 1);
    EXPECT_DOUBLE_EQ(clip_grad_norm_(groups, 1.0).item<double>(), 4);
    for (const at::Tensor& p : {host, device}) {
      EXPECT_NEAR(p.grad().cpu()[7].item<double>(), 0.25, 1e-6);
    }
  });
}

}  // namespace
}  // namespace zero
