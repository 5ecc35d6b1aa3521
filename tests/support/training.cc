// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/nn/functional/activation.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/support/own_optimizer.h"
#include "zero/adafactor.h"
#include "zero/combined_optimizer.h"
#include "zero/lamb.h"
#include "zero/lion.h"
#include "zero/muon.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

uint64_t batch_seed(int rank, int step, int micro) {
  return 1000003u * static_cast<unsigned>(step) + 1009u * static_cast<unsigned>(micro) +
         static_cast<unsigned>(rank) + 77u;
}

std::vector<at::Tensor> values(const OddModelImpl& model) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : model.parameters()) {
    result.push_back(p.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  }
  return result;
}

at::Tensor batch_loss(OddModelImpl& model, const Training& t, int rank, int step, int micro) {
  const uint64_t seed = batch_seed(rank, step, micro);
  const at::Device device = model.scale.device();
  const at::Tensor x = random_tensor({3, 17}, seed).to(device, t.dtype);
  const at::Tensor target = random_tensor({3, 11}, seed + 500000).to(device, t.dtype);
  return model.loss(x, target, t.use(rank, step, micro)) / t.micro_batches;
}

}  // namespace

AffineImpl::AffineImpl(int64_t in, int64_t out, at::Device device) {
  weight = register_parameter("weight", at::zeros({out, in}, device));
  bias = register_parameter("bias", at::zeros({out}, device));
}

at::Tensor AffineImpl::forward(const at::Tensor& x) { return at::linear(x, weight, bias); }

OddModelImpl::OddModelImpl(uint64_t seed, int64_t width, at::Device device) {
  trunk = register_module("trunk", Affine(17, width, device));
  left = register_module("left", Affine(width, 11, device));
  right = register_module("right", Affine(width, 11, device));
  never = register_module("never", Affine(5, 3, device));
  scale = register_parameter("scale", at::ones({1}, device));
  empty = register_parameter("empty", at::zeros({0}, device));
  // Dense, but not in row-major order.
  last = register_parameter(
      "last", at::zeros({1, 11, 1, 2}, device).contiguous(at::MemoryFormat::ChannelsLast));
  frozen = register_parameter("frozen", at::zeros({7}, device), /*requires_grad=*/false);
  counter = register_buffer("counter", at::zeros({1}, at::TensorOptions(at::kLong).device(device)));
  at::NoGradGuard no_grad;
  uint64_t number = 0;
  for (at::Tensor& p : parameters()) {
    p.copy_(random_tensor(p.sizes(), seed * 131 + number++) * 0.3);
  }
}

at::Tensor OddModelImpl::loss(const at::Tensor& x, const at::Tensor& target, unsigned use) {
  at::Tensor hidden =
      (use & kTrunk) != 0 ? trunk(x) : at::ones({x.size(0), trunk->bias.size(0)}, x.options());
  hidden = at::tanh(hidden);
  at::Tensor out = at::zeros_like(target);
  if ((use & kLeft) != 0) out = out + left(hidden);
  if ((use & kLeftAgain) != 0) out = out - left(hidden * 0.5);
  if ((use & kRight) != 0) out = out + at::tanh(right(hidden));
  if ((use & kScale) != 0) {
    out = out * scale + last.select(3, 1).reshape({1, 11}) * last.select(3, 0).reshape({1, 11});
  }
  return at::mean(at::pow(out.to(at::kFloat) - target.to(at::kFloat), 2));
}

std::unique_ptr<torch::optim::Optimizer> make_inner(Inner inner, OddModelImpl& model) {
  using namespace torch::optim;
  // Two groups with different options: matrices decay, the rest does not.
  std::vector<at::Tensor> matrices, vectors;
  for (const at::Tensor& p : model.parameters()) (p.dim() == 2 ? matrices : vectors).push_back(p);
  const auto make = [&]<typename Optimizer, typename Options>(Options defaults, double decay) {
    auto with_decay = std::make_unique<Options>(defaults);
    with_decay->weight_decay(decay);
    auto without = std::make_unique<Options>(defaults);
    without->weight_decay(0.001);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(matrices, std::move(with_decay));
    groups.emplace_back(vectors, std::move(without));
    return std::unique_ptr<torch::optim::Optimizer>(
        std::make_unique<Optimizer>(std::move(groups), defaults));
  };
  switch (inner) {
    case Inner::kSgd:
      return make.operator()<SGD, SGDOptions>(SGDOptions(0.1), 0.02);
    case Inner::kSgdMomentum:
      return make.operator()<SGD, SGDOptions>(SGDOptions(0.1).momentum(0.9), 0.02);
    case Inner::kAdamW:
      return make.operator()<AdamW, AdamWOptions>(AdamWOptions(0.01), 0.05);
    case Inner::kAdam:
      return make.operator()<Adam, AdamOptions>(AdamOptions(0.01), 0.05);
    case Inner::kRmsprop:
      return make.operator()<RMSprop, RMSpropOptions>(RMSpropOptions(0.01).momentum(0.5), 0.05);
    case Inner::kAdagrad: {
      auto made = make.operator()<Adagrad, AdagradOptions>(
          AdagradOptions(0.05).initial_accumulator_value(0.1), 0.05);
      // That of a group is not read.
      static_cast<AdagradOptions&>(made->param_groups()[1].options())
          .initial_accumulator_value(0.7);
      return made;
    }
    case Inner::kLion:
      return make.operator()<Lion, LionOptions>(LionOptions(0.01), 0.05);
    case Inner::kMuon:
    case Inner::kMuonFp32: {
      std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
      MuonOptions options = MuonOptions(0.02).weight_decay(0.05);
      if (inner == Inner::kMuonFp32) options.ns_dtype(at::kFloat);
      parts.push_back(std::make_unique<Muon>(matrices, options));
      parts.push_back(std::make_unique<AdamW>(vectors, AdamWOptions(0.01).weight_decay(0.001)));
      return std::make_unique<CombinedOptimizer>(std::move(parts));
    }
    case Inner::kLamb:
      return make.operator()<Lamb, LambOptions>(LambOptions(0.01), 0.05);
    case Inner::kAdafactor:
      return make.operator()<Adafactor, AdafactorOptions>(AdafactorOptions(0.02), 0.05);
    case Inner::kOwn:
      return make.operator()<OwnOptimizer, OwnOptions>(OwnOptions(0.01), 0.05);
  }
  TORCH_CHECK(false, "unknown inner optimizer");
}

Trajectory train_sharded(const Training& t, const Group& group) {
  // Only rank 0's values may matter.
  OddModel model(group.rank() == 0 ? 1 : 100 + group.rank(), t.width, group.device());
  model->to(t.dtype);
  ZeroOptimizer optimizer(*model, make_inner(t.inner, *model), group, t.options);
  // A step without a pass on any rank has nothing to clip, which is an error.
  const auto has_pass = [&](int step) {
    for (int rank = 0; rank < t.world_size; ++rank) {
      for (int micro = 0; micro < t.micro_batches; ++micro) {
        if (t.runs(rank, step, micro) && (!t.plain_backward || t.use(rank, step, micro) != 0)) {
          return true;
        }
      }
    }
    return false;
  };
  Trajectory trajectory;
  for (int step = 0; step < t.steps; ++step) {
    for (int micro = 0; micro < t.micro_batches; ++micro) {
      if (!t.runs(group.rank(), step, micro)) continue;
      const bool last = micro + 1 == t.micro_batches;
      auto guard = optimizer.no_sync(t.under_no_sync ? t.under_no_sync(group.rank(), step, micro)
                                                     : t.no_sync && !last);
      const at::Tensor loss = batch_loss(*model, t, group.rank(), step, micro);
      if (!t.plain_backward) {
        optimizer.backward(loss);
      } else if (loss.requires_grad()) {
        optimizer.scale_loss(loss).backward();
      }
      if (t.reads_loss) loss.item<double>();
    }
    if (t.max_norm && has_pass(step)) optimizer.clip_grad_norm_(*t.max_norm);
    optimizer.step();
    optimizer.wait_for(*model);
    trajectory.push_back(values(*model));
  }
  return trajectory;
}

namespace {

void add_to(at::Tensor& sum, const at::Tensor& more) { sum = sum.defined() ? sum + more : more; }

}  // namespace

Trajectory train_reference(const Training& t) {
  OddModel model(1, t.width);
  model->to(t.dtype);
  const auto inner = make_inner(t.inner, *model);
  Trajectory trajectory;
  for (int step = 0; step < t.steps; ++step) {
    const auto parameters = model->parameters();
    std::vector<at::Tensor> sums(parameters.size()), sums_of_machine(parameters.size());
    for (int rank = 0; rank < t.world_size; ++rank) {
      for (const at::Tensor& p : parameters) p.mutable_grad().reset();
      for (int micro = 0; micro < t.micro_batches; ++micro) {
        if (!t.runs(rank, step, micro)) continue;
        const at::Tensor loss = batch_loss(*model, t, rank, step, micro);
        if (loss.requires_grad()) loss.backward();
      }
      for (size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor& grad = parameters[i].grad();
        if (!grad.defined()) continue;
        const at::Tensor wide = grad.to(t.reference_in_fp32 ? at::kFloat : at::kDouble);
        add_to(sums_of_machine[i], wide);
      }
      const bool last = rank + 1 == t.world_size;
      const int local = t.reference_ranks_per_machine;
      if (!last && (local == 0 || (rank + 1) % local != 0)) continue;
      for (size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor sum = std::exchange(sums_of_machine[i], at::Tensor());
        if (sum.defined()) add_to(sums[i], sum);
      }
    }
    double square = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!sums[i].defined()) continue;
      if (t.options.reduction() == Reduction::kMean) {
        sums[i] = t.reference_in_fp32 ? sums[i] * (1.0 / t.world_size) : sums[i] / t.world_size;
      }
      square += sums[i].pow(2).sum().item<double>();
    }
    const double factor =
        t.max_norm ? std::min(1.0, *t.max_norm / (std::sqrt(square) + 1e-6)) : 1.0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor p = parameters[i];
      p.mutable_grad() = sums[i].defined() ? (sums[i] * factor).to(p.scalar_type()) : at::Tensor();
    }
    inner->step();
    trajectory.push_back(values(*model));
  }
  return trajectory;
}

double largest_difference(const Trajectory& a, const Trajectory& b) {
  TORCH_CHECK(a.size() == b.size(), "trajectories of ", a.size(), " and ", b.size(), " steps");
  double largest = 0;
  for (size_t s = 0; s < a.size(); ++s) {
    for (size_t i = 0; i < a[s].size(); ++i) {
      if (a[s][i].numel() == 0) continue;
      const at::Tensor left = a[s][i].to(at::kDouble), right = b[s][i].to(at::kDouble);
      const double d = ((left - right).abs() / (1 + right.abs())).max().item<double>();
      if (std::isnan(d)) return d;  // which is in no limit
      largest = std::max(largest, d);
    }
  }
  return largest;
}

int64_t differing_elements(const Trajectory& a, const Trajectory& b) {
  TORCH_CHECK(a.size() == b.size(), "trajectories of ", a.size(), " and ", b.size(), " steps");
  int64_t count = 0;
  for (size_t s = 0; s < a.size(); ++s) {
    for (size_t i = 0; i < a[s].size(); ++i) {
      const auto dtype = a[s][i].element_size() == 2 ? at::kShort : at::kInt;
      count += a[s][i]
                   .contiguous()
                   .view(dtype)
                   .ne(b[s][i].contiguous().view(dtype))
                   .sum()
                   .item<int64_t>();
    }
  }
  return count;
}

Trajectory train_on_ranks(const Training& training, const RunOptions& run) {
  std::vector<Trajectory> all(training.world_size);
  run_ranks(
      training.world_size,
      [&](const Group& group) { all[group.rank()] = train_sharded(training, group); }, run);
  for (const Trajectory& t : all) {
    TORCH_CHECK(differing_elements(t, all[0]) == 0, "ranks hold different parameters");
  }
  return all[0];
}

Trajectory train_on_ranks(const Training& training) {
  RunOptions run;
  run.transport = training.transport;
  run.shared_memory = training.shared_memory;
  return train_on_ranks(training, run);
}

}  // namespace zero
