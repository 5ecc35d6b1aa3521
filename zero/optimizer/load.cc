// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/agreement/all_or_none.h"
#include "zero/checkpoint/differences.h"
#include "zero/checkpoint/file_exchange.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/found_files.h"
#include "zero/checkpoint/writer.h"
#include "zero/optimizer/checkpoints.h"
#include "zero/optimizer/included_states.h"
#include "zero/optimizer/mesh_description.h"
#include "zero/optimizer/staging.h"

namespace zero {
namespace {

// torch compares options with those of the last step, and NaN equals nothing.
void check_options(const Manifest& manifest, const std::string& folder) {
  for (size_t g = 0; g < manifest.groups.size(); ++g) {
    for (const auto& [name, value] : manifest.groups[g]) {
      TORCH_CHECK(!std::isnan(value) && (name != "lr" || std::isfinite(value)), folder,
                  ": parameter group ", g, ": expected a number as ", name, ", got ", value,
                  "; restore_options(false) keeps the present options");
    }
  }
}

// All that a load finds before it reads anything but the manifest.
CheckpointDifferences compare(const CheckpointReader& reader, const std::string& folder,
                              const LoadOptions& load, Engine& engine, const MeshTensors* mesh) {
  const Manifest& manifest = reader.manifest();
  const torch::optim::Optimizer& inner = engine.shards.raw_inner();
  CheckpointDifferences result = find_differences(manifest, engine.table, inner, mesh);
  if (result.same_optimizer) {
    find_missing_state(manifest, engine.table, inner, mesh, result);
    if (load.restore_options()) {
      find_unknown_options(manifest, inner, result);
      check_options(manifest, folder);
    }
  }
  compare_states(reader, load, engine.comms->control->world_size(), result);
  result.conversions =
      find_conversions(manifest, managed_parameters(engine.table, engine.options), result);
  const bool stored_ema = has_ema(manifest);
  if (stored_ema != (engine.shards.ema() != nullptr)) {
    result.notes.push_back(
        stored_ema ? "average of parameters: in the checkpoint, none here; it is left out"
                   : "average of parameters: none in the checkpoint; it begins as the "
                     "masters are");
  }
  if (load.strict()) throw_differences(result, folder);
  for (size_t i = 0; i < engine.table.parameters().size(); ++i) {
    const std::string& name = engine.table.parameters()[i].name;
    TORCH_CHECK(
        result.unusable.count(name) == 0 || engine.table.is_as_remembered(static_cast<int64_t>(i)),
        "parameter ", name, ": expected the values the last step left, since the load leaves them ",
        "as they are, got others; call refresh_master_parameters() before the load");
  }
  return result;
}

// The files of which this rank verifies what no rank needs.
std::vector<size_t> files_to_verify(const FoundFiles& found, const Communicator& ranks) {
  std::vector<size_t> files;
  for (size_t f = 0; f < found.manifest.files.size(); ++f) {
    if (found.verifier(f, ranks.world_size()) == ranks.rank()) files.push_back(f);
  }
  return files;
}

Staged stage(CheckpointReader& reader, const std::string& folder, const LoadOptions& load,
             Engine& engine, const MeshTensors* mesh) {
  const ParameterTable& table = engine.table;
  CheckpointDifferences differences = compare(reader, folder, load, engine, mesh);
  Staged staged;
  staged.same_run = differences.lines.empty();
  // Those of a group that holds other parameters here are not meant for them, and numbers of
  // another class mean something else.
  staged.restores_options =
      load.restore_options() && differences.same_groups && differences.same_optimizer;
  staged.groups_from = differences.groups_from;
  Staging staging(reader, table, engine.shards, differences, mesh);
  staging.read_segments(staged);
  staging.read_whole(staged, table.unmanaged(), "frozen");
  staging.read_whole(staged, table.buffers(), "buffer");
  staged.states = read_states(reader, load, engine.comms->control->rank());
  staged.manifest = &reader.manifest();
  staged.report.metadata = staged.manifest->metadata;
  staged.report.world_size = staged.manifest->world_size;
  staged.report.run = staged.manifest->run;
  staged.report.differences = std::move(differences.lines);
  staged.report.differences.insert(staged.report.differences.end(), differences.notes.begin(),
                                   differences.notes.end());
  staged.report.conversions = std::move(differences.conversions);
  return staged;
}

// What ranks tell each other once they have staged: '=' or '!' for each of the two.
std::string answer_of(const Staged& staged) {
  return {staged.same_run ? '=' : '!', staged.restores_options ? '=' : '!'};
}

void take_agreement(const std::vector<std::string>& answers, Staged& staged) {
  for (size_t r = 0; r < answers.size(); ++r) {
    staged.same_run = staged.same_run && answers[r][0] == '=';
    if (staged.restores_options && answers[r][1] != '=') {
      staged.restores_options = false;
      staged.report.differences.push_back(
          c10::str("options of all groups: stay as they are, since those on rank ", r, " do"));
    }
  }
}

// Collective. A reader of a checkpoint of which ranks see different files, with what this rank
// needs of the others; `received` is their bytes. Throws on all ranks where load() would without
// reading.
std::unique_ptr<CheckpointReader> receive_files(Engine& engine, const std::string& folder,
                                                const FoundFiles& found, const LoadOptions& load,
                                                const MeshTensors* mesh, const std::string& call,
                                                uint64_t& received) {
  const int rank = engine.comms->rank();
  auto parts = std::make_shared<std::map<std::string, FileParts>>();
  auto open = [parts, folder](const ManifestFile& file) -> std::unique_ptr<StoredBytes> {
    const std::string path = folder + "/" + file.name;
    const auto there = parts->find(file.name);
    if (there == parts->end()) return std::make_unique<FileReader>(path);
    return std::make_unique<MemoryReader>(path, file.bytes, there->second);
  };
  auto reader = std::make_unique<CheckpointReader>(folder, found.manifest, open);
  NeededTensors needed;
  run_on_all_ranks(*engine.comms->control, call, [&] {
    const CheckpointDifferences differences = compare(*reader, folder, load, engine, mesh);
    Staging(*reader, engine.table, engine.shards, differences, mesh).add_to(needed);
    add_states_to(needed, load, rank);
  });
  std::vector<int> sources;
  for (size_t f = 0; f < found.ranks.size(); ++f) sources.push_back(found.reader(f, rank));
  ReceivedFiles files =
      exchange_files(*engine.comms->control, engine.domains.mesh, call,
                     {found.manifest, std::move(sources),
                      [&](const ManifestTensor& t) { return needed.contains(t); }, open});
  parts->merge(files.parts);
  received = files.bytes;
  return reader;
}

}  // namespace

LoadReport Checkpoints::load(const std::string& folder, const LoadOptions& load,
                             ParamGroups& groups) {
  Engine& engine = *engine_;
  const std::string replaced = engine.table.refresh_lists(engine.module);
  const auto check = [&] {
    TORCH_CHECK(replaced.empty(), replaced);
    engine.check_no_gradients();
    engine.shards.groups().check(groups);
    engine.arena.verify_shapes();
    engine.table.verify_frozen_and_buffers();
  };
  engine.agree(Call::kLoadCheckpoint, check,
               // Not the folder: ranks may see one at different paths, or folders of their own.
               {std::string(load.strict() ? "strict" : "not strict") +
                    (load.restore_options() ? ", restore options" : "") + included_text(load),
                whole_arguments(engine, engine.options.protect() > 0)});
  const std::string what = "load_checkpoint(" + folder + ")";
  const auto mesh = merge_tensors(engine, what, groups);
  Communicator& control = *engine.comms->control;
  FoundFiles found = find_files(control, what, folder);
  const std::vector<size_t> to_verify = files_to_verify(found, control);
  std::unique_ptr<CheckpointReader> reader;
  uint64_t received = 0;
  if (!found.ranks.empty()) {
    reader = receive_files(engine, folder, found, load, mesh.get(), what, received);
  }
  Staged staged;
  StateChange states(groups);
  at::Tensor blocks;
  // 1. Each rank reads what it needs.
  const auto counts = run_on_all_ranks(control, what, [&] {
    if (!reader) reader = std::make_unique<CheckpointReader>(folder, std::move(found.manifest));
    for (const size_t f : to_verify) reader->verify_index(f);
    staged = stage(*reader, folder, load, engine, mesh.get());
    blocks = reader->blocks_read();
    return std::to_string(blocks.numel());
  });
  for (const std::string& count : counts) {
    TORCH_CHECK(count == counts[0], what, ": expected one manifest on all ranks, got several");
  }
  // 2. The ranks combine what they have read. Each then reads of its files what none has, so that
  // together they read every byte.
  control.all_reduce_or(blocks, "blocks of a checkpoint").wait();
  const auto answers = run_on_all_ranks(control, what, [&] {
    for (const size_t f : to_verify) reader->verify_file(f, blocks);
    staged.report.bytes_read = reader->bytes_read();
    staged.report.bytes_received = received;
    // On copies of the groups: a class of the user's may refuse the options that were read.
    ParamGroups tried = groups;
    if (staged.restores_options) restore_options(staged, tried);
    states.set(staged.states);
    return answer_of(staged);
  });
  take_agreement(answers, staged);

  states.keep();
  commit(staged, engine, groups);
  if (staged.same_run) run_.resume(*staged.manifest);
  for (const ManifestFile& file : staged.manifest->files) {
    if (file.name != whole_file_name(kFrozenFile, engine.comms->rank())) continue;
    frozen_.keep(absolute(folder), file, staged.manifest->id);
  }
  // Differences that a strict load allows and that a resumed run may not intend.
  if (load.strict() && control.rank() == 0 && !staged.report.differences.empty()) {
    TORCH_WARN(what, ":\n  ", c10::Join("\n  ", staged.report.differences));
  }
  return std::move(staged.report);
}

std::optional<std::string> Checkpoints::latest(const std::string& parent) {
  engine_->agree(Call::kLatestCheckpoint);
  return newest_whole(*engine_->comms->control, "latest_checkpoint(" + parent + ")", parent);
}

}  // namespace zero
