// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero::Muon and zero::Adafactor against torch.optim of Python: against numbers that
// write_python_optimizers.py wrote, and against what it writes now where there is a Python with
// torch (ZERO_PYTHON).
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "zero/adafactor.h"
#include "zero/muon.h"

namespace zero {
namespace {

using nlohmann::json;

// The numbers of hashed() in write_python_optimizers.py.
at::Tensor hashed(const std::vector<int64_t>& shape, uint64_t seed) {
  at::Tensor result = at::empty(shape, at::kFloat);
  float* data = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    auto x = static_cast<uint32_t>(static_cast<uint64_t>(i) + seed * 0x9E3779B1U);
    x = (x ^ (x >> 16)) * 0x85EBCA6BU;
    x = (x ^ (x >> 13)) * 0xC2B2AE35U;
    data[i] = static_cast<float>((x ^ (x >> 16)) >> 8) * 0x1p-23F - 1.0F;
  }
  return result;
}

MuonOptions muon_options(const json& given) {
  MuonOptions o;
  for (const auto& [name, value] : given.items()) {
    if (name == "lr") o.lr(value);
    if (name == "weight_decay") o.weight_decay(value);
    if (name == "momentum") o.momentum(value);
    if (name == "nesterov") o.nesterov(value);
    if (name == "eps") o.eps(value);
    if (name == "ns_steps") o.ns_steps(value);
    if (name == "adjust_lr_fn") o.adjust_lr_fn(value);
    if (name == "ns_coefficients") {
      o.ns_coefficients(std::make_tuple(value.at(0), value.at(1), value.at(2)));
    }
  }
  return o;
}

AdafactorOptions adafactor_options(const json& given) {
  AdafactorOptions o;
  for (const auto& [name, value] : given.items()) {
    if (name == "lr") o.lr(value);
    if (name == "beta2_decay") o.beta2_decay(value);
    if (name == "d") o.d(value);
    if (name == "weight_decay") o.weight_decay(value);
    if (name == "maximize") o.maximize(value);
    if (name == "eps") {
      o.eps(AdafactorOptions::eps_t(value.at(0).get<double>(), value.at(1).get<double>()));
    }
  }
  return o;
}

std::unique_ptr<torch::optim::Optimizer> made(const json& test_case, const at::Tensor& p) {
  const std::vector<at::Tensor> params = {p};
  if (test_case.at("optimizer") == "Muon") {
    return std::make_unique<Muon>(params, muon_options(test_case.at("options")));
  }
  return std::make_unique<Adafactor>(params, adafactor_options(test_case.at("options")));
}

c10::ScalarType dtype_of(const std::string& name) {
  return name == "float" ? at::kFloat : name == "double" ? at::kDouble : at::kBFloat16;
}

// Limits of an error, relative to how far a parameter has moved, or to the largest element of a
// state tensor or of a parameter in bf16, which has 8 bits. Processors multiply matrices of bf16 in
// different orders, so that an intermediate matrix can be rounded in another way.
double limit(const json& test_case) {
  if (test_case.at("optimizer") == "Muon" || test_case.at("dtype") == "bfloat16") return 0.02;
  return test_case.at("dtype") == "double" ? 1e-7 : 2e-6;
}

// The largest error of the samples of `tensor` over the largest of |expected - from|. `from` may be
// undefined, which is 0.
double error(const at::Tensor& tensor, const std::vector<double>& expected, const at::Tensor& from,
             int64_t most) {
  const at::Tensor now = tensor.detach().to(at::kDouble).flatten();
  const at::Tensor start = from.defined() ? from.to(at::kDouble).flatten() : at::zeros_like(now);
  const int64_t step = std::max<int64_t>(1, now.numel() / most);
  EXPECT_EQ(static_cast<int64_t>(expected.size()), (now.numel() + step - 1) / step);
  double worst = 0, scale = 1e-30;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double value = now[static_cast<int64_t>(i) * step].item<double>();
    const double distance = std::abs(value - expected[i]);
    if (!(distance <= worst)) worst = distance;
    scale = std::max(scale,
                     std::abs(expected[i] - start[static_cast<int64_t>(i) * step].item<double>()));
  }
  return worst / scale;
}

at::Tensor state_tensor(const torch::optim::OptimizerParamState& state, const std::string& name) {
  if (const auto* muon = dynamic_cast<const MuonParamState*>(&state))
    return muon->momentum_buffer();
  const auto& adafactor = dynamic_cast<const AdafactorParamState&>(state);
  if (name == "step") return at::scalar_tensor(adafactor.step(), at::kDouble);
  return name == "row_var"   ? adafactor.row_var()
         : name == "col_var" ? adafactor.col_var()
                             : adafactor.variance();
}

// Returns the largest error over its limit.
double repeat(const json& test_case, int64_t steps) {
  constexpr int64_t kSamples = 40;  // SAMPLES of the script
  const std::vector<int64_t> shape = test_case.at("shape");
  const c10::ScalarType dtype = dtype_of(test_case.at("dtype"));
  const at::Tensor start = hashed(shape, 1).to(dtype);
  const at::Tensor p = start.clone().requires_grad_();
  const auto optimizer = made(test_case, p);
  const double allowed = limit(test_case);
  double worst = 0;
  for (int64_t step = 1; step <= steps; ++step) {
    p.mutable_grad() = step == 3 ? at::Tensor() : hashed(shape, 10 + step).to(dtype);
    optimizer->step();
    const auto found = test_case.at("parameter").find(std::to_string(step));
    if (found == test_case.at("parameter").end()) continue;
    const double e = error(p, *found, dtype == at::kBFloat16 ? at::Tensor() : start, kSamples);
    EXPECT_LE(e, allowed) << "parameter after step " << step << " of "
                          << test_case.dump().substr(0, 200);
    worst = std::max(worst, e / allowed);
  }
  const auto& state = *optimizer->state().begin()->second;
  for (const auto& [name, expected] : test_case.at("state").items()) {
    const double e = error(state_tensor(state, name), expected, {}, kSamples);
    EXPECT_LE(e, allowed) << name << " of " << test_case.dump().substr(0, 200);
    worst = std::max(worst, e / allowed);
  }
  return worst;
}

void repeat_all(const std::string& path) {
  std::ifstream file(path);
  const json all = json::parse(file);
  double muon = 0, adafactor = 0;
  ASSERT_GT(all.at("cases").size(), 70U);
  for (const json& test_case : all.at("cases")) {
    double& worst = test_case.at("optimizer") == "Muon" ? muon : adafactor;
    worst = std::max(worst, repeat(test_case, all.at("steps")));
  }
  std::printf("torch %s: %zu cases, largest error over its limit %.3f (Muon), %.3f (Adafactor)\n",
              all.at("torch").get<std::string>().c_str(), all.at("cases").size(), muon, adafactor);
}

TEST(PythonOptimizersTest, MuonAndAdafactorHaveTheStoredNumbersOfPython) {
  repeat_all("tests/inner/python_optimizers.json");
}

TEST(PythonOptimizersTest, MuonAndAdafactorHaveTheNumbersThatPythonHasHere) {
  const char* python = std::getenv("ZERO_PYTHON");
  const std::string command = python != nullptr ? python : "python3";
  const std::string check = command + " -c 'import torch; torch.optim.Muon' 2>/dev/null";
  if (std::system(check.c_str()) != 0) {
    GTEST_SKIP() << command << " has no torch with Muon; set ZERO_PYTHON to one that has";
  }
  const std::string path = ::testing::TempDir() + "/python_optimizers.json";
  const std::string script = "tests/inner/write_python_optimizers.py";
  ASSERT_EQ(std::system((command + " " + script + " " + path).c_str()), 0);
  repeat_all(path);
}

}  // namespace
}  // namespace zero
