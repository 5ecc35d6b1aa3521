// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/muon.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "bookkeeping/whole_parameters.h"
#include "kernels/sgd.h"
#include "zero/inner_optimizers/class_adapter.h"
#include "zero/inner_optimizers/newton_schulz.h"
#include "zero/inner_optimizers/own_class.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {

MuonSplit split_rows(std::vector<int64_t> sizes) {
  return [sizes = std::move(sizes)](const at::Tensor& tensor) {
    const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == sum, "split_rows: expected a matrix of ",
                sum, " rows, got a tensor of shape ", tensor.sizes());
    return tensor.split_with_sizes(sizes);
  };
}

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_coefficients);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_steps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(adjust_lr_fn);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_dtype);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(batched);
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(ns_coefficients_t, ns_coefficients);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, ns_steps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::string, adjust_lr_fn);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG_OPTIONAL(c10::ScalarType, ns_dtype);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, batched);
}

bool operator==(const MuonOptions& lhs, const MuonOptions& rhs) {
  return lhs.lr() == rhs.lr() && lhs.weight_decay() == rhs.weight_decay() &&
         lhs.momentum() == rhs.momentum() && lhs.nesterov() == rhs.nesterov() &&
         lhs.ns_coefficients() == rhs.ns_coefficients() && lhs.eps() == rhs.eps() &&
         lhs.ns_steps() == rhs.ns_steps() && lhs.adjust_lr_fn() == rhs.adjust_lr_fn() &&
         lhs.ns_dtype() == rhs.ns_dtype() && lhs.batched() == rhs.batched();
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum_buffer);
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, momentum_buffer);
}

namespace {

void check_options(const MuonOptions& o) {
  TORCH_CHECK(o.lr() >= 0, "Muon: expected a learning rate of 0 or more, got ", o.lr());
  TORCH_CHECK(o.weight_decay() >= 0, "Muon: expected a weight decay of 0 or more, got ",
              o.weight_decay());
  TORCH_CHECK(o.momentum() >= 0, "Muon: expected a momentum of 0 or more, got ", o.momentum());
  TORCH_CHECK(0 <= o.ns_steps() && o.ns_steps() < 100, "Muon: expected ns_steps from 0 to 99, got ",
              o.ns_steps());
  TORCH_CHECK(o.adjust_lr_fn() == "original" || o.adjust_lr_fn() == "match_rms_adamw",
              "Muon: expected adjust_lr_fn \"original\" or \"match_rms_adamw\", got \"",
              o.adjust_lr_fn(), "\"");
  TORCH_CHECK(!o.ns_dtype() || o.ns_dtype() == at::kBFloat16 || o.ns_dtype() == at::kFloat,
              "Muon: expected ns_dtype kBFloat16 or kFloat, got ", *o.ns_dtype());
}

// Fails unless `views`, of split(), are matrices that cover p once. What they cover depends on
// their places alone, so that the elements are counted once for each list of places: on the host,
// which needs no wait for a GPU.
void check_views(const at::Tensor& p, const std::vector<at::Tensor>& views) {
  std::vector<int64_t> places;
  const auto add = [&](at::IntArrayRef numbers) {
    places.insert(places.end(), numbers.begin(), numbers.end());
  };
  add(p.dim());
  add(p.sizes());
  add(p.strides());
  bool alias = true;
  for (const at::Tensor& view : views) {
    TORCH_CHECK(view.dim() == 2, "Muon: expected split() to return matrices, got one of shape ",
                view.sizes(), " for a parameter of shape ", p.sizes());
    alias = alias && view.is_alias_of(p);
    add(view.storage_offset() - p.storage_offset());
    add(view.sizes());
    add(view.strides());
  }
  thread_local std::set<std::vector<int64_t>> known;
  if (alias && known.count(places) != 0) return;
  at::Tensor counts;
  if (alias) {
    counts = at::empty_strided(p.sizes(), p.strides(), p.options().dtype(at::kInt).device(at::kCPU))
                 .zero_();
    for (const at::Tensor& view : views) {
      counts.as_strided(view.sizes(), view.strides(), view.storage_offset() - p.storage_offset())
          .add_(1);
    }
  }
  TORCH_CHECK(alias && counts.eq(1).all().item<bool>(),
              "Muon: expected split() to return views with every element of a parameter in exactly "
              "one, got elements in none or in several for shape ",
              p.sizes());
  known.insert(std::move(places));
}

// The matrices of p that are orthogonalised, each by itself. Throws c10::Error for a parameter that
// is none, and for a split that does not suit it.
std::vector<at::Tensor> matrices_of(const at::Tensor& p, const MuonOptions& o) {
  TORCH_CHECK(p.is_floating_point(), "Muon: expected parameters of a floating-point dtype, got ",
              p.scalar_type());
  TORCH_CHECK(p.dim() == 2 || o.split(), "Muon: expected matrices, got a parameter of shape ",
              p.sizes(),
              ". Give biases, norms and embeddings to another optimizer, such as "
              "torch::optim::AdamW; for a parameter that consists of matrices (a convolution, "
              "experts in one tensor), set MuonOptions::split() in a group of its own");
  if (!o.split() || p.numel() == 0) return {p};
  std::vector<at::Tensor> views = o.split()(p);
  check_views(p, views);
  return views;
}

void check_parameter(const at::Tensor& p, const MuonOptions& o) {
  const at::NoGradGuard no_grad;  // as in a step
  matrices_of(p, o);
}

double adjusted_lr(const MuonOptions& o, const at::Tensor& matrix) {
  const auto rows = static_cast<double>(matrix.size(0));
  const auto columns = static_cast<double>(matrix.size(1));
  const double ratio = o.adjust_lr_fn() == "original" ? std::sqrt(std::max(1.0, rows / columns))
                                                      : 0.2 * std::sqrt(std::max(rows, columns));
  return o.lr() * ratio;
}

// Smaller products, counted in multiplications, take longer in bf16 than in fp32 on a CPU, since
// each call arranges its factors anew. One thread with amx_bf16, one matrix, bf16 over fp32: 10.8
// for 32 x 32, 4.0 for 64 x 64, 1.9 for 64 x 256, 1.1 for 128 x 128, 0.5 for 128 x 512. By shape
// alone, so that the bits do not depend on how many matrices a rank owns.
constexpr int64_t kWorthBf16 = int64_t{1} << 21;

bool multiplies_in_bf16(const at::Tensor& matrix) {
  if (!has_bf16_products(matrix.device())) return false;
  const auto [side, length] = std::minmax({matrix.size(0), matrix.size(1)});
  return !matrix.is_cpu() || side * side * length >= kWorthBf16;
}

NewtonSchulz iteration_of(const MuonOptions& o, const at::Tensor& matrix) {
  const bool rounded = !o.ns_dtype() && !multiplies_in_bf16(matrix);
  const c10::ScalarType dtype = rounded ? at::kFloat : o.ns_dtype().value_or(at::kBFloat16);
  return {o.ns_coefficients(), o.eps(), o.ns_steps(), dtype, rounded};
}

// Orthogonalises the updates of one group and subtracts them: large ones at once, small ones when
// enough of one shape and device have been added.
class Updates {
 public:
  explicit Updates(const MuonOptions& o) : options_(o) {}

  void add(const at::Tensor& matrix, const at::Tensor& update) {
    const NewtonSchulz iteration = iteration_of(options_, update);
    if (!options_.batched() || !is_batched(update, iteration)) {
      subtract(matrix, newton_schulz(update, iteration));
      return;
    }
    Batch& batch = batches_[{matrix.size(0), matrix.size(1), matrix.device().index()}];
    batch.matrices.push_back(matrix);
    batch.updates.push_back(update);
    if (static_cast<int64_t>(batch.updates.size()) * update.numel() >= kBatchNumel) finish(batch);
  }

  void finish() {
    for (auto& [shape, batch] : batches_) finish(batch);
  }

 private:
  // Bounds the memory of a batch: 8 MiB in bf16, and twice that for the updates.
  static constexpr int64_t kBatchNumel = int64_t{1} << 22;

  struct Batch {
    std::vector<at::Tensor> matrices, updates;
  };

  void subtract(const at::Tensor& matrix, const at::Tensor& direction) {
    matrix.add_(direction, -adjusted_lr(options_, matrix));
  }

  void finish(Batch& batch) {
    if (batch.updates.empty()) return;
    const std::vector<at::Tensor> directions =
        newton_schulz_batch(batch.updates, iteration_of(options_, batch.updates.front()));
    for (size_t i = 0; i < directions.size(); ++i) subtract(batch.matrices[i], directions[i]);
    batch = {};
  }

  const MuonOptions& options_;
  std::map<std::tuple<int64_t, int64_t, int>, Batch> batches_;
};

// Of a parameter whose momentum ZeroOptions::moments stores in fewer bytes than fp32, with what the
// next step() rounds it by.
struct StoredMomentum : public MuonParamState {
  MomentRounding rounding;
};

// Follows the gradient and stores b. Returns it as it was before it was rounded, like the gradient.
// The kernel of SGD has b in its own formula: a rate of -1 and p = 0 make p = b.
at::Tensor follow(StoredMomentum& state, const at::Tensor& gradient, double momentum) {
  at::Tensor result = at::zeros_like(gradient, at::MemoryFormat::Preserve);
  TORCH_INTERNAL_ASSERT(gradient.scalar_type() == at::kFloat &&
                        result.strides() == gradient.strides());
  kernels::SgdSegment segment;
  segment.master = result.mutable_data_ptr<float>();
  segment.momentum = state.momentum_buffer().mutable_data_ptr();
  segment.state_type = state_type(state.momentum_buffer());
  segment.gradient = gradient.const_data_ptr<float>();
  segment.numel = gradient.numel();
  segment.parameter = state.rounding.parameter;
  kernels::SgdOptions o;
  o.lr = -1.0;
  // Without momentum b is the gradient, as in the kernel's first step.
  segment.first_step = momentum == 0.0;
  o.momentum = segment.first_step ? 1.0 : momentum;
  o.dampening = momentum;
  o.noise_step = state.rounding.step;
  kernels::sgd_step(segment, o, nullptr, nullptr, at::kFloat, state.rounding.stream);
  return result;
}

// Follows the gradient. Returns b.
at::Tensor followed_momentum(std::unique_ptr<torch::optim::OptimizerParamState>& slot,
                             const at::Tensor& gradient, double momentum) {
  if (auto* stored = dynamic_cast<StoredMomentum*>(slot.get())) {
    return follow(*stored, gradient, momentum);
  }
  if (!slot) {
    auto made = std::make_unique<MuonParamState>();
    made->momentum_buffer(at::zeros_like(gradient, at::MemoryFormat::Preserve));
    slot = std::move(made);
  }
  return static_cast<MuonParamState&>(*slot).momentum_buffer().lerp_(gradient, 1.0 - momentum);
}

// `split` gave `matrices` for p.
void add_matrices(const std::vector<at::Tensor>& matrices, const at::Tensor& update,
                  const MuonSplit& split, Updates& updates) {
  const std::vector<at::Tensor> parts = split ? split(update) : std::vector<at::Tensor>{update};
  TORCH_CHECK(matrices.size() == parts.size(),
              "Muon: expected split() to return as many views for equal shapes, got ",
              matrices.size(), " and ", parts.size());
  for (size_t i = 0; i < parts.size(); ++i) updates.add(matrices[i], parts[i]);
}

}  // namespace

Muon::Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, MuonOptions defaults)
    : Optimizer(param_groups, std::make_unique<MuonOptions>(defaults)) {
  check_options(defaults);
  take_options(param_groups_, param_groups, check_options);
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    for (const at::Tensor& p : group.params()) check_parameter(p, options);
  }
}

Muon::Muon(std::vector<at::Tensor> params, MuonOptions defaults)
    : Muon({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

at::Tensor Muon::step(LossClosure closure) {
  at::NoGradGuard no_grad;
  const at::Tensor loss = loss_of(closure);
  // Products have the dtypes that the options say, also in a program that left autocast on.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // A wrong adjust_lr_fn would be taken for the other one.
  for (auto& group : param_groups_) {
    check_options(static_cast<const MuonOptions&>(group.options()));
  }
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    Updates updates(options);
    for_each_gradient(group, "Muon", [&](at::Tensor& p, const at::Tensor& gradient) {
      if (p.numel() == 0) return;
      const std::vector<at::Tensor> matrices = matrices_of(p, options);
      const at::Tensor buffer =
          followed_momentum(state_[p.unsafeGetTensorImpl()], gradient, options.momentum());
      exact_scale(p, 1.0 - options.lr() * options.weight_decay());
      add_matrices(matrices,
                   options.nesterov() ? gradient.lerp(buffer, options.momentum()) : buffer,
                   options.split(), updates);
    });
    updates.finish();
  }
  return loss;
}

void Muon::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

void Muon::load(torch::serialize::InputArchive& archive) {
  std::vector<MuonSplit> splits;
  for (auto& group : param_groups_) {
    splits.push_back(static_cast<const MuonOptions&>(group.options()).split());
  }
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
  for (size_t g = 0; g < splits.size(); ++g) {
    static_cast<MuonOptions&>(param_groups_[g].options()).split(std::move(splits[g]));
  }
}

namespace {

// Whether ns_dtype is `dtype`. Checkpoints of earlier versions have only that of fp32, and keep an
// explicit bfloat16 of the program.
template <c10::ScalarType dtype>
OptionField<MuonOptions> ns_dtype(const char* name) {
  return {name, [](const MuonOptions& o) { return o.ns_dtype() == dtype ? 1.0 : 0.0; },
          [](MuonOptions& o, double value) {
            if (value != 0.0) {
              o.ns_dtype(dtype);
            } else if (o.ns_dtype() == dtype) {
              o.ns_dtype(std::nullopt);
            }
          }};
}

class MuonAdapter : public ClassAdapter<Muon, MuonOptions, MuonParamState> {
 public:
  MuonAdapter()
      : ClassAdapter(
            "zero::Muon",
            {ZERO_OPTION(MuonOptions, lr),
             ZERO_OPTION(MuonOptions, weight_decay),
             ZERO_OPTION(MuonOptions, momentum),
             ZERO_OPTION(MuonOptions, nesterov),
             ZERO_ELEMENT(MuonOptions, "ns_a", ns_coefficients, 0),
             ZERO_ELEMENT(MuonOptions, "ns_b", ns_coefficients, 1),
             ZERO_ELEMENT(MuonOptions, "ns_c", ns_coefficients, 2),
             ZERO_OPTION(MuonOptions, eps),
             ZERO_OPTION(MuonOptions, ns_steps),
             {"match_rms_adamw",
              [](const MuonOptions& o) { return o.adjust_lr_fn() == kMatchRms ? 1.0 : 0.0; },
              [](MuonOptions& o, double value) {
                o.adjust_lr_fn(value != 0.0 ? kMatchRms : "original");
              }},
             ns_dtype<at::kFloat>("ns_fp32"),
             ns_dtype<at::kBFloat16>("ns_bf16"),
             ZERO_OPTION(MuonOptions, batched)},
            {ZERO_STATE(MuonParamState, momentum_buffer, kAverage, kAlways)}) {}

  bool needs_whole_parameters() const override { return true; }
  void check_options(const Options& options) const override {
    zero::check_options(static_cast<const MuonOptions&>(options));
  }
  void check_parameter(const Options& options, const at::Tensor& parameter) const override {
    zero::check_parameter(parameter, static_cast<const MuonOptions&>(options));
  }
  bool takes_any_matrix(const Options& options) const override {
    return !static_cast<const MuonOptions&>(options).split();
  }
  std::string arithmetic(const Options& options, at::Device device) const override {
    if (static_cast<const MuonOptions&>(options).ns_dtype()) return {};
    return has_bf16_products(device)
               ? "zero::Muon multiplies large matrices in bfloat16"
               : "zero::Muon multiplies in fp32, as this processor has no products of bfloat16; "
                 "set MuonOptions::ns_dtype() on all ranks";
  }
  bool stores_moments() const override { return true; }
  void prepare_moments(Optimizer& optimizer, const at::Tensor& master, Moments moments,
                       const MomentRounding& rounding) const override {
    auto& slot = optimizer.state()[master.unsafeGetTensorImpl()];
    if (dynamic_cast<StoredMomentum*>(slot.get()) == nullptr) {
      auto made = std::make_unique<StoredMomentum>();
      const bool loaded = slot != nullptr;
      made->momentum_buffer(loaded ? static_cast<MuonParamState&>(*slot).momentum_buffer()
                                   : zero_state(master, moments));
      slot = std::move(made);
    }
    static_cast<StoredMomentum&>(*slot).rounding = rounding;
  }
  // A parameter with a split may have any shape: it counts as one matrix.
  int64_t step_cost(const at::Tensor& parameter) const override {
    if (parameter.dim() < 2 || parameter.numel() == 0) return parameter.numel();
    return newton_schulz_cost(parameter.size(0), parameter.numel() / parameter.size(0));
  }

 private:
  static constexpr const char* kMatchRms = "match_rms_adamw";
};

}  // namespace

const OptimizerAdapter& muon_adapter() {
  static const MuonAdapter adapter;
  return adapter;
}

}  // namespace zero
