// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/plain_sequence.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/training/plain_moments.h"

namespace zero {

at::Tensor grid(at::IntArrayRef shape, uint64_t seed, int64_t range, double divisor) {
  std::mt19937_64 random(seed);
  at::Tensor result = at::empty(shape, at::kFloat);
  float* const data = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    const auto value = static_cast<int64_t>(random() % static_cast<uint64_t>(2 * range + 1));
    data[i] = static_cast<float>(static_cast<double>(value - range) / divisor);
  }
  return result;
}

SequenceModelImpl::SequenceModelImpl(const CallSequence& sequence, uint64_t seed,
                                     at::Device device) {
  const auto manage = [&](const std::string& name, const at::Tensor& tensor, size_t unit) {
    const bool expert = sequence.mesh_kind == MeshKind::kExperts && tensor.dim() != 2;
    managed_.push_back({name, tensor, static_cast<int>(unit), expert});
  };
  const auto dtype = at::TensorOptions().dtype(sequence.dtype).device(device);
  for (size_t i = 0; i < sequence.layers.size(); ++i) {
    const auto [inputs, outputs] = sequence.layers[i];
    const std::string name = "layer" + std::to_string(i);
    layers.push_back(register_module(name, Affine(inputs, outputs, device)));
    layers.back()->to(sequence.dtype);
    manage(name + ".weight", layers.back()->weight, i);
    manage(name + ".bias", layers.back()->bias, i);
  }
  gain = register_parameter("gain", at::zeros({1}, dtype));
  odd = register_parameter(
      "odd", at::zeros({1, 3, 1, 2}, dtype).contiguous(at::MemoryFormat::ChannelsLast));
  empty = register_parameter("empty", at::zeros({0}, dtype));
  frozen = register_parameter("frozen", at::zeros({5}, dtype), /*requires_grad=*/false);
  buffer = register_buffer("buffer", at::zeros({3}, device));
  manage("gain", gain, layers.size());
  manage("odd", odd, layers.size());
  manage("empty", empty, layers.size());
  at::NoGradGuard no_grad;
  for (const Managed& p : managed_) p.tensor.copy_(grid(p.tensor.sizes(), ++seed, 8, 8));
  frozen.copy_(grid({5}, ++seed, 8, 8));
  buffer.copy_(grid({3}, ++seed, 8, 8));
}

std::vector<at::Tensor> SequenceModelImpl::tensors() const {
  std::vector<at::Tensor> result;
  for (const Managed& p : managed_) result.push_back(p.tensor);
  return result;
}

at::Tensor SequenceModelImpl::unit_loss(int unit, uint64_t seed, bool nonfinite) {
  const auto constant = [&](at::IntArrayRef shape, double divisor) {
    at::Tensor values = grid(shape, ++seed, 2, divisor);
    if (nonfinite && divisor == 4) {
      values.view({-1})[0] = seed % 2 == 0 ? std::numeric_limits<float>::infinity()
                                           : std::numeric_limits<float>::quiet_NaN();
    }
    return values.to(gain.device(), gain.scalar_type());
  };
  if (unit == static_cast<int>(layers.size())) {
    return at::sum(gain * constant({1}, 4)) + at::sum(odd * constant({1, 3, 1, 2}, 4)) +
           at::sum(empty);
  }
  Affine layer = layers[unit];
  const at::Tensor x = constant({2, layer->weight.size(1)}, 1);
  return at::sum(layer(x) * constant({2, layer->weight.size(0)}, 4));
}

at::Tensor SequenceModelImpl::loss(const Pass& pass) {
  at::Tensor sum = at::zeros({}, gain.options().requires_grad(false));
  for (int unit = 0; unit <= static_cast<int>(layers.size()); ++unit) {
    if ((pass.units >> unit & 1) == 0) continue;
    const uint64_t seed = pass.seed + 64 * static_cast<unsigned>(unit);
    sum = sum + unit_loss(unit, seed, pass.nonfinite == unit);
    if (pass.again == unit) sum = sum + unit_loss(unit, seed + 32, false);
  }
  return sum;
}

std::vector<at::Tensor> SequenceModelImpl::gradients_by_hand(const Pass& pass) const {
  std::vector<at::Tensor> result(managed_.size());
  for (size_t i = 0; i < managed_.size(); ++i) {
    const Managed& p = managed_[i];
    if ((pass.units >> p.unit & 1) == 0) continue;
    result[i] = grid(p.tensor.sizes(), pass.seed + i, 8, 4);
    if (pass.nonfinite == p.unit && p.tensor.numel() > 0) {
      result[i].view({-1})[0] = std::numeric_limits<float>::infinity();
    }
    result[i] = result[i].to(p.tensor.device(), p.tensor.scalar_type());
  }
  return result;
}

std::vector<at::Tensor> SequenceModelImpl::edited(const Event& event, int rank) const {
  std::vector<at::Tensor> result(managed_.size());
  for (size_t i = 0; i < managed_.size(); ++i) {
    if ((event.units >> managed_[i].unit & 1) == 0) continue;
    result[i] =
        grid(managed_[i].tensor.sizes(), event.seed + i + 100 * static_cast<uint64_t>(rank), 16, 8);
  }
  return result;
}

std::vector<size_t> SequenceModelImpl::resized(const Event& event) {
  const auto weight = static_cast<size_t>(2 * event.layer);
  return {weight, weight + 1};
}

at::Tensor SequenceModelImpl::resized_value(const Event& event, size_t parameter) const {
  if (!event.has_values) return {};
  std::vector<int64_t> sizes = managed_[parameter].tensor.sizes().vec();
  sizes[0] = static_cast<int64_t>(event.rows.size());
  return grid(sizes, event.seed + parameter, 8, 8);
}

void SequenceModelImpl::set_rows(size_t layer, int64_t rows) {
  for (const at::Tensor& p : {layers[layer]->weight, layers[layer]->bias}) {
    std::vector<int64_t> sizes = p.sizes().vec();
    sizes[0] = rows;
    p.set_data(at::zeros(sizes, p.options().requires_grad(false)));
  }
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(Inner inner,
                                                        const std::vector<at::Tensor>& parameters) {
  using namespace torch::optim;
  std::vector<at::Tensor> matrices, others;
  for (const at::Tensor& p : parameters) (p.dim() == 2 ? matrices : others).push_back(p);
  const auto make = [&]<typename Optimizer, typename Options>(Options defaults) {
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(matrices, std::make_unique<Options>(Options(defaults).weight_decay(0.05)));
    groups.emplace_back(others, std::make_unique<Options>(Options(defaults).weight_decay(0.001)));
    return std::unique_ptr<torch::optim::Optimizer>(
        std::make_unique<Optimizer>(std::move(groups), defaults));
  };
  // Shards of several rounds are sums of thirds, which may leave 1e-8 where the exact sum is 0; the
  // usual eps would make a step of it.
  constexpr double kEps = 0.05;
  switch (inner) {
    case Inner::kSgd:
      return make.operator()<SGD, SGDOptions>(SGDOptions(0.05));
    case Inner::kSgdMomentum:
      return make.operator()<SGD, SGDOptions>(SGDOptions(0.05).momentum(0.9));
    case Inner::kAdamW:
      return make.operator()<AdamW, AdamWOptions>(AdamWOptions(0.02).eps(kEps));
    default:
      return make.operator()<Adam, AdamOptions>(AdamOptions(0.02).eps(kEps).amsgrad(true));
  }
}

namespace {

class PlainRun {
 public:
  PlainRun(const CallSequence& sequence, int rank)
      : s_(sequence),
        rank_(rank),
        model_(sequence, model_seed(sequence, 0)),
        sums_(sequence.world_size, std::vector<at::Tensor>(model_->managed().size())) {
    const SequenceModel own(sequence, model_seed(sequence, rank));
    for (size_t i = 0; i < sums_[0].size(); ++i) {
      const at::Tensor initial = (is_expert(i) ? own : model_)->managed()[i].tensor;
      masters_.push_back(initial.detach().to(at::kDouble).requires_grad_());
    }
    average();
    optimizer_ = make_optimizer(s_.inner, masters_);
    if (s_.has_moments) make_moments();
    if (s_.options.loss_scaler()) scale_ = s_.options.loss_scaler()->initial_scale();
  }

  Expected run(const Event& event) {
    for (int r = 0; r < s_.world_size; ++r) {
      for (const Pass& pass : event.passes[r]) add(pass, sums_[r]);
    }
    at::NoGradGuard no_grad;
    Expected e;
    for (size_t i = 0; i < masters_.size(); ++i) {
      e.gradients.push_back(is_expert(i) ? sums_[rank_][i] : reduced(i));
    }
    act(event, e);
    for (const at::Tensor& p : masters_) e.parameters.push_back(p.detach().clone());
    e.averages = averages_;
    e.frozen = model_->frozen.clone();
    e.buffer = model_->buffer.clone();
    e.loss_scale = scale_;
    return e;
  }

 private:
  void make_moments() {
    std::vector<std::string> names;
    std::vector<int64_t> numels;
    for (const SequenceModelImpl::Managed& p : model_->managed()) {
      names.push_back(p.name);
      numels.push_back(p.tensor.numel());
    }
    moments_.emplace(s_.inner, names, numels, s_.options.moments());
  }

  bool is_expert(size_t parameter) const { return model_->managed()[parameter].expert; }

  void add(const Pass& pass, std::vector<at::Tensor>& sums) {
    rounds_ = rounds_ || needs_round(pass);
    if (pass.kind == PassKind::kOnlyGrad || pass.kind == PassKind::kNoGraph) return;
    std::vector<at::Tensor> gradients;
    if (pass.kind == PassKind::kByHand) {
      gradients = model_->gradients_by_hand(pass);
    } else {
      for (const at::Tensor& p : model_->tensors()) p.mutable_grad().reset();
      model_->loss(pass).backward();
      for (const at::Tensor& p : model_->tensors()) gradients.push_back(p.grad());
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      if (!gradients[i].defined()) continue;
      const at::Tensor exact = gradients[i].to(at::kDouble);
      sums[i] = sums[i].defined() ? sums[i] + exact : exact;
    }
  }

  at::Tensor reduced(size_t parameter) const {
    at::Tensor sum;
    for (const auto& of_rank : sums_) {
      const at::Tensor& g = of_rank[parameter];
      if (g.defined()) sum = sum.defined() ? sum + g : g;
    }
    const bool mean = s_.reduction == Reduction::kMean;
    return sum.defined() && mean ? sum / s_.world_size : sum;
  }

  // The gradients of now: of each parameter one, and of an expert's each rank's. clipped(): after
  // the clips since the last step.
  using Gradients = std::vector<std::vector<at::Tensor>>;
  Gradients unclipped(const Expected& e) const {
    Gradients result(masters_.size());
    for (size_t i = 0; i < result.size(); ++i) {
      if (!is_expert(i)) result[i] = {e.gradients[i]};
      for (size_t r = 0; is_expert(i) && r < sums_.size(); ++r) result[i].push_back(sums_[r][i]);
    }
    return result;
  }
  Gradients clipped(const Expected& e) const {
    Gradients result = unclipped(e);
    for (const Event& clip : clips_) {
      const double limit = *clip.max_norm;
      const bool of_values = clip.action == Action::kClipValue;
      const double factor =
          of_values ? 1.0 : std::min(1.0, limit / (norm(result, clip.norm_type) + 1e-6));
      for (auto& of_parameter : result) {
        for (at::Tensor& g : of_parameter) {
          if (g.defined()) g = of_values ? g.clamp(-limit, limit) : g * factor;
        }
      }
    }
    return result;
  }

  static double norm(const Gradients& gradients, double type) {
    std::vector<at::Tensor> flat = {at::zeros({1}, at::kDouble)};
    for (const auto& of_parameter : gradients) {
      for (const at::Tensor& g : of_parameter) {
        if (g.defined()) flat.push_back(g.reshape({-1}));
      }
    }
    return at::norm(at::cat(flat), type).item<double>();
  }

  // Whether a gradient is not finite before the clips, which may hide an infinity.
  bool overflows(const Expected& e) const {
    const auto finite = [](const at::Tensor& g) {
      return !g.defined() || std::isfinite(at::norm(g, 1.0).item<double>());
    };
    for (size_t i = 0; i < masters_.size(); ++i) {
      if (!finite(e.gradients[i])) return true;
      for (const auto& of_rank : sums_) {
        if (is_expert(i) && !finite(of_rank[i])) return true;
      }
    }
    return false;
  }

  void act(const Event& event, Expected& e) {
    switch (event.action) {
      case Action::kNorm:
      case Action::kClip:
        e.norm = norm(clipped(e), event.norm_type);
        [[fallthrough]];
      case Action::kClipValue:
        if (event.max_norm) clips_.push_back(event);
        break;
      case Action::kStep:
        step(event, e);
        forget();
        break;
      case Action::kZeroGrad:
      case Action::kModuleZeroGrad:
      case Action::kBrokenBackward:
        forget();
        break;
      case Action::kRefreshMasters: {
        const auto first = model_->edited(event, 0), own = model_->edited(event, rank_);
        for (size_t i = 0; i < own.size(); ++i) {
          if (own[i].defined()) masters_[i].copy_(is_expert(i) ? own[i] : first[i]);
        }
        if (steps_ == 0) average();
        model_->frozen.copy_(grid({5}, event.seed, 8, 8));
        break;
      }
      case Action::kBroadcastBuffers:
        model_->buffer.copy_(grid({3}, event.seed, 8, 8));
        break;
      case Action::kResizeRows:
        resize(event);
        break;
      case Action::kCheckpoint:
      case Action::kCheckpointAsync:
        if (moments_) moments_->convert(event.options.moments());
        break;
      default:
        break;
    }
  }

  // Begins the averages as the masters are.
  void average() {
    averages_.clear();
    for (const at::Tensor& p : masters_) averages_.push_back(p.detach().clone());
  }

  void follow_average() {
    ++steps_;
    if (!s_.ema) return;
    const double t = static_cast<double>(steps_), decay = s_.ema->decay();
    const double kept = s_.ema->warm_up() ? std::min(decay, (1 + t) / (10 + t)) : decay;
    for (size_t i = 0; i < masters_.size(); ++i) {
      averages_[i] = averages_[i] * kept + masters_[i].detach() * (1 - kept);
    }
  }

  void resize(const Event& event) {
    const at::Tensor rows = at::tensor(event.rows, at::kLong);
    for (const size_t i : SequenceModelImpl::resized(event)) {
      at::Tensor now = selected(masters_[i], rows);
      const at::Tensor values = model_->resized_value(event, i);
      if (values.defined()) {
        // An element with the value of its source keeps the master.
        const at::Tensor differs = selected(masters_[i].to(s_.dtype), rows) != values.to(s_.dtype);
        std::vector<int64_t> sizes(static_cast<size_t>(now.dim()), 1);
        sizes[0] = rows.numel();
        const at::Tensor given = differs.logical_or(rows.lt(0).view(sizes));
        now = at::where(given, values.to(at::kDouble), now);
      }
      at::Tensor average = selected(averages_[i], rows);
      const at::Tensor come = rows.lt(0).nonzero().squeeze(1);
      averages_[i] = average.index_copy_(0, come, now.index_select(0, come));
      if (moments_ && now.dim() > 0) moments_->select(i, rows, masters_[i][0].numel());
      masters_[i].set_data(now);
      model_->managed()[i].tensor.set_data(now.to(s_.dtype));
      const auto state = optimizer_->state().find(masters_[i].unsafeGetTensorImpl());
      if (state != optimizer_->state().end()) select(*state->second, rows);
    }
  }

  // The rows that `rows` names, and zeros for -1.
  static at::Tensor selected(const at::Tensor& before, const at::Tensor& rows) {
    const at::Tensor result = before.detach().index_select(0, rows.clamp_min(0));
    return result.index_fill_(0, rows.lt(0).nonzero().squeeze(1), 0);
  }

  void select(torch::optim::OptimizerParamState& state, const at::Tensor& rows) const {
    const auto of_adam = [&](auto& s) {
      s.exp_avg(selected(s.exp_avg(), rows));
      s.exp_avg_sq(selected(s.exp_avg_sq(), rows));
      if (s.max_exp_avg_sq().defined()) s.max_exp_avg_sq(selected(s.max_exp_avg_sq(), rows));
    };
    if (s_.inner == Inner::kAdam) of_adam(static_cast<torch::optim::AdamParamState&>(state));
    if (s_.inner == Inner::kAdamW) of_adam(static_cast<torch::optim::AdamWParamState&>(state));
    if (s_.inner == Inner::kSgdMomentum) {
      auto& s = static_cast<torch::optim::SGDParamState&>(state);
      if (s.momentum_buffer().defined()) s.momentum_buffer(selected(s.momentum_buffer(), rows));
    }
  }

  void step(const Event& event, Expected& e) {
    if (event.rate) {
      for (auto& group : optimizer_->param_groups()) group.options().set_lr(*event.rate);
    }
    if (!rounds_) return;
    const bool bad = overflows(e);
    e.skipped = bad || (s_.largest_norm && norm(unclipped(e), 2.0) > *s_.largest_norm);
    if (!e.skipped) {
      const Gradients gradients = moments_ ? unclipped(e) : clipped(e);
      for (size_t i = 0; i < masters_.size(); ++i) {
        masters_[i].mutable_grad() = gradients[i][is_expert(i) ? rank_ : 0];
      }
      moments_ ? step_moments(e) : void(optimizer_->step());
      follow_average();
      const auto tensors = model_->tensors();
      for (size_t i = 0; i < masters_.size(); ++i) tensors[i].copy_(masters_[i]);
    }
    const bool left_out = e.skipped && !bad;
    if (s_.options.loss_scaler() && !left_out) follow(*s_.options.loss_scaler(), bad);
  }

  void step_moments(const Expected& e) {
    PlainMoments::Clip clip{std::numeric_limits<double>::infinity(), 1.0};
    for (const Event& c : clips_) {
      if (c.action == Action::kClipValue) clip.bound = *c.max_norm;
      if (c.action == Action::kClip) {
        clip.coefficient = std::min(1.0, *c.max_norm / (norm(unclipped(e), c.norm_type) + 1e-6));
      }
    }
    for (auto& group : optimizer_->param_groups()) {
      for (size_t i = 0; i < masters_.size(); ++i) {
        const bool is_in = std::any_of(group.params().begin(), group.params().end(),
                                       [&](const at::Tensor& p) { return p.is_same(masters_[i]); });
        const at::Tensor& gradient = masters_[i].grad();
        if (!is_in || !gradient.defined()) continue;
        moments_->step(i, masters_[i], gradient, clip, group.options(), steps_ + 1);
      }
    }
  }

  // The rule of zero/update/loss_scaler.h, for a hysteresis of 1.
  void follow(const LossScalerOptions& scaler, bool bad) {
    if (bad) {
      good_steps_ = 0;
      scale_ = std::max(scale_ * scaler.backoff_factor(), scaler.min_scale());
    } else if (++good_steps_ == scaler.growth_interval()) {
      good_steps_ = 0;
      scale_ = std::min(scale_ * scaler.growth_factor(), scaler.max_scale());
    }
  }

  void forget() {
    for (auto& of_rank : sums_) std::fill(of_rank.begin(), of_rank.end(), at::Tensor());
    clips_.clear();
    rounds_ = false;
  }

  const CallSequence& s_;
  const int rank_;
  SequenceModel model_;                        // rank 0's
  std::vector<std::vector<at::Tensor>> sums_;  // of gradients since the last step, by rank
  std::vector<at::Tensor> masters_, averages_;
  int64_t steps_ = 0;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<PlainMoments> moments_;  // in place of its step(), of a sequence that has them
  std::vector<Event> clips_;             // since the last step
  bool rounds_ = false;
  double scale_ = 1.0;
  int64_t good_steps_ = 0;
};

}  // namespace

std::vector<Expected> run_plain(const CallSequence& sequence, int rank) {
  PlainRun run(sequence, rank);
  std::vector<Expected> result;
  for (const Event& event : sequence.events) result.push_back(run.run(event));
  return result;
}

void expect_close(const at::Tensor& got, const at::Tensor& expected, const std::string& what,
                  double tolerance) {
  TORCH_CHECK(got.defined() == expected.defined(), what, ": expected ",
              expected.defined() ? "a tensor" : "none", ", got ", got.defined() ? "one" : "none");
  if (!got.defined() || got.numel() == 0) return;
  TORCH_CHECK(got.sizes() == expected.sizes(), what, ": expected shape ", expected.sizes(),
              ", got ", got.sizes());
  const c10::ScalarType dtype = got.scalar_type();
  const double rounding = dtype == at::kBFloat16 ? 0x1p-8 : dtype == at::kHalf ? 0x1p-11 : 0.0;
  const at::Tensor a = got.detach().to(at::kCPU, at::kDouble).contiguous();
  const at::Tensor b = expected.detach().to(at::kCPU, at::kDouble).contiguous();
  for (int64_t i = 0; i < a.numel(); ++i) {
    const double x = a.const_data_ptr<double>()[i], y = b.const_data_ptr<double>()[i];
    const bool close = std::isfinite(y)
                           ? std::abs(x - y) <= tolerance + (tolerance + rounding) * std::abs(y)
                           : !std::isfinite(x);
    TORCH_CHECK(close, what, ": expected ", y, ", got ", x, " at element ", i);
  }
}

}  // namespace zero
