// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero::Muon by itself. python_optimizers_test compares it with Python.
#include "zero/muon.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/inner_optimizers/own_class.h"
#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "zero/inner_optimizers/newton_schulz.h"

namespace zero {
namespace {

void give_gradients(const Params& params, int step) {
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].mutable_grad() = random_tensor(params[i].sizes(), 100 * step + i);
  }
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// The formula of zero/muon.h in double, with the singular values mapped one by one: the iteration
// x = a x + (b A + c A^2) x leaves singular vectors and sends each value s to a s + b s^3 + c s^5.
class Reference {
 public:
  Reference(const at::Tensor& p, MuonOptions options)
      : p_(p.detach().to(at::kDouble)), b_(at::zeros_like(p_)), o_(std::move(options)) {}

  void step(const at::Tensor& gradient) {
    const at::Tensor g = gradient.to(at::kDouble);
    b_ += (1 - o_.momentum()) * (g - b_);
    const at::Tensor u = o_.nesterov() ? g + o_.momentum() * (b_ - g) : b_;
    const auto [left, values, right] = at::linalg_svd(u, /*full_matrices=*/false);
    at::Tensor s = values / std::max(u.norm().item<double>(), o_.eps());
    const auto [a, b, c] = o_.ns_coefficients();
    for (int64_t i = 0; i < o_.ns_steps(); ++i) s = a * s + b * s.pow(3) + c * s.pow(5);
    const double rows = u.size(0), columns = u.size(1);
    const double adjust = o_.adjust_lr_fn() == "original"
                              ? std::sqrt(std::max(1.0, rows / columns))
                              : 0.2 * std::sqrt(std::max(rows, columns));
    p_ *= 1 - o_.lr() * o_.weight_decay();
    p_ -= o_.lr() * adjust * at::matmul(left * s, right);
  }

  const at::Tensor& value() const { return p_; }

 private:
  at::Tensor p_, b_;
  MuonOptions o_;
};

std::vector<MuonOptions> several_options() {
  return {MuonOptions(0.1), MuonOptions(0.1).momentum(0).weight_decay(0),
          MuonOptions(0.1).nesterov(false).ns_steps(3),
          MuonOptions(0.1).adjust_lr_fn("match_rms_adamw").eps(100),
          MuonOptions(0.1).ns_coefficients(std::make_tuple(2.0, -1.5, 0.5)).ns_steps(9)};
}

// How products are made. bf16 on a processor without products of it is slow, so that only small
// matrices are multiplied in it there: `rounded` takes the same way through the code.
struct Mode {
  const char* name;
  at::ScalarType dtype;
  bool rounded;
  double rounding;  // of one element

  bool takes(int64_t multiplications) const {
    return dtype == at::kFloat || has_bf16_products(at::kCPU) || multiplications <= 1 << 21;
  }
  NewtonSchulz of(const NewtonSchulz& formula) const {
    return {formula.coefficients, formula.eps, formula.steps, dtype, rounded};
  }
  // No ns_dtype stands for `rounded`: see Pretended.
  std::optional<at::ScalarType> ns_dtype() const {
    return rounded ? std::nullopt : std::optional<at::ScalarType>(dtype);
  }
};
constexpr Mode kModes[] = {{"fp32", at::kFloat, false, 2e-6},
                           {"rounded", at::kFloat, true, 1e-3},
                           {"bf16", at::kBFloat16, false, 1e-3}};

int64_t multiplications(at::IntArrayRef shape) {
  const auto [side, length] = std::minmax({shape[0], shape[1]});
  return side * side * length;
}

// A processor with or without products of bf16, until the end.
struct Pretended {
  explicit Pretended(bool present) { pretend_bf16_products(present); }
  ~Pretended() { pretend_bf16_products(std::nullopt); }
};

// fp32 is near the formula, and bf16 as near as its 8 bits allow: each step may move an element by
// up to lr * adjust, and eight of them add up.
TEST(MuonTest, StepsAreTheFormulaForTallWideAndSquareMatrices) {
  const Pretended none(false);
  for (const MuonOptions& options : several_options()) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{
             {48, 20}, {20, 48}, {32, 32}, {1, 7}, {7, 1}, {1, 1}, {70, 300}}) {
      for (const Mode& mode : kModes) {
        const double tolerance = mode.rounding > 1e-4 ? 0.02 : 1e-5;
        const at::Tensor p = parameter(shape);
        Reference reference(p, options);
        Muon muon(Params{p}, MuonOptions(options).ns_dtype(mode.ns_dtype()));
        const double most = 8 * 0.1 * std::sqrt(std::max(1.0, shape[0] / double(shape[1])));
        for (int step = 0; step < 8; ++step) {
          give_gradients({p}, step);
          reference.step(p.grad());
          muon.step();
        }
        EXPECT_LE(distance(p, reference.value()), tolerance * most)
            << shape[0] << " x " << shape[1] << " " << mode.name << " " << options.adjust_lr_fn();
      }
    }
  }
}

TEST(MuonTest, SmallMatricesOfEqualShapeHaveTheSameBitsTogetherAndAlone) {
  const Pretended none(false);
  for (const Mode& mode : kModes) {
    Params together, alone;
    const std::vector<std::vector<int64_t>> shapes = {{16, 16},   {40, 24},    {24, 40}, {64, 64},
                                                      {7, 5},     {12, 50},    {15, 15}, {100, 3},
                                                      {201, 403}, {1500, 199}, {16, 512}};
    for (int i = 0; i < 110; ++i) {
      const auto& shape = shapes[i % 11];
      if (!mode.takes(multiplications(shape)) || (multiplications(shape) > 1 << 23 && i > 21)) {
        continue;
      }
      together.push_back(parameter(shape, i));
      alone.push_back(together.back().detach().clone().requires_grad_());
    }
    const MuonOptions options = MuonOptions(0.1).ns_dtype(mode.ns_dtype());
    Muon all(together, options);
    std::vector<std::unique_ptr<Muon>> singles;
    for (const at::Tensor& p : alone) {
      singles.push_back(std::make_unique<Muon>(Params{p}, options));
    }
    for (int step = 0; step < 3; ++step) {
      give_gradients(together, step);
      give_gradients(alone, step);
      all.step();
      for (auto& single : singles) single->step();
    }
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(at::equal(alone[i], together[i])) << i;
  }
}

// A batch is full after 2,622 of these.
TEST(MuonTest, MoreMatricesThanABatchTakesAreUpdatedOnceEach) {
  Params many;
  for (int i = 0; i < 2630; ++i) many.push_back(parameter({40, 40}));
  const at::Tensor single = parameter({40, 40}), g = random_tensor({40, 40}, 7);
  for (const at::Tensor& p : many) p.mutable_grad() = g;
  single.mutable_grad() = g;
  const MuonOptions options = MuonOptions(0.1).ns_steps(1).ns_dtype(at::kFloat);
  Muon all(many, options), one(Params{single}, options);
  all.step();
  one.step();
  for (size_t i = 0; i < many.size(); ++i) EXPECT_TRUE(at::equal(many[i], single)) << i;
}

// A matrix of Gaussian singular vectors with the singular values 1 to 1 / condition, equally far
// from each other on a logarithmic scale, and zeros from `rank` on.
at::Tensor spread(at::IntArrayRef shape, uint64_t seed, double condition, int64_t rank) {
  const int64_t side = std::min(shape[0], shape[1]);
  const auto orthonormal = [&](int64_t length, uint64_t number) {
    return std::get<0>(at::linalg_qr(random_tensor({length, side}, number).to(at::kDouble)));
  };
  at::Tensor values = at::logspace(0, -std::log10(condition), side, 10.0, at::kDouble);
  values.narrow(0, rank, side - rank).zero_();
  const at::Tensor left = orthonormal(shape[0], seed), right = orthonormal(shape[1], seed + 1);
  return at::matmul(left * values, right.t()).to(at::kFloat);
}

// A random matrix with one more singular value, as large as all others together.
at::Tensor dominated(at::IntArrayRef shape, uint64_t seed) {
  const at::Tensor u = random_tensor({shape[0], 1}, seed),
                   v = random_tensor({1, shape[1]}, seed + 1);
  const at::Tensor noise = random_tensor(shape, seed + 2);
  return noise / noise.norm() + at::matmul(u / u.norm(), v / v.norm());
}

// The iteration of zero/muon.h as it is written there, in any dtype: the result after 0 to o.steps
// iterations. bf16 is computed in fp32, where processors of both kinds are fast: each result is
// rounded to it.
std::vector<at::Tensor> iterates(const at::Tensor& matrix, const NewtonSchulz& o,
                                 at::ScalarType dtype) {
  const auto rounded = [&](const at::Tensor& x) {
    return dtype == at::kBFloat16 ? x.to(at::kBFloat16).to(at::kFloat) : x;
  };
  const auto [a, b, c] = o.coefficients;
  at::Tensor x = rounded(matrix.to(dtype == at::kBFloat16 ? at::kFloat : dtype));
  if (x.size(0) > x.size(1)) x = x.t();
  std::vector<at::Tensor> all = {rounded(x / rounded(x.norm().clamp_min(o.eps)))};
  for (int64_t step = 0; step < o.steps; ++step) {
    x = all.back();
    const at::Tensor gram = rounded(at::matmul(x, x.t()));
    all.push_back(rounded(at::addmm(x, rounded(at::addmm(gram, gram, gram, b, c)), x, a)));
  }
  if (matrix.size(0) > matrix.size(1)) {
    for (at::Tensor& each : all) each = each.t();
  }
  return all;
}

// Matrices of one kind and shape: the rounding error of one small matrix is a matter of chance.
struct Case {
  std::string name;
  std::vector<at::Tensor> matrices;
};

// Squares and rectangles: small ones of a batch, and large ones that take two iterations at a time.
// Those with a side of 326 are the smallest with products in strips. Strips change the order of a
// product and no factor, so that one kind of them, the slow ones, is enough.
std::vector<Case> several_cases() {
  std::vector<Case> cases;
  const auto add = [&](at::IntArrayRef shape, const char* kind, int count, const auto& make) {
    Case one{std::to_string(shape[0]) + " x " + std::to_string(shape[1]) + " " + kind, {}};
    for (int i = 0; i < count; ++i) one.matrices.push_back(make(shape, 4 + 10 * i));
    cases.push_back(std::move(one));
  };
  const auto random = [](at::IntArrayRef shape, uint64_t seed) {
    return random_tensor(shape, seed);
  };
  add({326, 654}, "random", 1, random);
  add({654, 326}, "random", 1, random);
  add({326, 326}, "random", 1, random);
  add({40, 3}, "random", 100, random);
  for (const auto& shape :
       std::vector<std::vector<int64_t>>{{200, 410}, {394, 192}, {64, 256}, {24, 70}, {60, 20}}) {
    const int count = multiplications(shape) < 100000 ? 10 : 1;
    const int64_t side = std::min(shape[0], shape[1]);
    const auto of = [&](double condition, int64_t rank) {
      return [=](at::IntArrayRef s, uint64_t seed) { return spread(s, seed, condition, rank); };
    };
    add(shape, "random", count, random);
    add(shape, "positive", count,
        [](at::IntArrayRef s, uint64_t seed) { return random_tensor(s, seed).abs(); });
    add(shape, "of condition 100", count, of(1e2, side));
    add(shape, "of condition 10,000", count, of(1e4, side));
    add(shape, "of a third of the rank", count, of(1e3, side / 3));
    add(shape, "dominated", count, dominated);
  }
  return cases;
}

// Distances from the iteration in double, in the Frobenius and in the spectral norm: the root of
// the mean square over the matrices that were added.
class Distances {
 public:
  void add(const at::Tensor& x, const at::Tensor& exact) {
    const at::Tensor error = x.to(at::kDouble) - exact;
    const at::Tensor wide = error.size(0) < error.size(1) ? error : error.t();
    frobenius_ += (error.norm() / exact.norm()).square().item<double>();
    spectral_ += at::linalg_eigvalsh(at::matmul(wide, wide.t())).max().item<double>();
    ++count_;
  }
  double frobenius() const { return std::sqrt(frobenius_ / count_); }
  double spectral() const { return std::sqrt(spectral_ / count_); }

 private:
  double frobenius_ = 0, spectral_ = 0, count_ = 0;
};

TEST(MuonTest, TheResultIsAsNearToTheFormulaAsTheFormulaInTheSameDtype) {
  const NewtonSchulz formula{{3.4445, -4.7750, 2.0315}, 1e-7, 5};
  for (const auto& [name, matrices] : several_cases()) {
    std::map<at::ScalarType, Distances> written;
    std::map<std::string, Distances> found;
    for (const at::Tensor& matrix : matrices) {
      const at::Tensor exact = iterates(matrix, formula, at::kDouble).back();
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        written[dtype].add(iterates(matrix, formula, dtype).back(), exact);
      }
      for (const Mode& mode : kModes) {
        if (!mode.takes(multiplications(matrix.sizes()))) continue;
        const NewtonSchulz o = mode.of(formula);
        const at::Tensor one = newton_schulz(matrix, o);
        ASSERT_EQ(one.sizes(), matrix.sizes());
        found[mode.name].add(one, exact);
        if (!is_batched(matrix, o)) continue;
        const auto batch = newton_schulz_batch({matrix, matrix.neg()}, o);
        ASSERT_EQ(batch[1].sizes(), matrix.sizes());
        EXPECT_TRUE(at::equal(batch[0], batch[1].neg())) << name << " " << mode.name;
        found[std::string(mode.name) + " in a batch"].add(batch[0], exact);
      }
    }
    for (const Mode& mode : kModes) {
      const Distances& limit = written[mode.rounded ? at::kBFloat16 : mode.dtype];
      for (const std::string& way :
           {std::string(mode.name), mode.name + std::string(" in a batch")}) {
        if (found.count(way) == 0) continue;
        EXPECT_LE(found[way].frobenius(), 1.25 * limit.frobenius() + mode.rounding) << name << way;
        EXPECT_LE(found[way].spectral(), 1.5 * limit.spectral() + 2 * mode.rounding) << name << way;
      }
    }
  }
}

// Explicit dtypes are obeyed on every processor, and without one it is what is fast there: bf16 for
// a matrix that is large enough.
TEST(MuonTest, WithoutADtypeProductsAreOfBf16WhereTheProcessorHasThem) {
  std::vector<int64_t> shape;
  const auto stepped = [&](std::optional<at::ScalarType> dtype, bool present) {
    const Pretended pretended(present);
    const at::Tensor p = parameter(shape);
    give_gradients({p}, 1);
    Muon muon(Params{p}, MuonOptions(0.1).ns_dtype(dtype));
    muon.step();
    return p.detach();
  };
  for (const bool large : {false, true}) {
    shape = large ? std::vector<int64_t>{256, 128} : std::vector<int64_t>{20, 48};
    const at::Tensor fp32 = stepped(at::kFloat, true), bf16 = stepped(at::kBFloat16, true);
    EXPECT_TRUE(at::equal(stepped(at::kFloat, false), fp32)) << shape;
    EXPECT_TRUE(at::equal(stepped(at::kBFloat16, false), bf16)) << shape;
    const at::Tensor rounded = stepped(std::nullopt, false);
    EXPECT_GT(distance(rounded, fp32), 1e-5) << "factors are not rounded";
    EXPECT_LE(distance(rounded, fp32), 0.02 * 0.1);
    EXPECT_FALSE(at::equal(rounded, bf16)) << shape;
    EXPECT_TRUE(at::equal(stepped(std::nullopt, true), large ? bf16 : rounded)) << shape;
  }
  EXPECT_TRUE(has_bf16_products(at::Device(at::kCUDA, 0)));
}

// Else autocast would choose the dtype of each product.
TEST(MuonTest, AProgramThatLeftAutocastOnHasTheSameBits) {
  for (const int64_t side : {32, 400}) {  // small matrices, and those that are cut into strips
    for (const auto& dtype : {std::optional<c10::ScalarType>(), std::optional(at::kFloat)}) {
      const auto step = [&] {
        const Params params{random_tensor({side, 2 * side}, 1), random_tensor({side, side}, 2)};
        give_gradients(params, 1);
        Muon(params, MuonOptions().ns_dtype(dtype)).step();
        return params;
      };
      const Params expected = step();
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const Params got = step();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << side;
    }
  }
}

TEST(MuonTest, FactorsOfARoundedIterationHaveTheBitsOfBf16) {
  const NewtonSchulz o{{3.4445, -4.7750, 2.0315}, 1e-7, 5, at::kFloat, true};
  for (const auto& shape : std::vector<std::vector<int64_t>>{{384, 768}, {200, 100}, {33, 33}}) {
    const at::Tensor x = newton_schulz(random_tensor(shape, 5), o);
    EXPECT_TRUE(at::equal(x, x.to(at::kBFloat16).to(at::kFloat)));
  }
}

// In fp32, where a wrong factor cannot hide. More than six iterations repeat the fourth and the
// fifth, which are a pair, or the fourth alone.
TEST(MuonTest, AnyNumberOfIterationsIsTheFormula) {
  const std::vector<std::vector<int64_t>> shapes = {{200, 410}, {394, 192}, {48, 30}};
  for (const auto& coefficients :
       {std::make_tuple(3.4445, -4.7750, 2.0315), std::make_tuple(2.0, -1.5, 0.5),
        std::make_tuple(1.5, -0.5, 0.0)}) {
    for (const auto& shape : shapes) {
      const at::Tensor matrix = random_tensor(shape, 5);
      NewtonSchulz o{coefficients, 1e-7, 6, at::kFloat};
      const auto exact = iterates(matrix, o, at::kDouble);
      for (o.steps = 0; o.steps <= 6; ++o.steps) {
        Distances found;
        found.add(newton_schulz(matrix, o), exact[o.steps]);
        EXPECT_LE(found.frobenius(), 2e-5)
            << shape[0] << " x " << shape[1] << ", " << o.steps << " steps";
      }
    }
  }
}

TEST(MuonTest, AMatrixOfZerosStaysZero) {
  for (const Mode& mode : kModes) {
    for (const auto& shape :
         std::vector<std::vector<int64_t>>{{384, 1536}, {512, 192}, {384, 384}, {2, 5}}) {
      if (!mode.takes(multiplications(shape))) continue;
      const NewtonSchulz o{{3.4445, -4.7750, 2.0315}, 1e-7, 5, mode.dtype, mode.rounded};
      const at::Tensor zeros = at::zeros(shape);
      EXPECT_EQ(newton_schulz(zeros, o).abs().max().item<double>(), 0);
      EXPECT_EQ(newton_schulz_batch({zeros}, o)[0].abs().max().item<double>(), 0);
    }
  }
}

// A batch is what one by one is, but for rounding, and is not taken for large matrices.
TEST(MuonTest, ABatchIsWhatItsMatricesAreOneByOne) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{30, 50}, {50, 30}, {1, 9}, {9, 1}}) {
    const NewtonSchulz o{{3.4445, -4.7750, 2.0315}, 1e-7, 5, at::kFloat};
    Params matrices;
    for (int i = 0; i < 5; ++i) matrices.push_back(random_tensor(shape, i));
    const Params before = {matrices[0].clone()};
    const auto batch = newton_schulz_batch(matrices, o);
    for (size_t i = 0; i < matrices.size(); ++i) {
      ASSERT_EQ(batch[i].sizes(), matrices[i].sizes());
      EXPECT_LE(distance(batch[i], newton_schulz(matrices[i], o)), 1e-5);
    }
    EXPECT_TRUE(at::equal(before[0], matrices[0])) << "an argument was changed";
    EXPECT_FALSE(is_batched(matrices[0], o)) << "on AMD a batch has other bits than its matrices";
    EXPECT_FALSE(is_batched(at::empty({400, 300}), o));
    const NewtonSchulz bf16{o.coefficients, o.eps, o.steps, at::kBFloat16};
    EXPECT_FALSE(is_batched(at::empty({16, 512}), bf16)) << "one has another product than two";
    EXPECT_TRUE(is_batched(at::empty({17, 512}), bf16));
  }
}

TEST(MuonTest, ASplitIsOneMatrixForEachView) {
  constexpr int64_t kWidth = 12;
  const at::Tensor fused = parameter({3 * kWidth, kWidth}), heads = parameter({2 * kWidth, kWidth});
  Params parts;
  for (const at::Tensor& part : fused.detach().split(kWidth)) parts.push_back(part.clone());
  for (const at::Tensor& part : heads.detach().split_with_sizes({4, 20})) {
    parts.push_back(part.clone());
  }
  const MuonOptions options = MuonOptions(0.1).adjust_lr_fn("match_rms_adamw");
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Params{fused}, std::make_unique<MuonOptions>(MuonOptions(options).split(
                                         split_rows({kWidth, kWidth, kWidth}))));
  groups.emplace_back(Params{heads}, std::make_unique<MuonOptions>(
                                         MuonOptions(options).split(split_rows({4, 20}))));
  Muon split(groups), whole(parts, options);
  for (int step = 0; step < 4; ++step) {
    give_gradients({fused, heads}, step);
    size_t i = 0;
    for (const at::Tensor& g : fused.grad().split(kWidth)) parts[i++].mutable_grad() = g.clone();
    for (const at::Tensor& g : heads.grad().split_with_sizes({4, 20})) {
      parts[i++].mutable_grad() = g.clone();
    }
    split.step();
    whole.step();
  }
  EXPECT_TRUE(at::equal(fused, at::cat({parts[0], parts[1], parts[2]})));
  EXPECT_TRUE(at::equal(heads, at::cat({parts[3], parts[4]})));
}

TEST(MuonTest, WithASplitAParameterMayHaveAnyShape) {
  const at::Tensor experts = parameter({3, 8, 5}), kernel = parameter({6, 2, 3, 3});
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Params{experts}, std::make_unique<MuonOptions>(MuonOptions(0.1).split(
                                           [](const at::Tensor& t) { return t.unbind(0); })));
  groups.emplace_back(Params{kernel},
                      std::make_unique<MuonOptions>(MuonOptions(0.1).split([](const at::Tensor& t) {
                        return Params{t.view({t.size(0), -1})};
                      })));
  const at::Tensor expert = experts.detach()[1].clone(),
                   flat = kernel.detach().view({6, 18}).clone();
  Muon muon(groups), plain(Params{expert, flat}, MuonOptions(0.1));
  give_gradients({experts, kernel}, 1);
  expert.mutable_grad() = experts.grad()[1].clone();
  flat.mutable_grad() = kernel.grad().view({6, 18}).clone();
  muon.step();
  plain.step();
  EXPECT_TRUE(at::equal(experts[1], expert));
  EXPECT_TRUE(at::equal(kernel.view({6, 18}), flat));
}

TEST(MuonTest, ASplitThatDoesNotCoverAParameterOnceIsRefused) {
  const auto error = [](const MuonSplit& split) {
    return error_of([&] { Muon(Params{parameter({6, 4})}, MuonOptions(0.1).split(split)); });
  };
  const std::string once = "every element of a parameter in exactly one";
  expect_words(error([](const at::Tensor& t) { return Params{t.narrow(0, 0, 5)}; }), {once});
  expect_words(error([](const at::Tensor& t) { return Params{t, t.narrow(0, 0, 1)}; }), {once});
  expect_words(error([](const at::Tensor& t) { return Params{t.clone()}; }), {once});
  expect_words(error([](const at::Tensor& t) { return Params{t.view({-1})}; }),
               {"to return matrices, got one of shape [24]"});
  expect_words(error(split_rows({3, 4})), {"a matrix of 7 rows, got a tensor of shape [6, 4]"});
  // resize_rows() asks for a parameter that has no memory yet.
  const at::Tensor resized = at::empty({6, 4}, at::kMeta);
  EXPECT_EQ(error_of([&] {
              Muon(Params{resized}, MuonOptions(0.1).split(split_rows({2, 4})));
            }),
            "");
}

TEST(MuonTest, AStepAsksForViewsOfParametersAndUpdatesAlone) {
  const at::Tensor a = parameter({6, 4}), b = parameter({6, 4});
  int64_t calls = 0;
  Muon muon(Params{a, b}, MuonOptions(0.1).split([&](const at::Tensor& t) {
    ++calls;
    return t.split(3);
  }));
  calls = 0;  // the constructor has looked at them too
  for (int step = 0; step < 3; ++step) {
    give_gradients({a, b}, step);
    muon.step();
  }
  EXPECT_EQ(calls, 3 * 2 * 2);
  // What was found of one split says nothing of the next, which may be set at any time.
  static_cast<MuonOptions&>(muon.param_groups()[0].options()).split([](const at::Tensor& t) {
    return Params{t.narrow(0, 0, 3), t.narrow(0, 2, 3)};
  });
  const at::Tensor before = a.detach().clone();
  expect_words(error_of([&] { muon.step(); }), {"every element of a parameter in exactly one"});
  EXPECT_TRUE(at::equal(a, before)) << "a refused step has changed the parameter";
}

TEST(MuonTest, ParametersThatAreNoMatricesAreRefusedWithWhatToDo) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{}, {7}, {2, 3, 4}}) {
    expect_words(error_of([&] {
                   Muon(Params{parameter({3, 3}), parameter(shape)});
                 }),
                 {"expected matrices, got a parameter of shape", "torch::optim::AdamW",
                  "MuonOptions::split()"});
  }
}

TEST(MuonTest, GroupsHaveTheirOwnOptionsAndParametersWithoutGradientStay) {
  expect_options_of_groups<Muon>({8, 8}, MuonOptions(0.5).weight_decay(0),
                                 MuonOptions(0.25).weight_decay(0), 2,
                                 {at::empty({0, 4}).requires_grad_()});
}

// Python 2.11 overwrites the buffer with the normalised update here.
TEST(MuonTest, AMomentumBufferInBf16KeepsItsValueWithoutNesterov) {
  const at::Tensor p = at::ones({4, 4}, at::kBFloat16).requires_grad_();
  p.mutable_grad() = at::full({4, 4}, 3.0, at::kBFloat16);
  Muon muon(Params{p}, MuonOptions(0.1).momentum(0.5).nesterov(false));
  muon.step();
  const auto& state = static_cast<const MuonParamState&>(*muon.state().begin()->second);
  EXPECT_TRUE(at::equal(state.momentum_buffer(), at::full({4, 4}, 1.5, at::kBFloat16)));
}

// Two roundings, of the factor and of the product, would give other bits.
TEST(MuonTest, WeightDecayIsNotRoundedToTheDtypeOfAParameter) {
  const at::Tensor p = random_tensor({16, 16}, 1).to(at::kBFloat16).requires_grad_();
  const at::Tensor expected = (p.detach().to(at::kFloat) * 0.9).to(at::kBFloat16);
  p.mutable_grad() = at::zeros({16, 16}, at::kBFloat16);
  Muon muon(Params{p}, MuonOptions(0.5).weight_decay(0.2));
  muon.step();
  EXPECT_TRUE(at::equal(p, expected));
}

TEST(MuonTest, SavedAndLoadedItGoesOnInEveryBitAndKeepsItsSplit) {
  const auto split = [] { return split_rows({4, 8}); };
  const MuonOptions options = MuonOptions(0.1)
                                  .weight_decay(0.25)
                                  .momentum(0.75)
                                  .nesterov(false)
                                  .ns_coefficients(std::make_tuple(2.0, -1.5, 0.5))
                                  .eps(1e-5)
                                  .ns_steps(4)
                                  .adjust_lr_fn("match_rms_adamw")
                                  .ns_dtype(at::kFloat)
                                  .batched(false)
                                  .split(split());
  expect_goes_on_from_its_archive<Muon>({parameter({12, 6})}, options,
                                        MuonOptions(7).split(split()));
}

TEST(MuonTest, OptionsThatCannotTrainAreRefusedInEveryGroup) {
  expect_words(refused<Muon>(MuonOptions(-1)), {"learning rate of 0 or more", "-1"});
  expect_words(refused<Muon>(MuonOptions().weight_decay(-2)), {"weight decay of 0 or more", "-2"});
  expect_words(refused<Muon>(MuonOptions().momentum(-3)), {"momentum of 0 or more", "-3"});
  expect_words(refused<Muon>(MuonOptions().ns_steps(100)), {"ns_steps from 0 to 99", "100"});
  expect_words(refused<Muon>(MuonOptions().adjust_lr_fn("none")),
               {"\"match_rms_adamw\"", "\"none\""});
  expect_words(refused<Muon>(MuonOptions().ns_dtype(at::kHalf)), {"kBFloat16 or kFloat", "Half"});
  // A step would take any other text for "match_rms_adamw".
  const Params params{parameter({2, 3})};
  Muon muon(params);
  static_cast<MuonOptions&>(muon.param_groups()[0].options()).adjust_lr_fn("none");
  give_gradients(params, 0);
  const at::Tensor before = params[0].detach().clone();
  expect_words(error_of([&] { muon.step(); }), {"\"match_rms_adamw\"", "\"none\""});
  EXPECT_TRUE(at::equal(params[0], before));
}

}  // namespace
}  // namespace zero
