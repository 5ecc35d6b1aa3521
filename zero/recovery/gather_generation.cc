// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/recovery/gather_generation.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "zero/agreement/all_or_none.h"
#include "zero/checkpoint/safetensors.h"

namespace zero {
namespace {

constexpr int64_t kPart = int64_t{4} << 20;

using Parts = std::map<uint64_t, at::Tensor>;

at::Tensor host_bytes(uint64_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
}

// One file on its way from `server` to all ranks.
class FileTransfer {
 public:
  // `here` is the file where this rank is the server.
  FileTransfer(Communicator& control, const ManifestFile& about, int server, const MemoryFile* here)
      : control_(control), about_(about), server_(server), here_(here) {}

  Parts receive(const std::function<bool(const ManifestTensor&)>& needed) {
    constexpr uint64_t kLength = 8;
    const at::Tensor length_bytes = whole(0, kLength);
    uint64_t length = 0;
    std::memcpy(&length, length_bytes.const_data_ptr(), kLength);
    TORCH_CHECK(length <= about_.bytes - kLength, about_.name, ": expected a header within ",
                about_.bytes, " bytes, got one of ", length);
    const at::Tensor header = whole(kLength, kLength + length);
    Parts parts;
    parts.emplace(0, length_bytes);
    parts.emplace(kLength, header);
    const std::string json(static_cast<const char*>(header.const_data_ptr()), header.nbytes());
    std::unordered_map<std::string, bool> wanted;
    for (const ManifestTensor& t : about_.tensors) wanted[t.key] = needed(t);
    for (const StoredTensor& t :
         parse_safetensors_header(json, about_.bytes, about_.name).tensors) {
      if (wanted[t.name] && t.end > t.begin) parts.emplace(t.begin, host_bytes(t.end - t.begin));
    }
    at::Tensor buffer = host_bytes(std::min<uint64_t>(kPart, about_.bytes));
    for (uint64_t at = kLength + length; at < about_.bytes; at += buffer.nbytes()) {
      const uint64_t end = std::min<uint64_t>(at + kPart, about_.bytes);
      const at::Tensor part = buffer.narrow(0, 0, static_cast<int64_t>(end - at));
      send(at, part);
      keep(at, part, parts);
    }
    return parts;
  }

 private:
  at::Tensor whole(uint64_t begin, uint64_t end) {
    at::Tensor bytes = host_bytes(end - begin);
    send(begin, bytes);
    return bytes;
  }

  void send(uint64_t at, const at::Tensor& bytes) {
    if (here_ != nullptr) {
      std::memcpy(bytes.mutable_data_ptr(), here_->bytes.const_data_ptr<uint8_t>() + at,
                  bytes.nbytes());
    }
    control_.broadcast(bytes, server_, about_.name).wait();
  }

  // Copies what of [at, at + bytes) belongs to one of the parts.
  static void keep(uint64_t at, const at::Tensor& bytes, Parts& parts) {
    const uint64_t end = at + bytes.nbytes();
    auto part = parts.upper_bound(at);
    if (part != parts.begin()) --part;
    for (; part != parts.end() && part->first < end; ++part) {
      const uint64_t from = std::max(at, part->first);
      const uint64_t to = std::min(end, part->first + part->second.nbytes());
      if (from >= to) continue;
      std::memcpy(part->second.mutable_data_ptr<uint8_t>() + (from - part->first),
                  bytes.const_data_ptr<uint8_t>() + (from - at), to - from);
    }
  }

  Communicator& control_;
  const ManifestFile& about_;
  const int server_;
  const MemoryFile* const here_;
};

}  // namespace

std::unique_ptr<CheckpointReader> gather_generation(
    Communicator& control, const Generations& generations, const Restorable& which,
    const std::function<bool(const ManifestTensor&)>& needed) {
  std::shared_ptr<const Generation> own;
  for (const auto& g : generations.all()) {
    if (g->recovery == which.recovery && g->number == which.number) own = g;
  }
  // A rank whose own copy of this generation is not whole has no manifest either.
  const auto count = which.servers.size();
  const auto texts = run_on_all_ranks(control, "recover()", [&]() -> std::string {
    std::vector<ManifestFile> served;
    for (size_t f = 0; f < count; ++f) {
      if (which.servers[f] == control.rank()) {
        served.push_back(own->files.at(static_cast<int>(f)).about);
      }
    }
    return served.empty() ? std::string() : files_text(served);
  });
  const auto manifests = run_on_all_ranks(control, "recover()", [&]() -> std::string {
    return which.servers[0] == control.rank() ? manifest_text(own->manifest) : std::string();
  });
  const std::string name = "the last protected step";
  Manifest manifest = parse_manifest(manifests[which.servers[0]], name);
  std::vector<std::vector<ManifestFile>> served;
  for (const std::string& text : texts) {
    served.push_back(text.empty() ? std::vector<ManifestFile>() : parse_files(text, name));
  }
  std::vector<size_t> next(served.size(), 0);
  for (const int server : which.servers) {
    manifest.files.push_back(served.at(server).at(next[server]++));
  }

  auto parts = std::make_shared<std::map<std::string, Parts>>();
  for (size_t f = 0; f < count; ++f) {
    const bool here = which.servers[f] == control.rank();
    FileTransfer transfer(control, manifest.files[f], which.servers[f],
                          here ? &own->files.at(static_cast<int>(f)) : nullptr);
    (*parts)[manifest.files[f].name] = transfer.receive(needed);
  }
  return std::make_unique<CheckpointReader>(
      name, std::move(manifest), [name, parts](const ManifestFile& file) {
        return std::make_unique<MemoryReader>(name + ", " + file.name, file.bytes,
                                              std::move(parts->at(file.name)));
      });
}

}  // namespace zero
