// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/included_states.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "zero/base/error_text.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

std::string kind_of(bool per_rank, int rank) {
  return per_rank ? "state of rank " + std::to_string(rank) : kSharedState;
}

template <typename Object>
void add(std::vector<IncludedState<Object>>& states, IncludedState<Object> state) {
  TORCH_CHECK(!state.name.empty(), "include(): expected a name, got an empty one");
  for (const auto& other : states) {
    TORCH_CHECK(other.name != state.name,
                "include(): expected one object under each name, got two "
                "under \"",
                state.name, "\"");
  }
  states.push_back(std::move(state));
}

// "state X: included for all ranks, in the checkpoint per rank", or empty where it is there.
std::string missing(const CheckpointReader& reader, const IncludedState<Stateful>& wanted) {
  const auto& kinds = reader.kinds(kStatePrefix + wanted.name);
  const std::string line = "state " + wanted.name + ": included in this load, ";
  if (kinds.empty()) return line + "missing in the checkpoint";
  if ((kinds.count(kSharedState) == 0) == wanted.per_rank) return {};
  return line + (wanted.per_rank ? "saved by include() and not by include_per_rank()"
                                 : "saved by include_per_rank() and not by include()");
}

}  // namespace

SaveOptions& SaveOptions::include(const std::string& name, const Stateful& object) {
  add(states_, {name, &object, false});
  return *this;
}

SaveOptions& SaveOptions::include_per_rank(const std::string& name, const Stateful& object) {
  add(states_, {name, &object, true});
  return *this;
}

LoadOptions& LoadOptions::include(const std::string& name, Stateful& object) {
  add(states_, {name, &object, false});
  return *this;
}

LoadOptions& LoadOptions::include_per_rank(const std::string& name, Stateful& object) {
  add(states_, {name, &object, true});
  return *this;
}

TensorToSave state_to_save(const std::string& owner, const std::string& kind,
                           const Stateful& object) {
  const std::string state = object.state();
  const auto size = static_cast<int64_t>(state.size());
  const at::Tensor bytes = at::empty({size}, at::TensorOptions().dtype(at::kByte));
  if (size > 0) std::memcpy(bytes.mutable_data_ptr(), state.data(), state.size());
  return {{owner, kind, 0, size}, bytes};
}

std::vector<TensorToSave> states_to_save(const SaveOptions& save, int rank) {
  std::vector<TensorToSave> result;
  for (const auto& included : save.states()) {
    if (!included.per_rank && rank != 0) continue;
    try {
      result.push_back(state_to_save(kStatePrefix + included.name, kind_of(included.per_rank, rank),
                                     *included.object));
    } catch (const std::exception& error) {
      if (is_of_communication(error) || is_out_of_memory(error)) throw;
      TORCH_CHECK(false, "state() of \"", included.name, "\": ", error_text(error));
    }
  }
  return result;
}

void compare_states(const CheckpointReader& reader, const LoadOptions& load, int world_size,
                    CheckpointDifferences& differences) {
  std::vector<std::string> notes;
  const int64_t saved = reader.manifest().world_size;
  for (const auto& wanted : load.states()) {
    const std::string line = missing(reader, wanted);
    if (!line.empty()) {
      differences.lines.push_back(line);
    } else if (wanted.per_rank && saved != world_size) {
      notes.push_back(
          "state " + wanted.name + ": in the checkpoint of " + std::to_string(saved) +
          " ranks, here " + std::to_string(world_size) + " ranks; " +
          (saved < world_size
               ? "the ranks from " + std::to_string(saved) + " on keep the state they have"
               : "those of the ranks from " + std::to_string(world_size) + " on are not used"));
    }
  }
  for (const std::string& name : reader.state_names()) {
    const bool included =
        std::any_of(load.states().begin(), load.states().end(),
                    [&](const IncludedState<Stateful>& state) { return state.name == name; });
    if (!included) {
      notes.push_back("state " + name + ": in the checkpoint, not included in this load");
    }
  }
  differences.notes.insert(differences.notes.begin(), notes.begin(), notes.end());
}

void add_states_to(NeededTensors& needed, const LoadOptions& load, int rank) {
  for (const auto& wanted : load.states()) {
    needed.add_state(kStatePrefix + wanted.name, kind_of(wanted.per_rank, rank));
  }
}

StatesToSet read_states(CheckpointReader& reader, const LoadOptions& load, int rank) {
  StatesToSet result;
  for (const auto& wanted : load.states()) {
    const std::string owner = kStatePrefix + wanted.name;
    const std::string kind = kind_of(wanted.per_rank, rank);
    if (reader.kinds(owner).count(kind) == 0) continue;
    result.emplace_back(wanted.object, reader.read_bytes(owner, kind));
  }
  return result;
}

void StateChange::set(const StatesToSet& states) {
  for (const auto& group : groups_) {
    former_options_.push_back(adapter_of(group.options()).option_values(group.options()));
  }
  for (const auto& [object, state] : states) {
    former_.emplace_back(object, object->state());
    object->set_state(state);
  }
}

StateChange::~StateChange() {
  if (former_.empty()) return;
  const auto take_back = [](const char* what, const std::function<void()>& back) {
    try {
      back();
    } catch (...) {  // whatever an object of the user throws
      TORCH_WARN("load_checkpoint: ", what,
                 " did not take back its own former state: ", text_of_caught());
    }
  };
  for (auto former = former_.rbegin(); former != former_.rend(); ++former) {
    take_back("an object", [&] { former->first->set_state(former->second); });
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    auto& options = groups_[g].options();
    take_back("a parameter group",
              [&] { adapter_of(options).set_option_values(options, former_options_[g]); });
  }
}

}  // namespace zero
