// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/replanning.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <numeric>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "bookkeeping/layout.h"
#include "zero/agreement/all_or_none.h"
#include "zero/agreement/same_on_all_ranks.h"
#include "zero/base/error_text.h"
#include "zero/base/plain_text.h"
#include "zero/checkpoint/shard_copies.h"
#include "zero/combined_optimizer.h"
#include "zero/inner_optimizers/classes.h"

namespace zero {
namespace {

using ParamGroups = Engine::ParamGroups;

ParamGroups copy_of(const ParamGroups& groups) {
  ParamGroups result;
  for (const auto& g : groups) result.emplace_back(g.params(), g.options().clone());
  return result;
}

// By TensorImpl: the first name, and how many a tensor has.
using Names = std::unordered_map<const void*, std::pair<std::string, size_t>>;

Names names_in(const torch::nn::Module& module) {
  Names names;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().defined()) continue;
    ++names.try_emplace(item.value().unsafeGetTensorImpl(), item.key(), 0).first->second.second;
  }
  return names;
}

std::string name_of(const at::Tensor& parameter, const Names& names) {
  const auto found = names.find(parameter.unsafeGetTensorImpl());
  return found == names.end() ? std::string() : found->second.first;
}

// For the comparison of ranks; check_known() refuses what has no name.
std::string text_of(const std::vector<at::Tensor>& parameters, const torch::nn::Module& module) {
  const Names names = names_in(module);
  std::string text;
  for (const at::Tensor& p : parameters) text += c10::str(" ", name_of(p, names));
  return text;
}

// Throws unless `parameters` are different ones of the module, each given at most once for each of
// its names, which the optimizer manages or, if not, could manage.
void check_known(const torch::nn::Module& module, const ParameterTable& table,
                 const std::vector<at::Tensor>& parameters, bool managed) {
  TORCH_CHECK(!parameters.empty(), "expected parameters, got none");
  const Names names = names_in(module);
  std::unordered_map<const void*, size_t> times;
  for (const at::Tensor& p : parameters) {
    TORCH_CHECK(p.defined(), "expected parameters, got an undefined tensor");
    const std::string name = name_of(p, names);
    TORCH_CHECK(!name.empty(), "expected parameters of the module, got a tensor of shape ",
                p.sizes(),
                " that is registered under no name; an optimizer over NamedTensors has the tensors "
                "of its list alone");
    const void* const impl = p.unsafeGetTensorImpl();
    TORCH_CHECK(++times[impl] <= names.at(impl).second, "parameter ", name,
                ": expected it once, or once for each of its names, got it more often");
    TORCH_CHECK((table.find(p) >= 0) == managed, "parameter ", name, ": expected one that is ",
                managed ? "" : "not ", "managed by this optimizer, got one that is",
                managed ? " not" : "");
    if (managed) continue;
    check_trainable(p, name);
    TORCH_CHECK(!is_managed(p), "parameter ", name,
                ": expected one that no other ZeroOptimizer manages; freeze it there first");
  }
}

// Parameters that were frozen at construction may be in a group too.
size_t remove(const std::vector<at::Tensor>& parameters, ParamGroups& groups) {
  std::unordered_set<const void*> leaving;
  for (const at::Tensor& p : parameters) leaving.insert(p.unsafeGetTensorImpl());
  size_t left = 0;
  for (auto& group : groups) {
    auto& list = group.params();
    const auto leaves = [&](const at::Tensor& p) {
      return leaving.count(p.unsafeGetTensorImpl()) != 0;
    };
    list.erase(std::remove_if(list.begin(), list.end(), leaves), list.end());
    left += list.size();
  }
  return left;
}

void add_group(const torch::optim::OptimizerParamGroup& added, const torch::optim::Optimizer& inner,
               ParamGroups& groups) {
  TORCH_CHECK(
      dynamic_cast<const CombinedOptimizer*>(&inner) == nullptr,
      "expected an inner optimizer of one class, got a CombinedOptimizer, which cannot know "
      "the part that is meant; unfreeze() adds parameters to a group that is there");
  auto options = added.has_options() ? added.options().clone() : inner.defaults().clone();
  TORCH_CHECK(typeid(*options) == typeid(inner.defaults()),
              "expected options of the inner optimizer's class, got those of another one");
  remove(added.params(), groups);
  groups.emplace_back(each_once(added.params()), std::move(options));
}

// Changes requires_grad of parameters, and back if nothing came of it.
class GradientFlags {
 public:
  void set(const std::vector<at::Tensor>& parameters, bool required) {
    for (const at::Tensor& p : parameters) {
      before_.emplace_back(p, p.requires_grad());
      p.requires_grad_(required);
    }
  }
  void undo() {
    for (auto& [p, required] : before_) p.requires_grad_(required);
    before_.clear();
  }

 private:
  std::vector<std::pair<at::Tensor, bool>> before_;
};

// The groups of parameters, by TensorImpl.
using GroupNumbers = std::unordered_map<const void*, size_t>;

GroupNumbers numbers_of(const ParamGroups& groups) {
  GroupNumbers numbers;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& p : groups[g].params()) numbers.emplace(p.unsafeGetTensorImpl(), g);
  }
  return numbers;
}

}  // namespace

// One change, the same on all ranks.
struct Replanning::Change {
  Call call;
  std::vector<at::Tensor> parameters;             // as given; from agree_on() on each once
  bool leaves;                                    // the parameters; else they come
  std::function<void(ParamGroups& groups)> edit;  // throws where a rank's arguments are unusable
  std::string arguments = {};                     // beside the parameters
  ParamGroups groups = {};                        // edited
  // Of parameters that leave: their groups by name, and values; undefined where no arena has them.
  std::map<std::string, size_t> left_groups = {};
  std::vector<at::Tensor> left_values = {};
};

void Replanning::agree_on(Change& change, const ParamGroups& groups) {
  Engine& engine = *engine_;
  const std::vector<at::Tensor> given =
      std::exchange(change.parameters, each_once(change.parameters));
  const std::string replaced = engine.table.refresh_lists(engine.module);
  std::vector<std::string> lines;
  // What construction would find, of these groups or of those of before, when nothing can be taken
  // back any more.
  const auto try_construction = [&] {
    engine.table.check_overlaps([&](const Parameter& p) {
      const int64_t arena = engine.plan.parameter_arena[engine.table.index_or_throw(p.tensor)];
      return engine.plan.arenas[arena].layout->in_place();
    });
    GradientFlags flags;
    const auto undo = c10::make_scope_exit([&] { flags.undo(); });
    flags.set(change.parameters, !change.leaves);
    const ParameterTable table(engine.module, change.groups,
                               engine.table.managed_or(change.parameters));
    for (size_t g = 0; g < change.groups.size(); ++g) {
      lines.push_back(plain_text("options of parameter group ", g, " ",
                                 options_text(change.groups[g].options())));
    }
    for (std::string& line : table.describe()) lines.push_back(std::move(line));
    for (const NamedTensor& item : table.unmanaged()) {
      if (item.trainable) lines.push_back("parameter " + item.name + " of no ZeroOptimizer");
    }
  };
  const auto check = [&] {
    TORCH_CHECK(!engine.options.mesh_group() && engine.options.placements().empty(),
                "expected plain data parallelism, got a mesh or placements; save a checkpoint and "
                "make a new optimizer, which loads it");
    TORCH_CHECK(replaced.empty(), replaced);
    engine.check_no_gradients();
    checkpoints_.check_none_pending();
    engine.shards.groups().check(groups);
    engine.arena.verify_shapes();
    engine.table.verify_values();  // requires_grad may be set before these calls
    change.groups = copy_of(groups);
    check_known(engine.module, engine.table, given, /*managed=*/change.leaves);
    change.edit(change.groups);
    // Another one would leave too, with its masters and state.
    const auto named = change.leaves ? numbers_of({change.parameters}) : GroupNumbers();
    for (const Parameter& p : engine.table.parameters()) {
      TORCH_CHECK(p.tensor.requires_grad() || named.contains(p.tensor.unsafeGetTensorImpl()),
                  "parameter ", p.name,
                  ": expected requires_grad as at construction, got a frozen one that this call "
                  "does not name; set it back before the call, or let freeze() take it too");
    }
    check_options(change.groups);
    const Names names = names_in(engine.module);
    const GroupNumbers numbers = numbers_of(change.leaves ? groups : change.groups);
    for (const at::Tensor& p : change.parameters) {
      const std::string name = name_of(p, names);
      const size_t g = numbers.at(p.unsafeGetTensorImpl());
      if (!change.leaves) {
        check_parameter(engine.shards.raw_inner(), static_cast<int64_t>(g),
                        change.groups[g].options(), p, name);
        continue;
      }
      change.left_groups[name] = g;
      // Before anything changes: where memory is short, all ranks can go on.
      const int64_t arena = engine.plan.parameter_arena[engine.table.index_or_throw(p)];
      const bool in_arena = engine.plan.arenas[arena].layout->in_place();
      change.left_values.push_back(in_arena ? p.detach().clone(at::MemoryFormat::Preserve)
                                            : at::Tensor());
    }
    try_construction();
  };
  engine.agree(change.call, check,
               {text_of(change.parameters, engine.module) + change.arguments, {}});
  check_same_on_all_ranks(*engine.comms->control, /*problem=*/{}, lines, call_name(change.call));
}

std::shared_ptr<Snapshots> Replanning::copy_shard(const ParamGroups& groups,
                                                  const std::string& call) {
  Engine& engine = *engine_;
  engine.record.follow_loss_scale();
  auto result = std::make_shared<Snapshots>();
  run_on_all_ranks(*engine.comms->control, call, [&] {
    auto [file, manifest] = recovery_.protected_shard(groups);
    Snapshot copy;
    copy.world_size = engine.comms->control->world_size();
    copy.manifest = std::move(manifest);
    copy.manifest.id = copy.id();
    MemoryFileWriter writer(std::move(file), copy.id(),
                            [](int64_t bytes, c10::Device) { return fresh_memory(bytes); });
    writer.copy()->copy_all();
    copy.files.emplace(engine.comms->rank(), writer.finish());
    result->add(std::move(copy));
  });
  return result;
}

std::unique_ptr<Engine> Replanning::make_changed(const Change& change, const ParamGroups& groups,
                                                 std::exception_ptr& refusal) {
  Engine& engine = *engine_;
  // An arena stays in memory as long as a parameter is in it.
  for (size_t i = 0; i < change.left_values.size(); ++i) {
    at::Tensor p = change.parameters[i];
    if (change.left_values[i].defined()) p.set_data(change.left_values[i]);
  }
  GradientFlags flags;
  recovery_.stop_protection();
  std::unique_ptr<torch::optim::Optimizer> inner = engine.release();
  try {
    try {
      flags.set(change.parameters, !change.leaves);
      return engine.make_again(inner, engine.group(), change.groups, Engine::Frozen::kUnmanaged,
                               change.parameters);
    } catch (const c10::DistBackendError&) {
      throw;
    } catch (const c10::Error&) {
      flags.undo();
      refusal = std::current_exception();
    }
    return engine.make_again(inner, engine.group(), groups, Engine::Frozen::kUnmanaged);
  } catch (...) {  // whatever an object of the user throws
    flags.undo();
    if (inner) engine.shards.give_back_inner(std::move(inner));  // for those who look at it still
    engine.comms->abort(text_of_caught());
    throw;
  }
}

void Replanning::make(ParamGroups& groups, Change change) {
  const at::NoGradGuard no_grad;
  const std::string call = call_name(change.call);
  std::shared_ptr<Snapshots> shard;
  std::unique_ptr<Engine> made;
  std::exception_ptr refusal;
  engine_->protocol.run_call([&] {
    recovery_.finish();
    agree_on(change, groups);
    shard = copy_shard(groups, call);
    made = make_changed(change, groups, refusal);
  });
  engine_ = std::move(made);
  if (!refusal) {
    for (const auto& [name, group] : change.left_groups) left_groups_[name] = group;
    // In place, for those who hold references.
    for (size_t g = 0; g < groups.size(); ++g) groups[g].params() = change.groups[g].params();
    for (size_t g = groups.size(); g < change.groups.size(); ++g)
      groups.push_back(change.groups[g]);
  }
  CompleteSnapshot all;
  all.servers.resize(static_cast<size_t>(engine_->group().world_size()));
  std::iota(all.servers.begin(), all.servers.end(), 0);
  engine_->protocol.run_call([&] { recovery_.restore(*shard, all, groups, call); });
  if (refusal) std::rethrow_exception(refusal);
}

void Replanning::freeze(const std::vector<at::Tensor>& parameters, ParamGroups& groups) {
  const auto edit = [&](ParamGroups& edited) {
    TORCH_CHECK(remove(parameters, edited) > 0,
                "expected a parameter to stay, got all of them; there would be nothing to "
                "optimize");
  };
  make(groups, {Call::kFreeze, parameters, /*leaves=*/true, edit});
}

void Replanning::unfreeze(const std::vector<at::Tensor>& parameters,
                          std::optional<size_t> param_group, ParamGroups& groups) {
  const std::vector<at::Tensor> once = each_once(parameters);
  const Names names = names_in(engine_->module);
  const GroupNumbers present = numbers_of(groups);
  // Parameters that were frozen at construction may be in a group; freeze() took out others.
  const auto former_group = [&](const at::Tensor& p) -> size_t {
    const auto own = present.find(p.unsafeGetTensorImpl());
    if (own != present.end()) return own->second;
    const auto left = left_groups_.find(name_of(p, names));
    return left == left_groups_.end() ? 0 : left->second;
  };
  std::vector<size_t> into;
  // A rank that has joined since does not know which group freeze() took one from.
  std::string numbers;
  for (const at::Tensor& p : once) {
    into.push_back(param_group ? *param_group : former_group(p));
    numbers += plain_text(" ", into.back());
  }
  const auto edit = [&](ParamGroups& edited) {
    for (const size_t group : into) {
      TORCH_CHECK(group < edited.size(), "expected one of the ", edited.size(),
                  " parameter groups, got number ", group);
    }
    remove(once, edited);
    for (size_t i = 0; i < into.size(); ++i) edited[into[i]].params().push_back(once[i]);
  };
  make(groups, {Call::kUnfreeze, parameters, /*leaves=*/false, edit, numbers});
}

void Replanning::add_param_group(const torch::optim::OptimizerParamGroup& param_group,
                                 ParamGroups& groups) {
  const Engine& engine = *engine_;
  const auto edit = [&](ParamGroups& edited) {
    add_group(param_group, engine.shards.raw_inner(), edited);
  };
  make(groups, {Call::kAddParamGroup, param_group.params(), /*leaves=*/false, edit});
}

}  // namespace zero
