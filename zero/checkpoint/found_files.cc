// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/found_files.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "zero/agreement/all_or_none.h"
#include "zero/checkpoint/file_exchange.h"
#include "zero/checkpoint/folder.h"
#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/hashed_file.h"

namespace zero {
namespace {

// Which files of a manifest are in a folder: a digit for each, 1 for one that is there. One listing
// of the folder, since a look at each file costs every rank as many as there are ranks.
std::string files_seen(const Manifest& manifest, const std::string& folder) {
  const std::vector<std::string> list = names_in(folder);
  const std::set<std::string> names(list.begin(), list.end());
  std::string digits;
  for (const ManifestFile& file : manifest.files) digits += names.count(file.name) > 0 ? '1' : '0';
  return digits;
}

// For each file the ranks that see it. `digits` are by rank; none for a rank that sees nothing.
std::vector<std::vector<int>> ranks_that_see(const std::vector<std::string>& digits, size_t files) {
  std::vector<std::vector<int>> result(files);
  for (size_t f = 0; f < files; ++f) {
    for (size_t r = 0; r < digits.size(); ++r) {
      if (f < digits[r].size() && digits[r][f] == '1') result[f].push_back(static_cast<int>(r));
    }
  }
  return result;
}

// The number of files that no rank sees.
int64_t unseen(const std::vector<std::vector<int>>& ranks) {
  return std::count_if(ranks.begin(), ranks.end(), [](const auto& list) { return list.empty(); });
}

// The text of the manifest that this rank sees by itself; empty if it sees none.
std::string look(const std::string& folder) {
  const bool there = access((folder + "/" + kManifestName).c_str(), F_OK) == 0;
  if (!there && (errno == ENOENT || errno == ENOTDIR)) return {};
  return read_manifest_text(folder);
}

// Throws on all ranks alike unless those with a manifest have that of one checkpoint.
void check_one_checkpoint(const std::vector<std::string>& ids, const std::string& what) {
  std::map<std::string, std::vector<size_t>> ranks;  // by id
  for (size_t r = 0; r < ids.size(); ++r) {
    if (!ids[r].empty()) ranks[ids[r]].push_back(r);
  }
  std::vector<std::string> texts;  // "id 12ab on ranks 0, 1"
  for (const auto& [id, list] : ranks) {
    texts.push_back(
        c10::str("id ", id, list.size() == 1 ? " on rank " : " on ranks ", c10::Join(", ", list)));
  }
  TORCH_CHECK(ranks.size() == 1, what, ": expected the same checkpoint on all ranks, got ",
              c10::Join(" and ", texts),
              "; give each rank the folder of the same save, as latest_checkpoint() finds it, and "
              "remove what is left of others");
}

// The manifest of the first rank that has one, for those that have none. The text is sent as it was
// written, of whatever version.
Manifest share_manifest(Communicator& control, const std::string& what,
                        const std::vector<std::string>& ids, const std::string& text,
                        std::optional<Manifest> own) {
  const auto first =
      std::find_if(ids.begin(), ids.end(), [](const auto& id) { return !id.empty(); });
  const int source = static_cast<int>(first - ids.begin());
  if (std::none_of(ids.begin(), ids.end(), [](const auto& id) { return id.empty(); })) {
    return std::move(*own);
  }
  const std::string sent = broadcast_text(control, text, source, "manifest");
  run_on_all_ranks(control, what, [&] {
    if (!own) own = parse_manifest(sent, "the manifest of rank " + std::to_string(source));
  });
  return std::move(*own);
}

}  // namespace

int FoundFiles::reader(size_t file, int rank) const {
  const std::vector<int>& there = ranks[file];
  if (std::binary_search(there.begin(), there.end(), rank)) return rank;
  return there[(file + static_cast<size_t>(rank)) % there.size()];
}

int FoundFiles::verifier(size_t file, int world_size) const {
  if (ranks.empty()) return static_cast<int>(file % static_cast<size_t>(world_size));
  return ranks[file][file % ranks[file].size()];
}

FoundFiles find_files(Communicator& control, const std::string& what, const std::string& folder) {
  // 1. Each rank looks into its folder, and tells the others the identifier of its manifest and a
  // hash of which files it sees. If all say the same, as in a folder that all share, each reads for
  // itself.
  std::string text;
  std::optional<Manifest> own;
  const std::vector<std::string> views = run_on_all_ranks(control, what, [&]() -> std::string {
    check_path(folder);
    text = look(folder);
    if (text.empty()) return {};
    own = parse_manifest(text, folder + "/" + kManifestName);
    const std::string seen = files_seen(*own, folder);
    return own->id + " " + hash_text(content_hash(seen.data(), seen.size()));
  });
  const auto same = [&](const std::string& view) { return view == views[0]; };
  if (std::all_of(views.begin(), views.end(), same)) {
    if (!own) {  // on no rank: all throw
      run_on_all_ranks(control, what, [&] { own = read_manifest(folder); });
    }
    return {std::move(*own), {}};
  }

  // 2. The manifests that there are must be of one checkpoint.
  const std::string here = "rank " + std::to_string(control.rank()) + ": " + what;
  std::vector<std::string> ids;
  for (const std::string& view : views) ids.push_back(view.substr(0, view.rfind(' ')));
  check_one_checkpoint(ids, here);
  // 3. Ranks without a manifest get one.
  FoundFiles found{share_manifest(control, what, ids, text, std::move(own)), {}};
  // 4. Now that all have it, each says which of its files it sees.
  const auto seen =
      run_on_all_ranks(control, what, [&] { return files_seen(found.manifest, folder); });
  // 5. Each file must be seen by some rank. All ranks have the same list and throw alike.
  found.ranks = ranks_that_see(seen, found.manifest.files.size());
  for (size_t f = 0; f < found.ranks.size(); ++f) {
    const ManifestFile& file = found.manifest.files[f];
    TORCH_CHECK(!found.ranks[f].empty(), here, ": expected file ", file.name, ", which rank ",
                writer_of(file), " wrote to disk ", file.disk,
                ", in the folder of some rank, got it in none; ", unseen(found.ranks),
                " files are missing: start a rank on the machine with that disk, or copy its "
                "files into the folder of another rank");
  }
  return found;
}

namespace {

// Behind the numbers of an order, each of which has this many digits.
constexpr size_t kDigits = 19;

// The order of zero::latest(), but by name, since ranks have folders of their own: texts compare as
// saved, steps, name and id do. Not JSON, since names of folders need not be UTF-8; none has a NUL.
std::string order_of(const ListedCheckpoint& c) {
  std::string text;
  for (const int64_t number : {c.saved, c.steps}) {
    const std::string digits = std::to_string(number);
    text.append(kDigits - digits.size(), '0').append(digits);
  }
  return text + std::filesystem::path(c.path).filename().string() + '\0' + c.id;
}

std::string name_in(const std::string& order) {
  return order.substr(2 * kDigits, order.find('\0') - 2 * kDigits);
}

}  // namespace

std::optional<std::string> newest_whole(Communicator& control, const std::string& what,
                                        const std::string& parent) {
  std::vector<ListedCheckpoint> own;  // that may still be the one, the newest last
  bool listed = false;
  while (true) {
    // 1. Each rank names the newest that it has left; the first time it lists its folder.
    const auto texts = run_on_all_ranks(control, what, [&] {
      if (!std::exchange(listed, true)) own = list_checkpoints(parent, /*to_load=*/true);
      return own.empty() ? std::string() : order_of(own.back());
    });
    // 2. The newest of these is the candidate.
    const std::string newest = *std::max_element(texts.begin(), texts.end());
    if (newest.empty()) return std::nullopt;
    // 3. The ranks that have it say which of its files they see.
    const bool here = !own.empty() && order_of(own.back()) == newest;
    const std::string path = here ? own.back().path : parent + "/" + name_in(newest);
    FoundFiles found;
    const auto views = run_on_all_ranks(control, what, [&]() -> std::string {
      if (!here) return {};
      found.manifest = read_manifest_without_tensors(path);
      return files_seen(found.manifest, path);
    });
    // 4. It is the one if together they see all files. Else it is left out, and the next one is
    // tried.
    size_t files = 0;
    for (const std::string& view : views) files = std::max(files, view.size());
    found.ranks = ranks_that_see(views, files);
    const bool complete = unseen(found.ranks) == 0;
    const auto torn = run_on_all_ranks(control, what, [&] {
      std::string names;  // of files that one of the ranks that see them finds cut short
      for (size_t f = 0; complete && f < files; ++f) {
        if (found.verifier(f, control.world_size()) != control.rank()) continue;
        names += has_size(path, found.manifest.files[f]) ? "" : " " + found.manifest.files[f].name;
      }
      return names;
    });
    const auto is_empty = [](const std::string& names) { return names.empty(); };
    if (complete && std::all_of(torn.begin(), torn.end(), is_empty)) return path;
    if (here) own.pop_back();
  }
}

}  // namespace zero
