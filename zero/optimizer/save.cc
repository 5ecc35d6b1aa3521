// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "zero/base/thread_priority.h"
#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/memory_file.h"
#include "zero/optimizer/checkpoints.h"
#include "zero/optimizer/included_states.h"
#include "zero/optimizer/mesh_description.h"
#include "zero/optimizer/shard_file.h"

namespace zero {
namespace {

// The files of tensors that a rank holds whole: frozen parameters, which do not change, and buffers
// with the parameters that an optimizer of another class trains, which do.
std::vector<FileToSave> whole_files(const ParameterTable& table, int rank) {
  FileToSave frozen{whole_file_name(kFrozenFile, rank), {}};
  FileToSave others{whole_file_name("buffers", rank), {}};
  const auto add = [](const NamedTensor& item, const char* kind, FileToSave& file) {
    file.tensors.push_back({{item.name, kind, 0, item.tensor.numel()}, item.tensor.detach()});
  };
  for (const NamedTensor& item : table.unmanaged()) {
    add(item, "frozen", item.trainable ? others : frozen);
  }
  for (const NamedTensor& item : table.buffers()) add(item, "buffer", others);
  return {std::move(frozen), std::move(others)};
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

// Leaves to this rank's files what it stores, under the names of its parts.
void drop_what_others_store(const Engine& engine, const MeshTensors& mesh, FileToSave& own,
                            std::vector<FileToSave>& whole) {
  std::map<std::string, int64_t> sets;  // first ranks, by parameter
  for (const Parameter& p : engine.table.parameters()) {
    const ShardDomain& domain = engine.domains.list[engine.domains.of_group[p.group]];
    sets[p.name] = first_rank_of(domain.group, engine.domains.mesh);
  }
  std::erase_if(own.tensors, [&](const TensorToSave& t) {
    const auto set = sets.find(t.about.owner);  // none: an included state
    return set != sets.end() && !mesh.stores(t.about.owner, set->second);
  });
  for (TensorToSave& t : own.tensors) {
    if (sets.count(t.about.owner) > 0) t.about.owner = stored_name(mesh.own(t.about.owner));
  }
  const int64_t home = first_rank_of(engine.domains.home, engine.domains.mesh);
  for (FileToSave& file : whole) {
    std::erase_if(file.tensors, [&](const TensorToSave& t) {
      return engine.domains.home.rank() != 0 || !mesh.stores(t.about.owner, home);
    });
    for (TensorToSave& t : file.tensors) t.about.owner = stored_name(mesh.own(t.about.owner));
  }
}

}  // namespace

Checkpoints::Save Checkpoints::begin_save(const std::string& folder, const SaveOptions& save,
                                          SaveKind kind, const ParamGroups& groups) {
  Engine& engine = *engine_;
  const std::string replaced = engine.table.refresh_lists(engine.module);
  // The inner optimizer's state is looked at here, where all ranks learn of an error.
  FileToSave own;
  const auto check = [&] {
    engine.check_no_gradients();
    engine.shards.groups().check(groups);
    TORCH_CHECK(replaced.empty(), replaced);
    check_names(engine.table);
    engine.table.verify_unchanged();
    engine.table.verify_frozen_and_buffers();
    own = shard_file(engine);
    for (TensorToSave& state : states_to_save(save, engine.comms->control->rank())) {
      own.tensors.push_back(std::move(state));
    }
  };
  engine.agree(Call::kSaveCheckpoint, check,
               {(save.shared_folder() ? folder : "folders of own disks") +
                    (save.overwrite() ? ", overwrite" : "") +
                    (kind == SaveKind::kAsynchronous ? ", asynchronous" : "") + included_text(save),
                whole_arguments(engine)});
  const auto mesh =
      merge_tensors(engine, "save_checkpoint(" + folder + ")", groups, /*values=*/true);
  std::vector<FileToSave> whole;
  if (mesh || engine.comms->rank() == 0) whole = whole_files(engine.table, engine.comms->rank());
  if (mesh) drop_what_others_store(engine, *mesh, own, whole);
  Save result{std::make_shared<CheckpointWriter>(*engine.comms->control, folder, save.overwrite(),
                                                 save.shared_folder()),
              make_manifest(engine, groups, mesh.get())};
  result.manifest.metadata = save.metadata();
  abandon_lost_saves();
  result.writer->begin();
  if (engine.comms->rank() == 0) {
    result.manifest.run = run_.id();
    result.manifest.saved = run_.next_save(parent_of(result.writer->folder()));
  }
  std::erase_if(whole, [&](const FileToSave& file) {
    return file.tensors.empty() || frozen_.link(file, *result.writer);
  });
  if (kind == SaveKind::kAsynchronous) {
    copy_to_memory(std::move(own), std::move(whole), result);
  } else {
    result.files = std::move(whole);
    result.files.insert(result.files.begin(), std::move(own));
  }
  return result;
}

// What goes wrong here, for want of memory perhaps, all ranks learn of at the end of the save.
void Checkpoints::copy_to_memory(FileToSave shard, std::vector<FileToSave> whole, Save& save) {
  save.writer->prepare([&] {
    const std::string& id = save.writer->id();
    // First what step() does not change, but anyone may: behind the shard it would wait for it.
    for (FileToSave& file : whole) {
      const auto copied = std::make_shared<MemoryFileWriter>(
          std::move(file), id, [](int64_t bytes, c10::Device) { return fresh_memory(bytes); });
      save.copied_files.push_back(copied);
      copied->copy()->copy_all();
    }
    const auto copied = std::make_shared<MemoryFileWriter>(
        std::move(shard), id,
        [&](int64_t bytes, c10::Device device) { return memory_.allocate(bytes, device); });
    save.copied_files.push_front(copied);
    save.copies = copied->copy();
  });
}

void Checkpoints::save(const std::string& folder, const SaveOptions& options,
                       const ParamGroups& groups) {
  Save save = begin_save(folder, options, SaveKind::kNow, groups);
  save.writer->write_files(std::move(save.files));
  save.writer->finish(std::move(save.manifest));
  end_save(*save.writer);
}

void Checkpoints::end_save(const CheckpointWriter& writer) {
  const FileContent* const file =
      writer.written(whole_file_name(kFrozenFile, engine_->comms->rank()));
  frozen_.keep(writer.folder(), file == nullptr ? ManifestFile() : file->about, writer.id());
}

std::unique_ptr<PendingCheckpoint> Checkpoints::save_async(const std::string& folder,
                                                           const SaveOptions& options,
                                                           const ParamGroups& groups) {
  Save save = begin_save(folder, options, SaveKind::kAsynchronous, groups);
  const auto engine = std::make_shared<const std::weak_ptr<Engine>>(engine_);
  // What the ranks agree on at the end. Folders of own disks need not be equal on all of them.
  const std::string argument =
      "the end of " + (options.shared_folder() ? folder : save.writer->id());
  BackgroundSave parts;
  parts.copy = [writer = save.writer, copies = save.copies] {
    if (copies) writer->prepare([&] { copies->copy_all(); });
  };
  parts.write = [writer = save.writer, files = std::move(save.copied_files)](
                    const std::atomic<bool>& pause) mutable { writer->write_files(files, pause); };
  parts.finish = [this, engine, writer = save.writer, manifest = std::move(save.manifest), folder,
                  argument](const std::function<void()>& write_rest) {
    const std::shared_ptr<Engine> there = engine->lock();  // and so is this object
    TORCH_CHECK(there != nullptr, "save_checkpoint_async(", folder,
                "): expected the optimizer and the ranks that began it, got none or others: the "
                "optimizer has been destroyed, or has gone through recover() or a change of "
                "parameters; finish a save before that, or save again");
    there->protocol.run_call([&] {
      there->agree(Call::kSaveCheckpoint, nullptr, {argument, {}});
      there->comms->close_on_error(write_rest);
      writer->finish(manifest, [this](std::function<void()> remove) {
        remove_beside_training(std::move(remove));
      });
      end_save(*writer);
    });
  };
  parts.wait = c10::str("rank ", engine_->comms->rank(), " of ", engine_->group().world_size(),
                        " waits for its thread that writes the checkpoint ", folder);
  parts.limit = engine_->group().timeout();
  auto pending = parts.start();
  if (save.copies) engine_->readers.add(save.copies);
  std::erase_if(pending_, [](const auto& other) { return other.second.engine.expired(); });
  pending_[save.writer->folder()] = {engine, save.writer};
  return pending;
}

void Checkpoints::remove_beside_training(std::function<void()> remove) {
  removals_.push([remove = std::move(remove), caller = std::this_thread::get_id()] {
    if (std::this_thread::get_id() != caller) lower_thread_priority();
    remove();
  });
}

void Checkpoints::abandon_lost_saves() {
  for (const auto& [folder, pending] : pending_) {
    const auto of = pending.engine.lock();
    const auto writer = pending.writer.lock();
    if (of && of->expired() && writer) writer->abandon();
  }
}

void Checkpoints::check_none_pending() const {
  for (const auto& [folder, pending] : pending_) {
    const auto of = pending.engine.lock();
    TORCH_CHECK(!of || of->expired(),
                "expected no save under way, got that of save_checkpoint_async(", folder,
                "); call finish() of its PendingCheckpoint first, or destroy that");
  }
}

}  // namespace zero
