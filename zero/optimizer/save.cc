// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bookkeeping/layout.h"
#include "zero/agreement/all_or_none.h"
#include "zero/base/error_text.h"
#include "zero/base/thread_priority.h"
#include "zero/checkpoint/atomic_directory.h"
#include "zero/checkpoint/memory_file.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/checkpoint/shard_copies.h"
#include "zero/checkpoint/writer.h"
#include "zero/inner/classes.h"
#include "zero/inner/state.h"
#include "zero/optimizer/held_tensors.h"
#include "zero/optimizer/impl.h"
#include "zero/optimizer/included_states.h"
#include "zero/pending_checkpoint.h"
#include "zero/version.h"

namespace zero {
namespace {

TensorToSave piece(const std::string& owner, const std::string& kind, const Segment& segment,
                   at::Tensor tensor) {
  const std::string range = "[" + std::to_string(segment.begin) + ":" +
                            std::to_string(segment.begin + segment.numel) + "]";
  return {{owner + range + "." + kind, owner, kind, segment.begin, segment.numel, 0},
          std::move(tensor)};
}

// The file of one rank, with views of its shard. `bucket_of` receives the bucket of each tensor, or
// ShardCopies::kOfNone. If several ranks hold copies of a shard, the first one saves it.
FileToSave rank_file(const ParameterTable& table, const ShardOptimizer& shards, int rank,
                     const std::function<bool(int64_t parameter)>& saves,
                     std::vector<int64_t>& bucket_of) {
  FileToSave file{rank_file_name(rank), {}};
  const torch::optim::Optimizer& inner = shards.inner();
  for (const SegmentTensors& s : shards.segments()) {
    if (!saves(s.segment.parameter)) continue;
    const std::string& owner = table.parameters()[s.segment.parameter].name;
    file.tensors.push_back(piece(owner, "master", s.segment, elements_of(s.master, s.master)));
    bucket_of.resize(file.tensors.size(), s.segment.bucket);
    const auto state = read_inner_state(inner, s.group, s.master);
    if (!state) continue;
    const auto add = [&](const std::string& kind, const Segment& range, const at::Tensor& tensor) {
      TORCH_CHECK(safetensors_knows(tensor.scalar_type()), "checkpoint: parameter ", owner,
                  ": expected state ", kind, " of a dtype that safetensors has, got ",
                  tensor.scalar_type());
      file.tensors.push_back(piece(owner, kind, range, tensor));
    };
    for (const auto& [kind, tensor] : state->tensors) {
      add(kind, s.segment, elements_of(tensor, s.master));
    }
    for (const auto& [kind, tensor] : state->uncut) {
      Segment range = s.segment;
      range.numel = tensor.numel();
      add(kUncutPrefix + kind, range, tensor);
    }
    for (const auto& [kind, tensor] : state->values) add(kind, s.segment, tensor);
    bucket_of.resize(file.tensors.size(), s.segment.bucket);
  }
  return file;
}

FileToSave frozen_file(const ParameterTable& table, int rank) {
  FileToSave file{frozen_file_name(rank), {}};
  const auto add = [&](const std::vector<NamedTensor>& list, const char* kind) {
    for (const NamedTensor& item : list) {
      file.tensors.push_back(
          {{item.name, item.name, kind, 0, item.tensor.numel(), 0}, item.tensor.detach()});
    }
  };
  add(table.unmanaged(), "frozen");
  add(table.buffers(), "buffer");
  return file;
}

void rename(TensorToSave& tensor, const std::string& owner) {
  tensor.about.key = owner + tensor.about.key.substr(tensor.about.owner.size());
  tensor.about.owner = owner;
}

// The domain of the parameter that a tensor of a rank's file is a piece of; null for others.
std::map<std::string, const ShardDomain*> domains_by_name(const ParameterTable& table,
                                                          const ShardDomains& domains) {
  std::map<std::string, const ShardDomain*> result;
  for (const Parameter& p : table.parameters()) {
    result[p.name] = &domains.list[domains.of_group[p.group]];
  }
  return result;
}

// In the files of a checkpoint, and in those that are exported from it, tensors are found by name.
void check_names(const ParameterTable& table) {
  std::unordered_map<std::string, const char*> kinds;
  const auto add = [&](const std::string& name, const char* kind) {
    TORCH_CHECK(name != "__metadata__", "checkpoint: expected another name than ", name, " for a ",
                kind, ", since files of safetensors have no tensor of that name");
    const auto [other, added] = kinds.emplace(name, kind);
    TORCH_CHECK(added, "checkpoint: ", name, ": expected one tensor of that name, got a ",
                other->second, " and a ", kind, "; give one of them another name");
  };
  for (const Parameter& p : table.parameters()) add(p.name, "parameter");
  for (const NamedTensor& f : table.unmanaged()) add(f.name, "frozen parameter");
  for (const NamedTensor& b : table.buffers()) add(b.name, "buffer");
}

std::vector<ManifestParameter> describe(const std::vector<NamedTensor>& list) {
  std::vector<ManifestParameter> result;
  for (const NamedTensor& item : list) {
    result.push_back({item.name, item.tensor.sizes().vec(), {}, item.tensor.scalar_type(), 0});
  }
  return result;
}

}  // namespace

Manifest ZeroOptimizer::Impl::make_manifest(const SaveOptions& save, const ParamGroups& groups,
                                            const MeshTensors* mesh) const {
  Manifest m;
  m.library_version = ZERO_VERSION_TEXT;
  m.torch_version = TORCH_VERSION;
  m.world_size = comms->control->world_size();
  m.stage = options.stage();
  m.layout = layout_names(plan);
  m.bucket_bytes = options.bucket_bytes().value_or(
      default_bucket_bytes(domains.home.world_size(), !device.is_cpu()));
  m.plan_fingerprint = plan.fingerprint();
  m.optimizer = optimizer_name(shards.inner());
  const StepCounts::Values made = record.counts();
  m.steps = made.steps;
  m.skipped_steps = made.skipped_steps;
  const LossScaler::State state = record.scaler().state();
  m.dynamic_scale = record.scaler().dynamic();
  m.scale = state.scale;
  m.good_steps = state.good_steps;
  m.hysteresis_left = state.hysteresis_left;
  m.skipped_at_min = state.skipped_at_min;
  m.metadata = save.metadata();
  if (mesh != nullptr) {
    m.holders = mesh->holders();
    m.groups = mesh->groups();
    m.parameters = mesh->parameters();
    m.frozen = mesh->frozen();
    m.buffers = mesh->buffers();
    return m;
  }
  for (const auto& g : groups) m.groups.push_back(stored_option_values(g.options()));
  for (const Parameter& p : table.parameters()) {
    m.parameters.push_back({p.name, p.sizes, p.strides, p.tensor.scalar_type(), p.group});
  }
  m.frozen = describe(table.unmanaged());
  m.buffers = describe(table.buffers());
  return m;
}

std::unique_ptr<MeshTensors> ZeroOptimizer::Impl::merge_tensors(const std::string& what,
                                                                const ParamGroups& groups) {
  const auto& parts = options.tensor_parts();
  if (domains.uniform && (!parts || parts->group.world_size() == 1)) return nullptr;
  std::map<std::string, int64_t> own;
  const auto texts = run_on_all_ranks(*comms->control, what, [&] {
    own = own_parts(table, options);
    return held_text(describe_held(table, domains, options, groups));
  });
  std::vector<HeldTensors> held;
  for (size_t r = 0; r < texts.size(); ++r) {
    held.push_back(parse_held(texts[r], "tensors of rank " + std::to_string(r)));
  }
  try {
    return std::make_unique<MeshTensors>(std::move(held), std::move(own));
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "rank ", comms->rank(), ": ", what, ": ", error_text(error));
  }
}

void ZeroOptimizer::Impl::drop_what_others_store(const MeshTensors& mesh, FileToSave& own,
                                                 FileToSave& whole,
                                                 std::vector<int64_t>& bucket_of) const {
  const auto by_name = domains_by_name(table, domains);
  size_t kept = 0;
  for (size_t i = 0; i < own.tensors.size(); ++i) {
    const auto domain = by_name.find(own.tensors[i].about.owner);  // none: an included state
    if (domain != by_name.end()) {
      const std::string& name = domain->first;
      if (!mesh.stores(name, holder_of(domain->second->group, domains.mesh))) continue;
      rename(own.tensors[i], stored_name(mesh.own(name)));
    }
    bucket_of[kept] = bucket_of[i];
    if (kept != i) own.tensors[kept] = std::move(own.tensors[i]);
    ++kept;
  }
  own.tensors.resize(kept);
  bucket_of.resize(kept);
  const int64_t home = holder_of(domains.home, domains.mesh);
  std::erase_if(whole.tensors, [&](const TensorToSave& t) {
    return domains.home.rank() != 0 || !mesh.stores(t.about.owner, home);
  });
  for (TensorToSave& t : whole.tensors) rename(t, stored_name(mesh.own(t.about.owner)));
}

ZeroOptimizer::Impl::Save ZeroOptimizer::Impl::begin_save(const std::string& folder,
                                                          const SaveOptions& save, bool copy,
                                                          const ParamGroups& groups) {
  // The inner optimizer's state is looked at here, where all ranks learn of an error.
  FileToSave own;
  std::vector<int64_t> bucket_of;
  const auto check = [&] {
    check_can_be_stored(groups);
    check_names(table);
    verify_untouched();
    table.verify_whole();
    own = shard_file(bucket_of);
    for (TensorToSave& state : states_to_save(save, comms->control->rank())) {
      own.tensors.push_back(std::move(state));
    }
    bucket_of.resize(own.tensors.size(), ShardCopies::kOfNone);
  };
  agree(Call::kSaveCheckpoint, check,
        {(save.shared_folder() ? folder : "folders of own disks") +
             (save.overwrite() ? ", overwrite" : "") + (copy ? ", asynchronous" : "") +
             included_text(save),
         {}});
  const auto mesh = merge_tensors("save_checkpoint(" + folder + ")", groups);
  FileToSave whole;
  if (mesh || comms->rank() == 0) whole = frozen_file(table, comms->rank());
  if (mesh) drop_what_others_store(*mesh, own, whole, bucket_of);
  Save result{std::make_shared<CheckpointWriter>(*comms->control, folder, save.overwrite(),
                                                 save.shared_folder()),
              make_manifest(save, groups, mesh.get())};
  result.writer->begin();
  if (comms->rank() == 0) {
    result.manifest.run = run.id();
    result.manifest.saved = run.next_save(parent_of(folder));
  }
  const bool has_whole = comms->rank() == 0 || !whole.tensors.empty();
  if (!copy) {
    result.files.push_back(std::move(own));
    if (has_whole) result.files.push_back(std::move(whole));
    return result;
  }
  // What goes wrong here, for want of memory perhaps, all ranks learn of at the end of the save.
  result.writer->prepare([&] {
    const std::string& id = result.writer->id();
    const auto shard = std::make_shared<MemoryFileWriter>(
        std::move(own), id, [&](int64_t bytes) { return memory_of_copies.allocate(bytes); });
    result.copied_files.push_back(shard);
    result.copies = shard->copy(bucket_of);
    if (!has_whole) return;
    const auto others = std::make_shared<MemoryFileWriter>(std::move(whole), id, fresh_memory);
    result.copied_files.push_back(others);
    others->copy_all();  // what step() does not change anyone may change
  });
  return result;
}

FileToSave ZeroOptimizer::Impl::shard_file(std::vector<int64_t>& bucket_of) const {
  FileToSave file = rank_file(
      table, shards, comms->rank(),
      [&](int64_t parameter) {
        const auto& replicas = domains.list[domain_of[parameter]].replicas;
        return !replicas || replicas->rank() == 0;
      },
      bucket_of);
  // Copies from a GPU wait for the stream that computes.
  if (!device.is_cpu()) bucket_of.assign(bucket_of.size(), ShardCopies::kOfNone);
  return file;
}

void ZeroOptimizer::Impl::check_can_be_stored(const ParamGroups& groups) const {
  check_no_gradients();
  check_groups(groups);
}

void ZeroOptimizer::save_checkpoint(const std::string& folder, const SaveOptions& options) {
  at::NoGradGuard no_grad;
  impl_->protocol.fail_stop([&] {
    Impl::Save save = impl_->begin_save(folder, options, /*copy=*/false, param_groups_);
    save.writer->write_files(save.files);
    save.writer->finish(std::move(save.manifest));
  });
}

std::unique_ptr<PendingCheckpoint> ZeroOptimizer::save_checkpoint_async(
    const std::string& folder, const SaveOptions& options) {
  at::NoGradGuard no_grad;
  std::unique_ptr<PendingCheckpoint> pending;
  impl_->protocol.fail_stop([&] {
    Impl::Save save = impl_->begin_save(folder, options, /*copy=*/true, param_groups_);
    auto finish = [impl = impl_.get(), lives = std::weak_ptr<const bool>(impl_->lives),
                   writer = save.writer, folder,
                   // Equal on all ranks, as folders of own disks need not be.
                   end = "the end of " + (options.shared_folder() ? folder : save.writer->id()),
                   manifest = std::move(save.manifest)] {
      TORCH_CHECK(!lives.expired(), "save_checkpoint_async(", folder,
                  "): expected the optimizer and the ranks that began it, got none or others: the "
                  "optimizer has been destroyed, or has gone through recover() or a change of "
                  "parameters; finish a save before that, or save again");
      impl->protocol.fail_stop([&] {
        impl->agree(Call::kSaveCheckpoint, nullptr, {end, {}});
        writer->finish(manifest, [impl](std::function<void()> remove) {
          impl->removals.push([remove = std::move(remove), here = std::this_thread::get_id()] {
            if (std::this_thread::get_id() != here) lower_thread_priority();
            remove();
          });
        });
      });
    };
    auto copy = [writer = save.writer, copies = save.copies] {
      if (copies) writer->prepare([&] { copies->copy_all(); });
    };
    auto write = [writer = save.writer, files = std::move(save.copied_files)](
                     const std::atomic<bool>& pause) mutable { writer->write_files(files, pause); };
    pending =
        std::make_unique<PendingCheckpoint>(std::move(copy), std::move(write), std::move(finish));
    impl_->copies = save.copies;
  });
  return pending;
}

}  // namespace zero
