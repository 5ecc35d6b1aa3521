// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero::Muon and zero::Adafactor against torch.optim of Python: against numbers that
// write_python_optimizers.py wrote, and against what it writes now where there is a Python with
// torch (ZERO_PYTHON).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/run_program.h"
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
// state tensor or of a parameter in bf16, which has 8 bits. In fp32 a sum of n terms is within
// n * 2^-24, in any order, and sixteen more roundings are on the way to an update: here and in
// Python.
double limit(const json& test_case) {
  if (test_case.at("dtype") == "bfloat16") return 0.02;
  if (test_case.at("dtype") == "double") return 1e-7;
  const std::vector<int64_t> shape = test_case.at("shape");
  const int64_t terms = shape.empty() ? 1 : *std::max_element(shape.begin(), shape.end());
  return 2 * static_cast<double>(16 + terms) * 0x1p-24;
}

// What is added to that for a parameter in fp32: here and in Python, a step rounds the parameter
// itself, after a decay twice. That is much of a small step, and depends on whether a processor has
// fused multiply-adds.
double limit_of_rounded_parameter(const json& test_case, int64_t steps) {
  if (test_case.at("dtype") != "float") return 0;
  const int64_t roundings = test_case.at("options").contains("weight_decay") ? 2 : 1;
  return static_cast<double>(2 * roundings * steps) * 0x1p-24;
}

// Rounds to bf16, up or down at random, with an expectation of x: the rms error is sqrt(2) times
// that of rounding to nearest. Without a generator it returns x.
at::Tensor rounded(const at::Tensor& x, const std::optional<at::Generator>& random) {
  if (!random) return x;
  const at::Tensor bits = x.contiguous().view(at::kInt);
  const at::Tensor up = at::randint(1 << 16, bits.sizes(), random, at::kInt);
  return ((bits + up).bitwise_and(-(1 << 16))).view(at::kFloat);
}

// The parameter after step 1 and after the last one, by the formula of zero/muon.h, in fp32 with
// the factors of all products rounded.
std::vector<at::Tensor> run_muon(const json& test_case, int64_t steps,
                                 const std::optional<at::Generator>& random) {
  const MuonOptions o = muon_options(test_case.at("options"));
  const std::vector<int64_t> shape = test_case.at("shape");
  const c10::ScalarType dtype = dtype_of(test_case.at("dtype"));
  const auto given = [&](uint64_t seed) { return hashed(shape, seed).to(dtype).to(at::kFloat); };
  const auto [a, b, c] = o.ns_coefficients();
  const double larger = std::max(shape[0], shape[1]);
  const double adjust = o.adjust_lr_fn() == "original"
                            ? std::sqrt(std::max(1.0, shape[0] / double(shape[1])))
                            : 0.2 * std::sqrt(larger);
  at::Tensor p = given(1), buffer = at::zeros(shape, at::kFloat);
  std::vector<at::Tensor> result;
  for (int64_t step = 1; step <= steps; ++step) {
    if (step != 3) {
      const at::Tensor g = given(10 + step);
      buffer.lerp_(g, 1 - o.momentum());
      at::Tensor x = rounded(o.nesterov() ? g.lerp(buffer, o.momentum()) : buffer, random);
      if (shape[0] > shape[1]) x = x.t();
      x = rounded(x / rounded(x.norm().clamp_min(o.eps()).reshape({1}), random), random);
      for (int64_t i = 0; i < o.ns_steps(); ++i) {
        const at::Tensor gram = rounded(at::matmul(x, x.t()), random);
        const at::Tensor sum = rounded(at::addmm(gram, gram, gram, b, c), random);
        x = rounded(at::addmm(x, sum, x, a), random);
      }
      p = p * (1 - o.lr() * o.weight_decay()) -
          (shape[0] > shape[1] ? x.t() : x) * (o.lr() * adjust);
    }
    if (step == 1 || step == steps) result.push_back(p);
  }
  return result;
}

double rms(const at::Tensor& x) { return x.to(at::kDouble).square().mean().sqrt().item<double>(); }

// Limits of a parameter's distance from Python's after step 1 and after the last one, of the rms
// over its elements, for any order of sums. Newton-Schulz multiplies a rounding error by up to
// a^5 = 485 in the direction of a small singular value, and hardly in that of a large one. So no
// constant suits all matrices, and a bound of the worst case excludes nothing. The roundings of two
// processors are as good as independent after the first sums, and a run with random roundings is as
// far from the run with none as two runs that round to nearest are from each other: each of the two
// has 1 / sqrt(2) of its error. Of few elements, the rms varies: the limit is twice the largest of
// several runs.
std::vector<double> muon_limits(const json& test_case, int64_t steps) {
  const std::vector<at::Tensor> exact = run_muon(test_case, steps, std::nullopt);
  at::Generator random = at::detail::createCPUGenerator(1);
  std::vector<double> limits(exact.size(), 1e-6);
  const int64_t runs = exact[0].numel() < 2000 ? 8 : 2;
  for (int64_t run = 0; run < runs; ++run) {
    const std::vector<at::Tensor> other = run_muon(test_case, steps, random);
    for (size_t i = 0; i < limits.size(); ++i) {
      limits[i] = std::max(limits[i], 2 * rms(other[i] - exact[i]));
    }
  }
  // In bf16 a parameter is itself rounded at each step, twice.
  if (test_case.at("dtype") == "bfloat16") {
    for (double& limit : limits) limit += 0x1p-8 * rms(exact[0]);
  }
  return limits;
}

double rms_error(const at::Tensor& tensor, const std::vector<double>& expected, int64_t most) {
  const at::Tensor now = tensor.detach().to(at::kDouble).flatten();
  const int64_t step = std::max<int64_t>(1, now.numel() / most);
  return rms(now.slice(0, 0, now.numel(), step) - at::tensor(expected, at::kDouble));
}

// The largest error of the samples of `tensor` without `rounding` of the largest sample, over the
// largest of |expected - from|. `from` may be undefined, which is 0.
double error(const at::Tensor& tensor, const std::vector<double>& expected, const at::Tensor& from,
             int64_t most, double rounding = 0) {
  const at::Tensor now = tensor.detach().to(at::kDouble).flatten();
  const at::Tensor start = from.defined() ? from.to(at::kDouble).flatten() : at::zeros_like(now);
  const int64_t step = std::max<int64_t>(1, now.numel() / most);
  EXPECT_EQ(static_cast<int64_t>(expected.size()), (now.numel() + step - 1) / step);
  double worst = 0, scale = 1e-30, largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double value = now[static_cast<int64_t>(i) * step].item<double>();
    const double distance = std::abs(value - expected[i]);
    if (std::isnan(distance)) return distance;
    worst = std::max(worst, distance);
    largest = std::max(largest, std::abs(expected[i]));
    scale = std::max(scale,
                     std::abs(expected[i] - start[static_cast<int64_t>(i) * step].item<double>()));
  }
  return std::max(0.0, worst - rounding * largest) / scale;
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
  std::vector<double> limits;
  if (test_case.at("optimizer") == "Muon") limits = muon_limits(test_case, steps);
  double worst = 0;
  for (int64_t step = 1; step <= steps; ++step) {
    p.mutable_grad() = step == 3 ? at::Tensor() : hashed(shape, 10 + step).to(dtype);
    optimizer->step();
    const auto found = test_case.at("parameter").find(std::to_string(step));
    if (found == test_case.at("parameter").end()) continue;
    double most = allowed;
    double e = 0;
    if (limits.empty()) {
      e = error(p, *found, dtype == at::kBFloat16 ? at::Tensor() : start, kSamples,
                limit_of_rounded_parameter(test_case, step));
    } else {
      e = rms_error(p, *found, kSamples);
      most = limits[step == 1 ? 0 : 1];
    }
    EXPECT_LE(e, most) << "parameter after step " << step << " of "
                       << test_case.dump().substr(0, 200);
    worst = std::max(worst, e / most);
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
  repeat_all("tests/inner_optimizers/python_optimizers.json");
}

TEST(PythonOptimizersTest, MuonAndAdafactorHaveTheNumbersThatPythonHasHere) {
  const std::string command = python();
  const std::string check = command + " -c 'import torch; torch.optim.Muon' 2>/dev/null";
  if (std::system(check.c_str()) != 0) {
    GTEST_SKIP() << command << " has no torch with Muon; set ZERO_PYTHON to one that has";
  }
  const std::string path = ::testing::TempDir() + "/python_optimizers.json";
  const std::string script = "tests/inner_optimizers/write_python_optimizers.py";
  ASSERT_EQ(std::system((command + " " + script + " " + path).c_str()), 0);
  repeat_all(path);
}

}  // namespace
}  // namespace zero
