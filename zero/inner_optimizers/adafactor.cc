// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/adafactor.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/accumulate.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "zero/inner_optimizers/class_adapter.h"
#include "zero/inner_optimizers/own_class.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {

void AdafactorOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta2_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(d);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
}

void AdafactorOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta2_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(eps_t, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, d);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
}

bool operator==(const AdafactorOptions& lhs, const AdafactorOptions& rhs) {
  return lhs.lr() == rhs.lr() && lhs.beta2_decay() == rhs.beta2_decay() && lhs.eps() == rhs.eps() &&
         lhs.d() == rhs.d() && lhs.weight_decay() == rhs.weight_decay() &&
         lhs.maximize() == rhs.maximize();
}

void AdafactorParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(row_var);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(col_var);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(variance);
}

void AdafactorParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, row_var);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, col_var);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, variance);
}

namespace {

void check_options(const AdafactorOptions& o) {
  const auto [eps1, eps2] = o.eps();
  TORCH_CHECK(o.lr() >= 0, "Adafactor: expected a learning rate of 0 or more, got ", o.lr());
  TORCH_CHECK(o.beta2_decay() <= 0, "Adafactor: expected a beta2_decay of 0 or less, got ",
              o.beta2_decay());
  TORCH_CHECK(eps1.value_or(0) >= 0 && eps2 >= 0, "Adafactor: expected eps of 0 or more, got ",
              eps1.value_or(0), " and ", eps2);
  TORCH_CHECK(o.d() >= 1, "Adafactor: expected a clipping threshold d of 1 or more, got ", o.d());
  TORCH_CHECK(o.weight_decay() >= 0, "Adafactor: expected a weight decay of 0 or more, got ",
              o.weight_decay());
}

double machine_epsilon(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return std::numeric_limits<double>::epsilon();
    case c10::ScalarType::Float:
      return std::numeric_limits<float>::epsilon();
    case c10::ScalarType::BFloat16:
      return static_cast<float>(std::numeric_limits<c10::BFloat16>::epsilon());
    case c10::ScalarType::Half:
      return static_cast<float>(std::numeric_limits<c10::Half>::epsilon());
    default:
      TORCH_CHECK(false, "Adafactor: expected parameters of double, float, bfloat16 or half, got ",
                  dtype);
  }
}

void make_moments(AdafactorParamState& state, const at::Tensor& gradient) {
  if (gradient.dim() > 1) {
    std::vector<int64_t> rows = gradient.sizes().vec(), columns = rows;
    rows.back() = 1;
    columns[columns.size() - 2] = 1;
    state.row_var(at::zeros(rows, gradient.options()));
    state.col_var(at::zeros(columns, gradient.options()));
  } else {
    state.variance(at::zeros_like(gradient, at::MemoryFormat::Preserve));
  }
}

// The mean of g^2 over `dim`, which it keeps, without a tensor of all squares.
at::Tensor mean_of_squares(const at::Tensor& g, int64_t dim) {
  return at::linalg_vector_norm(g, 2, dim, /*keepdim=*/true).square_().div_(g.size(dim));
}

// The same over the last dimension but one. On a CPU libtorch's norm walks each column of a matrix
// by itself: a pass over blocks of rows takes 10 ms in place of 188 ms for 4096 x 4096. Blocks
// depend on the length of a row alone, so that a matrix has the same bits in a batch.
at::Tensor mean_of_squares_in_columns(const at::Tensor& g) {
  constexpr int64_t kBlock = int64_t{1} << 16;  // elements
  if (!g.is_cpu() || g.numel() == 0 || c10::isReducedFloatingType(g.scalar_type())) {
    return mean_of_squares(g, -2);
  }
  at::Tensor sum;
  for (const at::Tensor& block : g.split(std::max<int64_t>(1, kBlock / g.size(-1)), -2)) {
    at::Tensor of_block = block.square().sum(-2, /*keepdim=*/true);
    sum = sum.defined() ? sum.add_(of_block) : of_block;
  }
  return sum.div_(g.size(-2));
}

double rms(const at::Tensor& x) {
  return euclidean_norm(x, x.scalar_type()).item<double>() /
         std::sqrt(static_cast<double>(x.numel()));
}

// v, which the caller may write to.
at::Tensor second_moment(const at::Tensor& g, AdafactorParamState& state, double k, double eps1) {
  if (g.dim() <= 1) {
    state.variance().lerp_(g * g, k);
    return state.variance().clone();
  }
  state.row_var().lerp_(mean_of_squares(g, -1), k);
  state.col_var().lerp_(mean_of_squares_in_columns(g), k);
  const at::Tensor mean = state.row_var().mean(-2, /*keepdim=*/true).clamp_min_(eps1);
  return (state.row_var() * state.col_var()).div_(mean);
}

void update(at::Tensor& p, const at::Tensor& gradient, AdafactorParamState& state,
            const AdafactorOptions& o) {
  const double eps1 = std::get<0>(o.eps()).value_or(machine_epsilon(p.scalar_type()));
  const double eps2 = std::get<1>(o.eps());
  const at::Tensor g = o.maximize() ? -gradient : gradient;
  state.step(state.step() + 1);
  const auto t = static_cast<double>(state.step());
  const double alpha = std::max(eps2, rms(p)) * std::min(o.lr(), 1 / std::sqrt(t));
  if (o.weight_decay() != 0) exact_scale(p, 1.0 - o.lr() * o.weight_decay());
  at::Tensor u = second_moment(g, state, std::pow(t, o.beta2_decay()), eps1);
  u.clamp_min_(eps1 * eps1);
  // In 16 bits, libtorch's rsqrt_() rounds once or twice, depending on the place in the tensor and
  // on the width of a vector.
  c10::isReducedFloatingType(u.scalar_type()) ? u.sqrt_().reciprocal_() : u.rsqrt_();
  u.mul_(g);
  p.add_(u, -alpha / std::max(1.0, rms(u) / o.d()));
}

}  // namespace

Adafactor::Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                     AdafactorOptions defaults)
    : Optimizer(param_groups, std::make_unique<AdafactorOptions>(defaults)) {
  check_options(defaults);
  take_options(param_groups_, param_groups, check_options);
}

Adafactor::Adafactor(std::vector<at::Tensor> params, AdafactorOptions defaults)
    : Adafactor({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

at::Tensor Adafactor::step(LossClosure closure) {
  return step_each<AdafactorOptions>(
      closure, "Adafactor", param_groups_,
      [&](at::Tensor& p, const at::Tensor& gradient, const AdafactorOptions& o) {
        if (p.numel() == 0) return;
        auto& state = state_in<AdafactorParamState>(
            state_[p.unsafeGetTensorImpl()], [&](auto& made) { make_moments(made, gradient); });
        update(p, gradient, state, o);
      });
}

void Adafactor::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdafactorParamState, AdafactorOptions>(archive, *this);
}

void Adafactor::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdafactorParamState, AdafactorOptions>(archive, *this);
}

namespace {

constexpr double kNoEps = -1.0;  // stands for the machine epsilon

// The variances of rows and columns have a size of their own.
class AdafactorAdapter : public ClassAdapter<Adafactor, AdafactorOptions, AdafactorParamState> {
 public:
  AdafactorAdapter()
      : ClassAdapter(
            "zero::Adafactor",
            {ZERO_OPTION(AdafactorOptions, lr),
             ZERO_OPTION(AdafactorOptions, beta2_decay),
             {"eps1",
              [](const AdafactorOptions& o) { return std::get<0>(o.eps()).value_or(kNoEps); },
              [](AdafactorOptions& o, double value) {
                std::get<0>(o.eps()) =
                    value == kNoEps ? std::nullopt : std::optional<double>(value);
              }},
             ZERO_ELEMENT(AdafactorOptions, "eps2", eps, 1),
             ZERO_OPTION(AdafactorOptions, d),
             ZERO_OPTION(AdafactorOptions, weight_decay),
             ZERO_OPTION(AdafactorOptions, maximize)},
            {ZERO_STATE(AdafactorParamState, variance, kPlain, kWithSomeOptions)}) {}

  bool needs_whole_parameters() const override { return true; }
  void check_options(const Options& options) const override {
    zero::check_options(static_cast<const AdafactorOptions&>(options));
  }

  void visit_tensors(const State& state, const VisitTensor& visit) const override {
    ClassAdapter::visit_tensors(state, visit);
    const auto& own = static_cast<const AdafactorParamState&>(state);
    if (own.row_var().defined()) visit("row_var", own.row_var());
    if (own.col_var().defined()) visit("col_var", own.col_var());
  }

  InnerState read_state(const Optimizer& optimizer, const State& state,
                        const at::Tensor& parameter) const override {
    InnerState result = ClassAdapter::read_state(optimizer, state, parameter);
    const auto& own = static_cast<const AdafactorParamState&>(state);
    if (own.row_var().defined()) result.uncut.emplace_back("row_var", own.row_var().reshape({-1}));
    if (own.col_var().defined()) result.uncut.emplace_back("col_var", own.col_var().reshape({-1}));
    return result;
  }

  std::unique_ptr<State> make_state(Optimizer& optimizer, int64_t group,
                                    const at::Tensor& parameter, const InnerState& content,
                                    Moments moments) const override {
    InnerState cut = content;
    cut.uncut.clear();
    auto state = ClassAdapter::make_state(optimizer, group, parameter, cut, moments);
    auto& own = static_cast<AdafactorParamState&>(*state);
    const bool factored = parameter.dim() > 1;
    TORCH_CHECK(own.variance().defined() != factored && content.uncut.size() == (factored ? 2 : 0),
                "state of zero::Adafactor: expected ",
                factored ? "row_var and col_var" : "variance", " of a parameter of shape ",
                parameter.sizes(), ", got others");
    for (const auto& [name, tensor] : content.uncut) {
      std::vector<int64_t> sizes = parameter.sizes().vec();
      sizes[sizes.size() - (name == "row_var" ? 1 : 2)] = 1;
      TORCH_CHECK((name == "row_var" || name == "col_var") && tensor.scalar_type() == at::kFloat &&
                      tensor.numel() == c10::multiply_integers(sizes),
                  "state ", name, " of zero::Adafactor: expected row_var or col_var of ",
                  c10::multiply_integers(sizes), " elements of Float, got ", tensor.numel(), " of ",
                  tensor.scalar_type());
      (name == "row_var" ? own.row_var() : own.col_var()) = tensor.view(sizes);
    }
    TORCH_CHECK(own.row_var().defined() == factored && own.col_var().defined() == factored,
                "state of zero::Adafactor: expected row_var and col_var, got one of them twice");
    return state;
  }
};

}  // namespace

const OptimizerAdapter& adafactor_adapter() {
  static const AdafactorAdapter adapter;
  return adapter;
}

}  // namespace zero
