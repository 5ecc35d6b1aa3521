// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "zero/agreement/all_or_none.h"
#include "zero/checkpoint/differences.h"
#include "zero/checkpoint/format/safetensors.h"
#include "zero/checkpoint/interop.h"
#include "zero/checkpoint/match/part_reader.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/optimizer/checkpoints.h"
#include "zero/optimizer/mesh_description.h"
#include "zero/optimizer/staging.h"

namespace zero {
namespace {

// In the memory order of `p`, fp32 and flat.
at::Tensor in_memory_order(const at::Tensor& tensor, const Parameter& p) {
  const at::Tensor result =
      at::empty_strided(p.sizes, p.strides, p.tensor.options().dtype(at::kFloat));
  result.copy_(tensor);
  return result.as_strided({tensor.numel()}, {1});
}

// Reads the whole state of a parameter. None where it has none.
using ReadState = std::function<std::optional<InnerState>(const Parameter& p, int64_t group)>;

// That state in the memory order of `p`.
std::optional<InnerState> read_in_order(const ReadState& read, const Parameter& p, int64_t group,
                                        const torch::optim::Optimizer& inner) {
  std::optional<InnerState> state = read(p, group);
  if (!state) return state;
  auto& tensors = state->tensors;
  // State of a run without an option such as amsgrad lacks what a step reads with it.
  const auto& options = inner.param_groups()[group].options();
  for (const std::string& name : adapter_of(inner, group).optional_state(options)) {
    const bool present = std::any_of(tensors.begin(), tensors.end(),
                                     [&](const auto& item) { return item.first == name; });
    if (!present) tensors.emplace_back(name, at::zeros(p.sizes, at::kFloat));
  }
  for (auto& [name, tensor] : tensors) {
    TORCH_CHECK(tensor.sizes() == p.tensor.sizes(), "parameter ", p.name, ": expected ", name,
                " of shape ", p.tensor.sizes(), ", got ", tensor.sizes());
    tensor = in_memory_order(tensor, p);
  }
  return state;
}

using States = std::vector<std::unique_ptr<torch::optim::OptimizerParamState>>;

// The state of each segment. A parameter has a segment in each of its buckets, one after the other:
// its state is read, and brought into memory order, once for all.
States cut_all(Engine& engine, const ReadState& read) {
  torch::optim::Optimizer& inner = engine.shards.inner_with_counts();
  States states;
  const Parameter* last = nullptr;
  std::optional<InnerState> whole;  // of `last`
  for (const SegmentTensors& s : engine.shards.segments()) {
    const Parameter& p = engine.table.parameters()[s.segment.parameter];
    if (std::exchange(last, &p) != &p) whole = read_in_order(read, p, s.group, inner);
    states.emplace_back();
    if (!whole) continue;
    InnerState state = *whole;
    for (auto& [name, tensor] : state.tensors) {
      tensor = in_shape_of(tensor.narrow(0, s.segment.begin, s.segment.numel).clone(), s.master);
    }
    for (auto& [name, tensor] : state.uncut) {
      tensor = tensor.to(p.tensor.device(), at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    }
    states.back() =
        adapter_of(inner, s.group).make_state(inner, s.group, s.master, state, s.moments);
  }
  return states;
}

void take_over(Engine& engine, States& states) {
  ShardOptimizer& shards = engine.shards;
  engine.comms->close_on_error([&] {
    torch::optim::Optimizer& inner = shards.inner_with_counts();
    for (size_t i = 0; i < states.size(); ++i) {
      set_state(inner, shards.segments()[i], std::move(states[i]));
    }
    shards.adopt_inner_state();
  });
}

// Throws unless all of its state is of tensors that `table` knows.
void check_known(const torch::optim::Optimizer& plain, const ParameterTable& table) {
  std::unordered_set<const void*> known;
  for (const Parameter& p : table.parameters()) known.insert(p.tensor.unsafeGetTensorImpl());
  // Adagrad's constructor makes state for these too.
  for (const NamedTensor& f : table.frozen()) known.insert(f.tensor.unsafeGetTensorImpl());
  for (const auto& item : plain.state()) {
    TORCH_CHECK(known.count(item.first) != 0,
                "load_plain_state: expected state of this optimizer's parameters, got "
                "some of another tensor; make the plain optimizer over the same module");
  }
}

void check_class(Engine& engine) {
  engine.check_no_gradients();
  engine.table.verify_unchanged();
  const torch::optim::Optimizer& inner = engine.shards.raw_inner();
  TORCH_CHECK(is_known(inner), "load_plain_state: expected torch's ", known_classes(), ", got ",
              optimizer_name(inner), "; for other classes use load_checkpoint()");
}

// The state that `plain` has of `p`, in whichever of its groups that is.
std::optional<InnerState> read_plain_state(const torch::optim::Optimizer& plain,
                                           const torch::optim::Optimizer& inner, const Parameter& p,
                                           int64_t group) {
  const auto found = plain.state().find(p.tensor.unsafeGetTensorImpl());
  if (found == plain.state().end() || !found->second) return std::nullopt;
  const OptimizerAdapter& stored = adapter_of(*found->second);
  const OptimizerAdapter& here = adapter_of(inner, group);
  TORCH_CHECK(here.is_class_of(*found->second), "load_plain_state: parameter ", p.name,
              ": expected state of ", here.name(), ", which updates it here, got that of ",
              stored.name(), "; let the same class update it in both");
  return here.read_state(plain, *found->second, p.tensor);
}

// The state in a file of export_optimizer_state().
class StateFile {
 public:
  // `mesh` is what all ranks hold; null where each holds the same. Throws for state of another
  // class or of tensors that no rank has.
  StateFile(const std::string& path, Engine& engine, const MeshTensors* mesh)
      : path_(path), files_(path), inner_(engine.shards.inner_with_counts()), mesh_(mesh) {
    const auto metadata = files_.metadata();
    const auto stored = metadata.find(kPlainOptimizer);
    TORCH_CHECK(stored != metadata.end(), path, ": expected a __metadata__ with the class as \"",
                kPlainOptimizer, "\", got none; docs/checkpoints.md has a function that writes it");
    const std::string name = plain_class_name(optimizer_name(inner_));
    TORCH_CHECK(plain_class_name(stored->second) == name, path, ": expected state of ", name,
                ", got ", printable(stored->second));
    std::unordered_set<std::string> known;
    for (const Parameter& p : engine.table.parameters()) known.insert(p.name);
    // Adagrad's constructor makes state for these too.
    for (const NamedTensor& f : engine.table.frozen()) known.insert(f.name);
    for (const auto& item : files_.names()) {
      const auto [parameter, kind] = parse_plain_state_key(item.first, path);
      TORCH_CHECK(known.count(parameter) != 0 || (mesh_ != nullptr && mesh_->has(parameter)), path,
                  ": expected state of this optimizer's parameters, got ", printable(item.first));
      kinds_[parameter].push_back(kind);
    }
  }

  std::optional<InnerState> read(const Parameter& p, int64_t group) {
    const auto found = kinds_.find(p.name);
    if (found == kinds_.end()) return std::nullopt;
    InnerState state;
    for (const std::string& kind : found->second) add(p, kind, state);
    for (const std::string& name : adapter_of(inner_, group).required_state()) {
      TORCH_CHECK(std::count(found->second.begin(), found->second.end(), name) != 0, path_,
                  ": parameter ", p.name, ": expected state called ", name, ", got none");
    }
    return state;
  }

 private:
  void add(const Parameter& p, const std::string& kind, InnerState& state) {
    const auto source = files_.find(plain_state_key(p.name, kind));
    const auto where = [&] { return path_ + ": parameter " + p.name + ": " + kind; };
    TORCH_CHECK(source.tensor->dtype != c10::ScalarType::Undefined, where(),
                ": expected a dtype that this library knows, got another");
    TORCH_CHECK(kind == "step" || c10::isFloatingType(source.tensor->dtype), where(),
                ": expected a floating point dtype, got ", source.tensor->dtype);
    const auto read = [&] {
      // One file is open: the last one.
      if (open_ != nullptr && open_ != source.file) open_->reader.release();
      open_ = source.file;
      return source.read();
    };
    const c10::IntArrayRef shape = source.tensor->shape;
    if (kind == "step") {
      TORCH_CHECK(
          source.tensor->end - source.tensor->begin == c10::elementSize(source.tensor->dtype),
          where(), ": expected one number, got shape ", shape);
      const auto step = read().item<double>();
      TORCH_CHECK(step >= 0 && step <= kCountLimit && step == std::floor(step), where(),
                  ": expected a whole number from 0 to ", kCountLimit, ", got ", step);
      state.values.emplace_back(kind, at::full({1}, static_cast<int64_t>(step), at::kLong));
      return;
    }
    const ManifestParameter here = held_here(p, mesh_);
    const auto factor = factor_shape(kind, whole_shape(here));
    const c10::IntArrayRef expected = factor ? *factor : whole_shape(here);
    TORCH_CHECK(shape == expected, where(), ": expected shape ", expected, ", got ", shape);
    TORCH_CHECK(!factor || !is_part(here), where(),
                ": expected a whole parameter, got a tensor-parallel part, which has its own");
    const at::Tensor whole = read();
    if (factor) {
      state.uncut.emplace_back(kind, whole.reshape({-1}));
    } else if (!is_part(here)) {
      state.tensors.emplace_back(kind, whole);
    } else {
      const at::Tensor own = at::empty(here.shape, whole.options());
      for (const auto& [to, from] : part_views(here, own, whole)) to.copy_(from);
      state.tensors.emplace_back(kind, own);
    }
  }

  const std::string path_;
  SafetensorsFiles files_;
  SafetensorsFiles::File* open_ = nullptr;
  torch::optim::Optimizer& inner_;
  const MeshTensors* const mesh_;
  std::map<std::string, std::vector<std::string>> kinds_;  // by parameter
};

}  // namespace

void load_plain_state(Engine& engine, const torch::optim::Optimizer& plain) {
  States states;
  const auto check = [&] {
    check_class(engine);
    const torch::optim::Optimizer& inner = engine.shards.raw_inner();
    TORCH_CHECK(optimizer_name(plain) == optimizer_name(inner),
                "load_plain_state: expected state of ", optimizer_name(inner), ", got ",
                optimizer_name(plain));
    check_known(plain, engine.table);
    states = cut_all(engine, [&](const Parameter& p, int64_t group) {
      return read_plain_state(plain, inner, p, group);
    });
  };
  engine.agree(Call::kLoadCheckpoint, check, {"load_plain_state", {}});
  take_over(engine, states);
}

void load_plain_state(Engine& engine, const std::string& path, const Engine::ParamGroups& groups) {
  const std::string what = "load_plain_state(" + path + ")";
  engine.agree(Call::kLoadCheckpoint,
               [&] {
                 check_class(engine);
                 engine.shards.groups().check(groups);
               },
               {"load_plain_state of a file", {}});
  const auto mesh = merge_tensors(engine, what, groups);
  States states;
  run_on_all_ranks(*engine.comms->control, what, [&] {
    StateFile file(path, engine, mesh.get());
    states =
        cut_all(engine, [&](const Parameter& p, int64_t group) { return file.read(p, group); });
  });
  take_over(engine, states);
}

}  // namespace zero
