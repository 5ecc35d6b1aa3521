// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/same_bits_run.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>

#include "tests/kernels/reference.h"
#include "zero/adafactor.h"
#include "zero/combined_optimizer.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/lamb.h"
#include "zero/lion.h"
#include "zero/muon.h"

namespace zero {
namespace {

constexpr double kRate = 0.01;
constexpr double kMatrixDecay = 0.1;
constexpr double kOtherDecay = 0.02;

// In the order of memory.
at::Tensor flat(const at::Tensor& t) { return (t.is_contiguous() ? t : t.t()).reshape(-1); }

std::string numbered(const char* what, int step, size_t i) {
  return "step " + std::to_string(step) + " " + what + " " + std::to_string(i);
}

// Elements of very different sizes.
at::Tensor magnitudes(int64_t numel) {
  static std::mutex mutex;
  static std::map<int64_t, at::Tensor> known;
  const std::lock_guard<std::mutex> lock(mutex);
  at::Tensor& result = known[numel];
  if (!result.defined()) {
    result = at::pow(10.0, at::remainder(at::arange(numel, at::kFloat), 5) - 4).to(at::kFloat);
  }
  return result;
}

std::unique_ptr<SameBitsModel> make_model(const SameBitsCase& c,
                                          const std::optional<std::vector<at::Tensor>>& initial) {
  if (c.make_model) return c.make_model(c);
  return std::make_unique<SameBitsModel>(initial ? *initial : same_bits_values(c.dtype));
}

bool uses(const SameBitsCase& c, size_t parameter, int step, int64_t number) {
  if (!c.drops) return true;
  if (parameter == kUnusedValue) return false;
  if (step % 4 == 1 && number == 1) return false;  // drops all
  switch (parameter) {
    case 2:
      return (number + step) % 3 != 1;
    case 3:  // used by no micro-batch, by one, or by all
      return step % 4 == 1 ? false : step % 4 == 2 ? number == 0 : true;
    case 5:
      return number == c.micro_batches - 1;
    default:
      return true;
  }
}

}  // namespace

std::string first_difference(const Record& expected, const Record& got) {
  for (size_t i = 0; i < std::min(expected.size(), got.size()); ++i) {
    const at::Tensor a = expected[i].value.contiguous(), b = got[i].value.contiguous();
    if (expected[i].name != got[i].name) {
      return "got " + got[i].name + " for " + expected[i].name;
    }
    if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
      return expected[i].name + ": other sizes or dtype";
    }
    const auto bytes = static_cast<int64_t>(a.element_size());
    const auto* left = static_cast<const char*>(a.const_data_ptr());
    const auto* right = static_cast<const char*>(b.const_data_ptr());
    int64_t count = 0, first = -1;
    for (int64_t k = 0; k < a.numel(); ++k) {
      if (std::memcmp(left + k * bytes, right + k * bytes, bytes) == 0) continue;
      if (count++ == 0) first = k;
    }
    if (count == 0) continue;
    std::ostringstream text;
    text.precision(17);
    text << expected[i].name << ": " << count << " of " << a.numel() << " differ, the first at "
         << first << ": " << b.reshape(-1)[first].item<double>() << " for "
         << a.reshape(-1)[first].item<double>();
    return text.str();
  }
  if (expected.size() != got.size()) {
    return std::to_string(got.size()) + " values for " + std::to_string(expected.size());
  }
  return {};
}

std::vector<at::Tensor> same_bits_values(c10::ScalarType dtype) {
  std::vector<at::Tensor> result{random_tensor({41}, 1),   random_tensor({47, 110}, 2),
                                 random_tensor({2600}, 3), random_tensor({4095}, 4),
                                 random_tensor({1}, 5),    random_tensor({20, 30}, 6).t(),
                                 random_tensor({0}, 7),    random_tensor({11}, 8)};
  for (at::Tensor& t : result) t = t.to(dtype);
  return result;
}

SameBitsModel::SameBitsModel(const std::vector<at::Tensor>& initial) {
  for (size_t i = 0; i < initial.size(); ++i) {
    values.push_back(register_parameter("value" + std::to_string(i), initial[i].clone()));
  }
}

at::Tensor SameBitsModel::loss_of(const SameBitsCase& c, int step, int64_t number) const {
  return loss(same_bits_gradients(c, values, step, number), same_bits_scale(number));
}

at::Tensor SameBitsModel::loss(const std::vector<at::Tensor>& gradients, double scale) const {
  at::Tensor sum = at::zeros({});
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const at::Tensor x = values[i].to(at::kFloat);
    sum = sum + at::sum(x * (1 <= i && i <= 3 ? gradients[i] + 0.125 * x : gradients[i]));
  }
  return sum * scale;
}

std::vector<at::Tensor> same_bits_gradients(const SameBitsCase& c,
                                            const std::vector<at::Tensor>& values, int step,
                                            int64_t number) {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!uses(c, i, step, number)) {
      result.emplace_back();
      continue;
    }
    const auto seed =
        static_cast<uint64_t>(10000 * step + 100 * static_cast<int>(number) + static_cast<int>(i));
    const at::Tensor& v = values[i];
    at::Tensor g = random_tensor(v.sizes(), seed) * magnitudes(v.numel()).view(v.sizes());
    if (i == 0) g.narrow(0, 3, 9).fill_(-0.0);
    if (i == 5) g.narrow(0, 3, 2).fill_(-0.0);
    if (step == c.bad_step && i == 1 && number == c.micro_batches / 2) {
      g[5][3] = std::numeric_limits<float>::infinity();
    }
    result.push_back(g);
  }
  return result;
}

std::unique_ptr<torch::optim::Optimizer> same_bits_inner(Inner inner,
                                                         const std::vector<at::Tensor>& values) {
  using namespace torch::optim;
  std::vector<at::Tensor> matrices, others;
  for (const at::Tensor& v : values) (v.dim() == 2 ? matrices : others).push_back(v);
  const auto make = [&]<typename Optimizer, typename Options>(Options defaults) {
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(matrices,
                        std::make_unique<Options>(Options(defaults).weight_decay(kMatrixDecay)));
    groups.emplace_back(others,
                        std::make_unique<Options>(Options(defaults).weight_decay(kOtherDecay)));
    return std::unique_ptr<torch::optim::Optimizer>(
        std::make_unique<Optimizer>(std::move(groups), defaults));
  };
  switch (inner) {
    case Inner::kAdamW:
      return make.operator()<AdamW, AdamWOptions>(AdamWOptions(kRate));
    case Inner::kSgdMomentum:
      return make.operator()<SGD, SGDOptions>(SGDOptions(kRate).momentum(0.9));
    case Inner::kLion:
      return make.operator()<Lion, LionOptions>(LionOptions(kRate));
    case Inner::kLamb:
      return make.operator()<Lamb, LambOptions>(LambOptions(kRate));
    case Inner::kAdafactor:
      return make.operator()<Adafactor, AdafactorOptions>(AdafactorOptions(kRate));
    case Inner::kMuon: {
      std::vector<std::unique_ptr<Optimizer>> parts;
      parts.push_back(
          std::make_unique<Muon>(matrices, MuonOptions(0.02).weight_decay(kMatrixDecay)));
      parts.push_back(
          std::make_unique<AdamW>(others, AdamWOptions(kRate).weight_decay(kOtherDecay)));
      return std::make_unique<CombinedOptimizer>(std::move(parts));
    }
    default:
      TORCH_CHECK(false, "no such inner optimizer in these tests");
  }
}

at::Tensor tree_sum(const std::vector<at::Tensor>& leaves, size_t begin, size_t count) {
  if (count == 1) return leaves[begin];
  const at::Tensor left = tree_sum(leaves, begin, count / 2);
  if (begin + count / 2 >= leaves.size()) return left;
  const at::Tensor right = tree_sum(leaves, begin + count / 2, count / 2);
  if (!left.defined() && !right.defined()) return {};
  if (!left.defined()) return right + 0.0;
  return right.defined() ? left + right : left + 0.0;
}

at::Tensor tree_sum(const std::vector<at::Tensor>& leaves) {
  return tree_sum(leaves, 0, std::bit_ceil(leaves.size()));
}

double exact_norm(const std::vector<at::Tensor>& gradients) {
  // Partial sums that do not overlap, by Shewchuk, "Adaptive Precision Floating-Point Arithmetic",
  // 1997: their sum is exact, and that of all of them is rounded in the end.
  std::vector<double> partials;
  const auto add = [&](double x) {
    std::vector<double> next;
    for (double y : partials) {
      if (std::fabs(x) < std::fabs(y)) std::swap(x, y);
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0) next.push_back(low);
      x = high;
    }
    next.push_back(x);
    partials = std::move(next);
  };
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    const at::Tensor line = flat(gradient).contiguous();
    const float* values = line.const_data_ptr<float>();
    for (int64_t first = 0; first < line.numel(); first += 256) {
      double sum = 0;
      for (int64_t i = first; i < std::min(first + 256, line.numel()); ++i) {
        sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
      }
      add(sum);
    }
  }
  long double sum = 0;
  for (auto x = partials.rbegin(); x != partials.rend(); ++x) sum += *x;
  return std::sqrt(static_cast<double>(sum));
}

SameBitsRun::SameBitsRun(const Group& group, const SameBitsCase& given,
                         std::optional<std::vector<at::Tensor>> initial,
                         const std::vector<bool>& frozen)
    : c(given), owned_model(make_model(given, initial)) {
  if (group.rank() != 0) {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& v : model.values) v.fill_(group.rank());  // rank 0's are sent
  }
  for (size_t i = 0; i < frozen.size(); ++i) model.values[i].requires_grad_(!frozen[i]);
  optimizer =
      std::make_unique<ZeroOptimizer>(model, same_bits_inner(c.inner, model.values), group,
                                      ZeroOptions(c.options).micro_batches(c.micro_batches));
}

void SameBitsRun::pass(int step, int64_t number) {
  optimizer->wait_for(model);
  optimizer->backward(model.loss_of(c, step, number));
}

void SameBitsRun::passes(int step) {
  for (const int64_t number : optimizer->micro_batches()) pass(step, number);
}

void SameBitsRun::add(const std::string& name, const at::Tensor& value) {
  record.push_back({name, value.defined() ? value.detach().clone() : at::zeros({0, 0})});
}

void SameBitsRun::finish(int step) {
  if (c.looks) {
    for (size_t i = 0; i < model.values.size(); ++i) {
      add(numbered("gradient", step, i), optimizer->gradient(model.values[i]));
    }
  }
  if (c.looks || c.max_norm) {
    add(numbered("norm", step, 0),
        c.max_norm ? optimizer->clip_grad_norm_(*c.max_norm) : optimizer->grad_norm());
  }
  optimizer->step();
  optimizer->wait_for(model);
  EXPECT_EQ(optimizer->step_skipped(), step == c.bad_step);
  for (size_t i = 0; i < model.values.size(); ++i) {
    add(numbered("master", step, i), optimizer->master(model.values[i]));
    add(numbered("working", step, i), model.values[i]);
  }
  if (c.looks && c.options.ema()) {
    const auto guard = optimizer->use_ema();
    for (size_t i = 0; i < model.values.size(); ++i) {
      add(numbered("average", step, i), model.values[i]);
    }
  }
}

SameBitsPlain::SameBitsPlain(const SameBitsCase& c) : c_(c), model_(make_model(c, std::nullopt)) {
  for (const at::Tensor& v : model_->values) {
    masters_.push_back(v.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    first_.push_back(at::zeros_like(masters_.back()));
    second_.push_back(at::zeros_like(masters_.back()));
    counts_.push_back(0);
  }
}

void SameBitsPlain::step(int number) {
  std::vector<std::vector<at::Tensor>> leaves(model_->values.size());
  for (int64_t k = 0; k < c_.micro_batches; ++k) {
    for (const at::Tensor& v : model_->values) v.mutable_grad().reset();
    const at::Tensor loss = model_->loss_of(c_, number, k);
    if (loss.requires_grad()) loss.backward();
    for (size_t p = 0; p < model_->values.size(); ++p) {
      const at::Tensor& g = model_->values[p].grad();
      leaves[p].push_back(g.defined() ? g.to(at::kFloat) : at::Tensor());
    }
  }
  std::vector<at::Tensor> gradients;
  bool finite = true, nan = false;
  for (auto& of_parameter : leaves) {
    at::Tensor g = tree_sum(of_parameter);
    if (g.defined() && c_.options.reduction() == Reduction::kMean) {
      g = g * (1.0F / static_cast<float>(c_.micro_batches));
    }
    if (g.defined()) {
      finite = finite && at::isfinite(g).all().item<bool>();
      nan = nan || at::isnan(g).any().item<bool>();
    }
    gradients.push_back(g);
  }
  const auto add = [&](const char* what, size_t i, const at::Tensor& value) {
    record.push_back(
        {numbered(what, number, i), value.defined() ? value.detach().clone() : at::zeros({0, 0})});
  };
  if (c_.looks) {
    for (size_t p = 0; p < gradients.size(); ++p) add("gradient", p, gradients[p]);
  }
  const double norm = finite ? exact_norm(gradients)
                      : nan  ? std::numeric_limits<double>::quiet_NaN()
                             : std::numeric_limits<double>::infinity();
  if (c_.looks || c_.max_norm) add("norm", 0, at::full({}, norm, at::kDouble));
  float coefficient = 1.0F;
  if (c_.max_norm) coefficient = static_cast<float>(std::min(1.0, *c_.max_norm / (norm + 1e-6)));
  const at::NoGradGuard no_grad;
  for (size_t p = 0; finite && p < gradients.size(); ++p) {
    if (!gradients[p].defined()) continue;
    update(p, gradients[p], c_.max_norm ? &coefficient : nullptr);
    model_->values[p].copy_(masters_[p]);
  }
  for (size_t p = 0; p < gradients.size(); ++p) {
    add("master", p, masters_[p]);
    add("working", p, model_->values[p]);
  }
}

void SameBitsPlain::update(size_t p, const at::Tensor& gradient, const float* coefficient) {
  TORCH_CHECK(gradient.strides() == masters_[p].strides());
  const double decay = masters_[p].dim() == 2 ? kMatrixDecay : kOtherDecay;
  ++counts_[p];
  const auto fill = [&](auto& s, auto& o) {
    s.master = masters_[p].mutable_data_ptr<float>();
    s.gradient = gradient.const_data_ptr<float>();
    s.numel = masters_[p].numel();
    o.lr = kRate;
    o.weight_decay = decay;
  };
  if (c_.inner == Inner::kAdamW) {
    kernels::AdamSegment s;
    kernels::AdamOptions o;
    fill(s, o);
    s.exp_avg = first_[p].mutable_data_ptr<float>();
    s.exp_avg_sq = second_[p].mutable_data_ptr<float>();
    s.step = counts_[p];
    kernels::reference::adam_step({s}, o, coefficient, nullptr, at::kFloat);
  } else {
    TORCH_CHECK(c_.inner == Inner::kSgdMomentum);
    kernels::SgdSegment s;
    kernels::SgdOptions o;
    fill(s, o);
    s.momentum = first_[p].mutable_data_ptr<float>();
    s.first_step = counts_[p] == 1;
    o.momentum = 0.9;
    kernels::reference::sgd_step({s}, o, coefficient, nullptr, at::kFloat);
  }
}

struct JoinedState::Shared {
  std::mutex mutex;
  std::map<std::string, at::Tensor> whole;
};

std::shared_ptr<JoinedState::Shared> JoinedState::make() { return std::make_shared<Shared>(); }

void JoinedState::add(const SameBitsRun& run) {
  const ZeroOptimizer& optimizer = *run.optimizer;
  const Plan& plan = optimizer.plan();
  const auto& groups = optimizer.inner().param_groups();
  std::vector<at::Tensor> managed;
  for (const at::Tensor& v : run.model.values) {
    if (v.requires_grad()) managed.push_back(v);
  }
  std::vector<size_t> next(groups.size(), 0);
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
    for (const Segment& s : plan.segments(b, optimizer.group().rank())) {
      const at::Tensor& parameter = managed[s.parameter];
      size_t g = 0;
      for (; g < groups.size(); ++g) {
        const auto& visible = optimizer.param_groups()[g].params();
        if (std::any_of(visible.begin(), visible.end(),
                        [&](const at::Tensor& t) { return t.is_same(parameter); })) {
          break;
        }
      }
      const at::Tensor& master = groups[g].params()[next[g]++];
      const auto found = optimizer.inner().state().find(master.unsafeGetTensorImpl());
      if (found == optimizer.inner().state().end()) continue;
      adapter_of(*found->second)
          .visit_tensors(*found->second, [&](const char* kind, const at::Tensor& tensor) {
            at::Tensor& whole =
                shared_->whole[std::string(kind) + " " + std::to_string(s.parameter)];
            if (tensor.numel() == s.numel && s.numel < parameter.numel()) {
              if (!whole.defined()) {
                whole = at::full({parameter.numel()}, std::numeric_limits<double>::quiet_NaN(),
                                 tensor.options());
              }
              whole.narrow(0, s.begin, s.numel).copy_(tensor.reshape(-1));
            } else if (tensor.numel() == parameter.numel() && tensor.dim() == 2) {
              whole = flat(tensor).clone();
            } else {
              whole = tensor.reshape(-1).clone();
            }
          });
    }
  }
}

Record JoinedState::record() const {
  Record result;
  for (const auto& [name, value] : shared_->whole) result.push_back({"state " + name, value});
  return result;
}

Record run_same_bits(const SameBitsCase& c, int world_size) {
  Record result;
  JoinedState state;
  const bool fp32_state = c.options.moments() == Moments::kFloat32;
  run_ranks(
      world_size,
      [&](const Group& group) {
        SameBitsRun run(group, c);
        for (int n = 0; n < c.steps; ++n) run.step(n);
        run.optimizer->check_replicas();
        if (fp32_state) state.add(run);
        if (group.rank() == 0) result = run.record;
      },
      on(c.wire, std::chrono::seconds(60), world_size > 1 ? c.ranks_per_machine : 0));
  for (const NamedValue& value : state.record()) result.push_back(value);
  return result;
}

Record run_plain(const SameBitsCase& c) {
  SameBitsPlain plain(c);
  for (int n = 0; n < c.steps; ++n) plain.step(n);
  return plain.record;
}

void expect_plain_bits(Record expected, Record got) {
  got.resize(expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].name.find("norm") == std::string::npos) continue;
    const auto a = expected[i].value.item<double>(), b = got[i].value.item<double>();
    if (a != b && !(std::isnan(a) && std::isnan(b))) {
      EXPECT_LE(std::fabs(a - b), 4e-15 * a) << expected[i].name;
    }
    expected[i].value = got[i].value;
  }
  EXPECT_EQ(first_difference(expected, got), "");
}

}  // namespace zero
