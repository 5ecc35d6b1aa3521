// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/file_exchange.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <tuple>

#include "zero/agreement/all_or_none.h"
#include "zero/base/error_text.h"
#include "zero/base/json_text.h"
#include "zero/checkpoint/format/stored_file.h"

namespace zero {
namespace {

using nlohmann::json;

constexpr uint64_t kPart = uint64_t{4} << 20;
// The ranks of a connection.
constexpr int kServer = 0;
constexpr int kClient = 1;

// By file: the keys of the tensors that a client wants, and the bytes [begin, end) that it gets.
using Wanted = std::map<size_t, std::vector<std::string>>;
using Range = std::pair<uint64_t, uint64_t>;
using Ranges = std::map<size_t, std::vector<Range>>;

// Sorted, and joined where they touch: of consecutive tensors one is left.
std::vector<Range> joined(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end());
  std::vector<Range> result;
  for (const auto& [begin, end] : ranges) {
    if (begin == end) continue;
    const bool touches = !result.empty() && result.back().second == begin;
    if (!touches) result.emplace_back(begin, end);
    result.back().second = end;
  }
  return result;
}

// By server.
std::map<int, Wanted> list_wanted(const FileWishes& wishes, int rank) {
  std::map<int, Wanted> result;
  for (const ManifestTensors& entry : wishes.manifest.tensors) {
    for (const ManifestPiece& piece : entry.pieces) {
      const int source = wishes.sources[piece.file];
      if (source == rank) continue;
      for (const std::string& kind : entry.kinds) {
        const ManifestTensor tensor{entry.owner, kind, piece.begin, piece.numel};
        if (wishes.needed(tensor)) result[source][piece.file].push_back(tensor_key(tensor));
      }
    }
  }
  return result;
}

// An error of a file is sent to the client, which reports it to all ranks.
void serve(Communicator& pair, const FileWishes& wishes) {
  const auto wanted = parse_json(broadcast_text(pair, {}, kClient, "wanted tensors")).get<Wanted>();
  std::map<size_t, std::unique_ptr<StoredFile>> files;
  Ranges ranges;
  std::string problem;
  try {
    for (const auto& [f, keys] : wanted) {
      const ManifestFile& about = wishes.manifest.files.at(f);
      StoredFile& file = *files
                              .emplace(f, std::make_unique<StoredFile>(wishes.open(about), about,
                                                                       wishes.manifest.id))
                              .first->second;
      std::vector<Range> parts;
      for (const FileBytes& part : file.index()) parts.emplace_back(part.begin, part.end);
      for (const std::string& key : keys) {
        parts.emplace_back(file.tensor(key).begin, file.tensor(key).end);
      }
      ranges[f] = joined(std::move(parts));
      file.bytes().release();  // a client may want more files than can be open
    }
  } catch (const std::exception& error) {
    problem = error_text(error);
  }
  broadcast_text(pair, problem, kServer, "problem of a file");
  if (!problem.empty()) return;
  broadcast_text(pair, json_text(json(ranges)), kServer, "places of tensors");
  // A file that fails in the middle is reported at the end, so that both ranks stay in step.
  const at::Tensor buffer = host_bytes(kPart);
  for (const auto& [f, list] : ranges) {
    StoredFile& file = *files.at(f);
    for (const auto& [begin, end] : list) {
      for (uint64_t at = begin; at < end; at += kPart) {
        const at::Tensor part = buffer.narrow(0, 0, std::min(kPart, end - at));
        try {
          if (problem.empty()) file.bytes().read(at, part.mutable_data_ptr(), part.nbytes());
        } catch (const std::exception& error) {
          problem = error_text(error);
        }
        pair.broadcast(part, kServer, "tensors of a checkpoint").wait();
      }
    }
    file.bytes().release();
  }
  broadcast_text(pair, problem, kServer, "problem of a file");
}

// Returns the problem of the server, if it has one. Adds to `received`.
std::string receive(Communicator& pair, const Manifest& manifest, const Wanted& wanted,
                    ReceivedFiles& received) {
  broadcast_text(pair, json_text(json(wanted)), kClient, "wanted tensors");
  const std::string problem = broadcast_text(pair, {}, kServer, "problem of a file");
  if (!problem.empty()) return problem;
  const auto ranges =
      parse_json(broadcast_text(pair, {}, kServer, "places of tensors")).get<Ranges>();
  for (const auto& [f, list] : ranges) {
    for (const auto& [begin, end] : list) {
      TORCH_CHECK(wanted.count(f) > 0 && begin < end && end <= manifest.files[f].bytes,
                  "expected bytes of a file that was asked for, got ", begin, " to ", end,
                  " of file ", f);
      const at::Tensor bytes = host_bytes(end - begin);
      const bool added = received.parts[manifest.files[f].name].emplace(begin, bytes).second;
      TORCH_CHECK(added, "expected each part of a file once, got that from ", begin, " of file ", f,
                  " twice");
      received.bytes += bytes.nbytes();
      for (uint64_t at = 0; at < bytes.nbytes(); at += kPart) {
        const auto count = static_cast<int64_t>(std::min(kPart, bytes.nbytes() - at));
        pair.broadcast(bytes.narrow(0, static_cast<int64_t>(at), count), kServer,
                       "tensors of a checkpoint")
            .wait();
      }
    }
  }
  return broadcast_text(pair, {}, kServer, "problem of a file");
}

// All pairs of this rank, from what each rank says of the servers it asks.
std::vector<FilePair> own_pairs(const std::vector<std::string>& servers, int rank) {
  std::vector<FilePair> pairs;
  for (int client = 0; client < static_cast<int>(servers.size()); ++client) {
    std::istringstream text(servers[client]);
    int server = 0;
    while (text >> server) {
      if (server == rank || client == rank) pairs.emplace_back(server, client);
    }
  }
  sort_pairs(pairs, static_cast<int>(servers.size()));
  return pairs;
}

}  // namespace

void MemoryReader::read(uint64_t offset, void* data, size_t bytes) {
  if (bytes == 0) return;
  const auto after = parts_.upper_bound(offset);
  TORCH_CHECK(after != parts_.begin(), path_, ": expected bytes at ", offset,
              ", got none; they are on another rank");
  const auto& [begin, part] = *std::prev(after);
  TORCH_CHECK(offset + bytes <= begin + part.nbytes(), path_, ": expected ", bytes, " bytes at ",
              offset, ", got ", begin + part.nbytes(),
              " as their end; the rest is on another rank");
  std::memcpy(data, part.const_data_ptr<uint8_t>() + (offset - begin), bytes);
  bytes_read_ += bytes;
}

at::Tensor host_bytes(uint64_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
}

std::string broadcast_text(Communicator& ranks, const std::string& text, int source,
                           const std::string& label) {
  const bool here = ranks.rank() == source;
  const at::Tensor size = at::empty({1}, at::TensorOptions().dtype(at::kLong));
  *size.mutable_data_ptr<int64_t>() = here ? static_cast<int64_t>(text.size()) : 0;
  ranks.broadcast(size, source, label).wait();
  const int64_t bytes = *size.const_data_ptr<int64_t>();
  if (bytes == 0) return {};
  const at::Tensor content = host_bytes(static_cast<uint64_t>(bytes));
  if (here) std::memcpy(content.mutable_data_ptr(), text.data(), text.size());
  ranks.broadcast(content, source, label).wait();
  return {static_cast<const char*>(content.const_data_ptr()), content.nbytes()};
}

void sort_pairs(std::vector<FilePair>& pairs, int world_size) {
  const auto key = [&](const FilePair& pair) {
    const auto& [server, client] = pair;
    const int up = (client - server + world_size) % world_size;
    const int step = std::min(up, world_size - up);
    const bool down = up != step;
    // A rank is the lower end in one half of the pairs of a step, and the upper one in the other.
    const int lower = down ? client : server;
    return std::tuple(step, down, lower / std::max(step, 1) % 2, lower);
  };
  std::ranges::sort(pairs, {}, key);
}

ReceivedFiles exchange_files(Communicator& control, const Group& group, const std::string& what,
                             const FileWishes& wishes) {
  const int rank = control.rank();
  std::map<int, Wanted> wanted;
  const auto servers = run_on_all_ranks(control, what, [&] {
    wanted = list_wanted(wishes, rank);
    std::string text;
    for (const auto& [server, files] : wanted) text += std::to_string(server) + " ";
    return text;
  });
  ReceivedFiles received;
  std::string problem;
  try {
    for (const auto& [server, client] : own_pairs(servers, rank)) {
      const auto pair = group.subgroup({server, client}, "files of " + std::to_string(server))
                            .make_communicator("files", Purpose::kControl, /*two_level=*/false);
      if (server == rank) {
        serve(*pair, wishes);
        continue;
      }
      const std::string of_server = receive(*pair, wishes.manifest, wanted.at(server), received);
      if (problem.empty() && !of_server.empty()) {
        problem = "rank " + std::to_string(server) + " reads for this one: " + of_server;
      }
    }
  } catch (const std::exception& error) {
    // The others may wait for this rank, which no longer goes through its pairs.
    control.abort(error_text(error));
    throw;
  }
  run_on_all_ranks(control, what, [&] { TORCH_CHECK(problem.empty(), problem); });
  return received;
}

}  // namespace zero
