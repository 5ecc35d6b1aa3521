// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The cost of a call grows in proportion to the number of parameters. Each call is made for few and
// for four times as many, and measured in processor time of the process, whose ranks are threads.
//
//   ZERO_PARAMETERS=n  at most so many, in place of 4000
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

// Four times the parameters cost four times as much where the cost is linear, and sixteen times
// where it is quadratic.
constexpr double kLimit = 9.0;

using Costs = std::map<std::string, double>;  // microseconds of the process, by call

double process_time() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

NamedTensors tensors(int64_t count) {
  NamedTensors result;
  for (int64_t i = 0; i < count; ++i) {
    result.insert("layer" + std::to_string(i) + ".weight",
                  at::full({2}, static_cast<double>(i)).requires_grad_());
  }
  return result;
}

std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-3));
}

// Each call once, on two ranks.
Costs costs_of(int64_t count, const std::string& folder) {
  Costs costs;
  const auto call_each = [&](const Group& group) {
    const auto control = group.make_communicator("meeting", Purpose::kControl);
    const auto measure = [&](const std::string& name, const std::function<void()>& call) {
      control->all_gather_text("", name);
      const double before = process_time();
      control->all_gather_text("", name);
      call();
      control->all_gather_text("", name);
      if (group.rank() == 0) costs[name] = process_time() - before;
    };
    const NamedTensors list = tensors(count);
    const std::vector<at::Tensor> parameters = list.values();
    const std::vector<at::Tensor> half(parameters.begin(), parameters.begin() + count / 2);
    std::unique_ptr<ZeroOptimizer> optimizer;
    measure("construct", [&] {
      optimizer =
          std::make_unique<ZeroOptimizer>(list, adamw(parameters), group, ZeroOptions().protect(1));
    });
    measure("step", [&] {
      optimizer->backward(at::cat(parameters).sum());
      optimizer->clip_grad_norm_(1.0);
      optimizer->step();
    });
    measure("save", [&] { optimizer->save_checkpoint(folder, SaveOptions().overwrite(true)); });
    measure("load", [&] { optimizer->load_checkpoint(folder); });
    measure("verify and export", [&] {
      if (group.rank() != 0) return;
      verify_checkpoint(folder);
      export_model(folder, folder + ".safetensors");
      export_optimizer_state(folder, folder + ".state");
    });
    measure("load_plain_state", [&] { optimizer->load_plain_state(folder + ".state"); });
    measure("freeze", [&] { optimizer->freeze(half); });
    measure("unfreeze", [&] { optimizer->unfreeze(half); });
    measure("resize_rows", [&] {
      std::vector<ResizedRows> changes;
      for (const at::Tensor& p : half) changes.push_back({p, at::arange(1, at::kLong)});
      optimizer->resize_rows(changes);
    });
    measure("end", [&] { optimizer.reset(); });
  };
  // Rank 0 exports alone, which takes minutes where the machine is busy.
  run_ranks(2, call_each, {.timeout = std::chrono::minutes(30)});
  fs::remove_all(folder);
  fs::remove(folder + ".safetensors");
  fs::remove(folder + ".state");
  return costs;
}

// Other programs disturb the caches: the least of the costs counts.
void measure_again(Costs& least, int64_t count, const std::string& folder) {
  for (const auto& [name, cost] : costs_of(count, folder)) {
    least[name] = std::min(least[name], cost);
  }
}

TEST(ManyParametersTest, CallsCostInProportion) {
  const char* const given = std::getenv("ZERO_PARAMETERS");
  const int64_t most = given != nullptr ? std::stoll(given) : 4000;
  const std::string folder = ::testing::TempDir() + "many_parameters";
  Costs few = costs_of(most / 4, folder), many = costs_of(most, folder);
  measure_again(few, most / 4, folder);
  const auto is_dear = [&](const auto& call) { return call.second >= kLimit * few.at(call.first); };
  if (std::any_of(many.begin(), many.end(), is_dear)) measure_again(many, most, folder);
  for (const auto& [name, cost] : many) {
    std::cout << name << ": " << cost / static_cast<double>(most) << " us a parameter of " << most
              << ", " << few.at(name) / static_cast<double>(most / 4) << " of " << most / 4 << "\n";
    EXPECT_LT(cost, kLimit * few.at(name)) << name;
  }
}

}  // namespace
}  // namespace zero
