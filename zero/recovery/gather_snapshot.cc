// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/recovery/gather_snapshot.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "zero/agreement/all_or_none.h"
#include "zero/checkpoint/file_exchange.h"

namespace zero {

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
  for (auto& [f, parts] : received.parts) {
    files->emplace(manifest.files[f].name, std::move(parts));
  }
  return std::make_unique<CheckpointReader>(kName, manifest, open);
}

}  // namespace zero
