// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mesh_run.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "zero/inner_optimizers/registry.h"
#include "zero/memory/segment_tensors.h"

namespace zero {
namespace {

// Stages in the middle have no shared parameters, and so other numbers for their groups.
enum Kind : int64_t { kShared, kMatrices, kBiases, kExpertWeights, kKinds };

int64_t elements(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Multiples of 1/64 from -1 to 1, other ones for each name and seed. Sums of a few are exact.
at::Tensor exact_values(const std::string& name, const std::vector<int64_t>& shape, uint64_t seed) {
  at::Tensor result = at::empty(shape);
  float* data = result.mutable_data_ptr<float>();
  uint64_t state = seed * 7919 + 17;
  for (const char c : name) state = state * 131 + static_cast<unsigned char>(c);
  for (int64_t i = 0; i < result.numel(); ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    data[i] = static_cast<float>(static_cast<int64_t>(state >> 40) % 129 - 64) / 64;
  }
  return result;
}

at::Tensor number(double value) {
  return at::full({1}, value, at::TensorOptions().dtype(at::kDouble));
}

}  // namespace

std::string MeshShape::text() const {
  std::string result;
  const auto add = [&](const char* what, int size) {
    if (size > 1) result += (result.empty() ? "" : " x ") + (what + std::to_string(size));
  };
  add("pp", stages);
  add("rep", copies);
  add("dp", data);
  add("ep", experts);
  add("tp", parts);
  if (result.empty()) result = "one rank";
  for (const int cut : cuts) result += " cut at " + std::to_string(cut);
  return result + (adam ? ", AdamW" : ", SGD");
}

void WholeState::add(const std::string& key, const std::vector<int64_t>& whole,
                     const at::Tensor& place, const at::Tensor& values) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // NaN: not yet there. No value of a test is NaN.
  const auto [entry, added] = tensors_.emplace(key, at::Tensor());
  if (added) {
    entry->second = at::full({elements(whole)}, std::numeric_limits<double>::quiet_NaN(),
                             at::TensorOptions().dtype(at::kDouble));
  }
  const at::Tensor present = entry->second.index_select(0, place);
  const at::Tensor given = values.to(at::kDouble).expand({place.numel()});
  conflicts_ += (present.isnan().logical_not() & present.ne(given)).sum().item<int64_t>();
  entry->second.index_copy_(0, place, given);
}

void WholeState::add_number(const std::string& key, double value) {
  add("number/" + key, {1}, at::zeros({1}, at::TensorOptions().dtype(at::kLong)), number(value));
}

int64_t WholeState::differing(const WholeState& a, const WholeState& b) {
  int64_t count = a.conflicts_ + b.conflicts_;
  for (const auto& [key, tensor] : a.tensors_) {
    const auto other = b.tensors_.find(key);
    if (other == b.tensors_.end() || other->second.numel() != tensor.numel()) {
      ++count;
      continue;
    }
    const auto* x = static_cast<const char*>(tensor.const_data_ptr());
    const auto* y = static_cast<const char*>(other->second.const_data_ptr());
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      count += std::memcmp(x + i * 8, y + i * 8, 8) != 0 ? 1 : 0;
    }
  }
  for (const auto& item : b.tensors_) count += a.tensors_.count(item.first) == 0 ? 1 : 0;
  return count;
}

MeshRun::MeshRun(const MeshShape& shape, const Group& world, double factor)
    : shape_(shape),
      mesh_(world, {{"pp", shape.stages},
                    {"rep", shape.copies},
                    {"dp", shape.data},
                    {"ep", shape.experts},
                    {"tp", shape.parts}}),
      factor_(factor) {
  std::vector<int> cuts = shape.cuts;
  for (int s = 1; cuts.size() + 1 < static_cast<size_t>(shape.stages); ++s) {
    cuts.push_back(s * kLayers / shape.stages);
  }
  cuts.insert(cuts.begin(), 0);
  cuts.push_back(kLayers);
  const int stage = mesh_.coordinate("pp");
  if (stage == 0 && shape.has_large) hold("large", {65, 79}, kShared);
  if (stage == 0 || stage == shape.stages - 1) hold("embedding", {5, 7}, kShared);
  for (int layer = cuts[stage]; layer < cuts[stage + 1]; ++layer) hold_layer(layer);
  if (stage > 0 && stage == shape.stages - 1 && shape.has_large) hold("large", {65, 79}, kShared);
  hold_others("common", 0);
  make_optimizer();
}

void MeshRun::hold(const std::string& name, std::vector<int64_t> whole, int64_t kind,
                   int64_t dimension, bool transposed, std::vector<int64_t> sections) {
  Held held{name, {}, kind, 0, std::move(whole), dimension, transposed, std::move(sections)};
  const at::Tensor value = part(exact_values(name, held.whole, 1) * factor_, held);
  held.tensor = transposed ? value.t().clone(at::MemoryFormat::Contiguous).t()
                           : value.clone(at::MemoryFormat::Contiguous);
  std::string registered = name;
  std::replace(registered.begin(), registered.end(), '.', '_');
  held.name = registered;
  module.register_parameter(registered, held.tensor);
  held.tensor = module.named_parameters()[registered];
  held_.push_back(std::move(held));
}

void MeshRun::hold_layer(int layer) {
  const std::string prefix = "layer" + std::to_string(layer) + ".";
  const int64_t cut = (layer + (shape_.swaps_cuts ? 1 : 0)) % 2;
  hold(prefix + "weight", {8, 12}, kMatrices, cut, layer >= 2);
  hold(prefix + "fused", layer % 2 == 0 ? std::vector<int64_t>{48, 4} : std::vector<int64_t>{4, 48},
       kMatrices, cut, layer >= 2,
       shape_.swaps_cuts ? std::vector<int64_t>() : std::vector<int64_t>{24, 12, 12});
  hold(prefix + "short", {3, 4}, kMatrices, 0);  // of four parts one has no rows
  hold(prefix + "bias", {13}, kBiases);
  hold(prefix + "unused", {6}, kBiases);
  const int each = kExperts / shape_.experts;
  for (int e = 0; e < each; ++e) {
    const int number = mesh_.coordinate("ep") * each + e;
    hold(prefix + "expert" + std::to_string(number), {3, 11}, kExpertWeights);
  }
  hold_others("layer" + std::to_string(layer), -1);
}

void MeshRun::hold_others(const std::string& name, int64_t dimension) {
  for (const bool frozen : {false, true}) {
    Held held{name + (frozen ? "_frozen" : "_buffer"), {}, 0, 0, {9, 2}, dimension};
    if (frozen && dimension == 0) {
      held.whole = {24, 2};
      held.sections = {12, 12};
    }
    held.tensor = part(exact_values(held.name, held.whole, 1) * factor_, held).clone();
    if (frozen) {
      module.register_parameter(held.name, held.tensor, /*requires_grad=*/false);
    } else {
      module.register_buffer(held.name, held.tensor);
    }
    others_.push_back(std::move(held));
  }
}

at::Tensor MeshRun::part(const at::Tensor& whole, const Held& held) const {
  if (held.dimension < 0) return whole;
  if (!held.sections.empty()) {
    std::vector<at::Tensor> own;
    for (const at::Tensor& section : whole.split_with_sizes(held.sections, held.dimension)) {
      own.push_back(section.tensor_split(shape_.parts, held.dimension)[mesh_.coordinate("tp")]);
    }
    return at::cat(own, held.dimension);
  }
  return whole.tensor_split(shape_.parts, held.dimension)[mesh_.coordinate("tp")];
}

at::Tensor MeshRun::places(const Held& held) const {
  const at::Tensor all = at::arange(elements(held.whole), at::TensorOptions().dtype(at::kLong));
  return in_memory_order(part(all.view(held.whole), held), held);
}

at::Tensor MeshRun::in_memory_order(const at::Tensor& part, const Held& held) {
  return (held.transposed ? part.t() : part).contiguous().view({-1});
}

void MeshRun::make_optimizer() {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  ZeroOptions options = ZeroOptions()
                            .layout(shape_.layout)
                            .bucket_bytes(shape_.bucket_bytes)
                            .mesh_group(mesh_.all())
                            .moments(shape_.moments)
                            .ema(EmaOptions().decay(0.75))
                            .loss_scaler(LossScalerOptions().initial_scale(256).growth_interval(2));
  const auto held = [this](const std::string& name) {
    const Held* found = nullptr;
    for (const auto* list : {&held_, &others_}) {
      for (const Held& h : *list) {
        if (h.name == name) found = &h;
      }
    }
    return *found;
  };
  options.tensor_parts({mesh_.group({"tp"}),
                        [held](const std::string& name) -> std::optional<int64_t> {
                          const int64_t dimension = held(name).dimension;
                          return dimension < 0 ? std::nullopt : std::optional(dimension);
                        },
                        [this, held](const std::string& name) {
                          return shape_.says_sections ? held(name).sections
                                                      : std::vector<int64_t>();
                        }});
  for (int64_t kind = 0; kind < kKinds; ++kind) {
    std::vector<at::Tensor> members;
    for (Held& h : held_) {
      if (h.kind != kind) continue;
      h.group = static_cast<int64_t>(groups.size());
      members.push_back(h.tensor);
    }
    if (members.empty()) continue;
    options.placement(static_cast<int64_t>(groups.size()), placement(kind));
    groups.emplace_back(members, group_options(kind));
  }
  std::unique_ptr<torch::optim::Optimizer> inner;
  if (shape_.adam) {
    inner = std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.01));
  } else {
    inner = std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1));
  }
  optimizer =
      std::make_unique<ZeroOptimizer>(module, std::move(inner), mesh_.group({"dp", "ep"}), options);
}

GroupPlacement MeshRun::placement(int64_t kind) const {
  auto result = GroupPlacement().replicated_over(mesh_.group({"rep"}));
  if (kind != kMatrices) result.copies(shape_.parts);
  if (kind == kShared) result.owner(mesh_.coordinate("pp") == 0);
  if (kind == kExpertWeights) result.sharded_over(mesh_.group({"dp"}));
  return result;
}

std::unique_ptr<torch::optim::OptimizerOptions> MeshRun::group_options(int64_t kind) const {
  const auto n = static_cast<double>(kind + 1);
  if (shape_.adam) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(0.01 * n * factor_).weight_decay(0.05 * n));
  }
  return std::make_unique<torch::optim::SGDOptions>(
      torch::optim::SGDOptions(0.1 * n * factor_).momentum(0.8 + n / 50));
}

void MeshRun::train(int first, int last) {
  for (int step = first; step < last; ++step) {
    for (auto& g : optimizer->param_groups()) g.options().set_lr(g.options().get_lr() * 0.95);
    at::Tensor loss = at::zeros({});
    for (const Held& h : held_) {
      if (h.name.find("unused") != std::string::npos) continue;
      const at::Tensor gradient = part(exact_values(h.name, h.whole, 100 + step), h);
      loss = loss + (gradient * h.tensor).sum();
    }
    const bool overflows = step == 1 && mesh_.all().rank() == 0;
    optimizer->backward(overflows ? loss * INFINITY : loss);
    optimizer->step();
    EXPECT_EQ(optimizer->step_skipped(), step == 1);
  }
}

void MeshRun::add_to(WholeState& state) {
  const at::NoGradGuard no_grad;
  const Plan& plan = optimizer->plan();
  const auto& inner = optimizer->inner();
  std::vector<std::string> names;  // of managed parameters, in the order of the plan
  for (const auto& item : module.named_parameters()) {
    if (item.value().requires_grad()) names.push_back(item.key());
  }
  std::vector<size_t> next(kKinds, 0);
  for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
    const Held* any = nullptr;
    for (size_t p = 0; p < names.size(); ++p) {
      const auto& list = plan.parameter_buckets[p];
      if (std::find(list.begin(), list.end(), b) == list.end()) continue;
      any = &*std::find_if(held_.begin(), held_.end(),
                           [&](const Held& h) { return h.name == names[p]; });
    }
    const bool expert = any != nullptr && any->kind == kExpertWeights;
    const Group group = expert ? mesh_.group({"dp"}) : mesh_.group({"dp", "ep"});
    for (const Segment& s : plan.segments(b, group.rank())) {
      const Held& h = *std::find_if(held_.begin(), held_.end(),
                                    [&](const Held& o) { return o.name == names[s.parameter]; });
      const at::Tensor& master = inner.param_groups()[h.group].params()[next[h.group]++];
      const at::Tensor place = places(h).narrow(0, s.begin, s.numel);
      const auto add = [&](const std::string& kind, const at::Tensor& values) {
        state.add(kind + "/" + h.name, h.whole, place, values);
      };
      add("master", elements_of(master, master));
      const auto kept = read_inner_state(inner, h.group, master);
      add("present", number(kept ? 1 : 0));
      if (!kept) continue;
      for (const auto& [kind, tensor] : kept->tensors) add(kind, elements_of(tensor, master));
      for (const auto& [kind, value] : kept->values) add(kind, value);
    }
  }
  for (const Held& h : held_) {
    state.add("working/" + h.name, h.whole, places(h), in_memory_order(h.tensor.detach(), h));
    const auto& options = optimizer->param_groups()[h.group].options();
    for (const auto& [name, value] : adapter_of(options).option_values(options)) {
      state.add_number("option/" + h.name + "/" + name, value);
    }
  }
  const auto guard = optimizer->use_ema();
  for (const Held& h : held_) {
    state.add("average/" + h.name, h.whole, places(h), in_memory_order(h.tensor.detach(), h));
  }
  for (const Held& h : others_) {
    state.add("whole/" + h.name, h.whole, places(h), h.tensor.contiguous().view({-1}));
  }
  state.add_number("scale", optimizer->loss_scale());
  state.add_number("steps", static_cast<double>(optimizer->stats().steps));
  state.add_number("skipped", static_cast<double>(optimizer->stats().skipped_steps));
}

}  // namespace zero
