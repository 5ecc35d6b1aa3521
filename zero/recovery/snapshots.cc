// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/recovery/snapshots.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "zero/agreement/all_or_none.h"
#include "zero/base/plain_text.h"
#include "zero/checkpoint/file_exchange.h"

namespace zero {

void Snapshots::add(Snapshot snapshot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  list_.push_back(std::make_shared<const Snapshot>(std::move(snapshot)));
}

void Snapshots::keep_newest() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (list_.size() < 2) return;
  spare_.clear();
  for (size_t i = 0; i + 1 < list_.size(); ++i) {
    // Anybody else who has it is a reader that ends soon.
    if (list_[i].use_count() > 1) continue;
    for (const auto& [rank, file] : list_[i]->files)
      spare_.push_back({{}, file.bytes, file.device});
  }
  list_.erase(list_.begin(), list_.end() - 1);
}

std::vector<std::shared_ptr<const Snapshot>> Snapshots::all() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return list_;
}

at::Tensor Snapshots::allocate(int64_t bytes, c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto fits = [&](const MemoryFile& spare) {
    return spare.bytes.numel() == bytes && spare.device == device;
  };
  if (const auto found = std::find_if(spare_.begin(), spare_.end(), fits); found != spare_.end()) {
    at::Tensor result = std::move(found->bytes);
    spare_.erase(found);
    return result;
  }
  return fresh_memory(bytes, device);
}

int64_t Snapshots::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t sum = 0;
  for (const auto& snapshot : list_) {
    for (const auto& [rank, file] : snapshot->files) sum += file.bytes.numel();
  }
  for (const MemoryFile& spare : spare_) sum += spare.bytes.numel();
  return sum;
}

std::string snapshots_text(const Snapshots& snapshots) {
  std::string text;
  for (const auto& s : snapshots.all()) {
    for (const auto& [rank, file] : s->files) {
      text += plain_text(s->recovery, " ", s->number, " ", s->world_size, " ", rank, "\n");
    }
  }
  return text;
}

CompleteSnapshot newest_complete(const std::vector<std::string>& texts) {
  // For each snapshot and file: the first rank that has it, or -1.
  std::map<std::pair<int64_t, int64_t>, std::vector<int>> servers;
  for (size_t r = 0; r < texts.size(); ++r) {
    std::istringstream text(texts[r]);
    int64_t recovery = 0, number = 0;
    int world_size = 0, file = 0;
    while (text >> recovery >> number >> world_size >> file) {
      std::vector<int>& list = servers[{recovery, number}];
      list.resize(static_cast<size_t>(world_size), -1);
      if (list.at(file) < 0) list[file] = static_cast<int>(r);
    }
  }
  TORCH_CHECK(!servers.empty(),
              "no step was protected before the failure; one rank alone protects none");
  for (auto s = servers.rbegin(); s != servers.rend(); ++s) {
    if (std::count(s->second.begin(), s->second.end(), -1) > 0) continue;
    return {s->first.first, s->first.second, std::move(s->second)};
  }
  const std::vector<int>& newest = servers.rbegin()->second;
  std::string lost;
  for (size_t f = 0; f < newest.size(); ++f) {
    if (newest[f] < 0) lost += (lost.empty() ? "" : ", ") + std::to_string(f);
  }
  const int64_t recovery = servers.rbegin()->first.first;
  TORCH_CHECK(false, "the shard of rank ", lost, " of the last protected step",
              recovery > 0 ? c10::str(" (ranks as numbered by recovery ", recovery, ")") : "",
              " is lost: that rank and the one that kept its copy have ended or did not answer");
}

namespace {

constexpr char kName[] = "the last protected step";

// Collective. The manifest of the snapshot; `own` is this rank's copy of it, or null.
Manifest gather_manifest(Communicator& control, const Snapshot* own,
                         const CompleteSnapshot& which) {
  // A rank whose own snapshot is not complete has no manifest either.
  const int source = which.servers[0];
  std::string text;
  const auto texts = run_on_all_ranks(control, "recover()", [&] {
    std::vector<FileContent> served;
    for (size_t f = 0; f < which.servers.size(); ++f) {
      if (which.servers[f] != control.rank()) continue;
      served.push_back(own->files.at(static_cast<int>(f)).content);
    }
    if (source == control.rank()) text = manifest_text(own->manifest);
    return files_text(served);
  });
  Manifest manifest = parse_manifest(
      broadcast_text(control, text, source, "the manifest of a protected step"), kName);
  std::vector<std::vector<FileContent>> served;
  for (const std::string& files : texts) served.push_back(parse_files(files, kName));
  std::vector<size_t> next(served.size(), 0);
  std::vector<FileContent> files;
  for (const int server : which.servers) files.push_back(served.at(server).at(next[server]++));
  add_files(files, manifest);
  return manifest;
}

}  // namespace

std::unique_ptr<CheckpointReader> gather_snapshot(
    Communicator& control, const Group& group, const Snapshots& snapshots,
    const CompleteSnapshot& which, const std::function<bool(const ManifestTensor&)>& needed) {
  std::shared_ptr<const Snapshot> own;
  for (const auto& snapshot : snapshots.all()) {
    if (snapshot->recovery == which.recovery && snapshot->number == which.number) own = snapshot;
  }
  const Manifest manifest = gather_manifest(control, own.get(), which);

  // This rank reads itself what it holds.
  std::vector<int> sources = which.servers;
  auto files = std::make_shared<std::map<std::string, FileParts>>();
  for (size_t f = 0; own && f < sources.size(); ++f) {
    const auto file = own->files.find(static_cast<int>(f));
    if (file == own->files.end()) continue;
    sources[f] = control.rank();
    (*files)[manifest.files[f].name] = {{0, file->second.bytes}};
  }
  // With `own`, whose memory else becomes that of the next protected step.
  const auto open = [own, files](const ManifestFile& file) {
    return std::make_unique<MemoryReader>(c10::str(kName, ", ", file.name), file.bytes,
                                          (*files)[file.name]);
  };
  ReceivedFiles received =
      exchange_files(control, group, "recover()", {manifest, std::move(sources), needed, open});
  files->merge(received.parts);
  return std::make_unique<CheckpointReader>(kName, manifest, open);
}

}  // namespace zero
