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
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

#include "zero/agreement/all_or_none.h"
#include "zero/base/error_text.h"
#include "zero/checkpoint/format/stored_file.h"

namespace zero {
namespace {

constexpr uint64_t kPart = uint64_t{4} << 20;
// The ranks of a connection.
constexpr int kServer = 0;
constexpr int kClient = 1;

at::Tensor host_bytes(uint64_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte));
}

// Bytes [begin, end) of a file. A list of them is sent as one stream.
struct Run {
  size_t file = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
};

uint64_t total(const std::vector<Run>& runs) {
  uint64_t bytes = 0;
  for (const Run& run : runs) bytes += run.end - run.begin;
  return bytes;
}

std::string text_of(const std::vector<Run>& runs) {
  std::ostringstream text;
  for (const Run& run : runs) text << run.file << " " << run.begin << " " << run.end << "\n";
  return text.str();
}

std::vector<Run> parse_runs(const std::string& text) {
  std::vector<Run> runs;
  std::istringstream in(text);
  Run run;
  while (in >> run.file >> run.begin >> run.end) runs.push_back(run);
  return runs;
}

// Goes through a list of runs in the order of the stream.
class RunCursor {
 public:
  explicit RunCursor(const std::vector<Run>& runs) : runs_(runs) {}

  // Calls use(run, offset, at, bytes) for the next `count` bytes of the stream: bytes of a run from
  // `offset` of its file on, which are at `at` of them.
  template <typename Use>
  void advance(uint64_t count, const Use& use) {
    for (uint64_t at = 0; at < count;) {
      const Run& run = runs_[run_];
      const uint64_t offset = run.begin + done_;
      const uint64_t bytes = std::min(count - at, run.end - offset);
      use(run, offset, at, bytes);
      at += bytes;
      done_ += bytes;
      if (run.begin + done_ < run.end) continue;
      ++run_;
      done_ = 0;
    }
  }

 private:
  const std::vector<Run>& runs_;
  size_t run_ = 0;
  uint64_t done_ = 0;  // of runs_[run_]
};

// The keys of the tensors that a client wants, by file.
using Wanted = std::map<size_t, std::vector<std::string>>;

std::string text_of(const Wanted& wanted) {
  std::ostringstream text;
  for (const auto& [file, tensors] : wanted) {
    text << file << " " << tensors.size() << " ";
    for (const std::string& key : tensors) text << key.size() << " " << key;
  }
  return text.str();
}

Wanted parse_wanted(const std::string& text) {
  Wanted wanted;
  std::istringstream in(text);
  size_t file = 0, count = 0;
  while (in >> file >> count) {
    std::vector<std::string>& tensors = wanted[file];
    for (size_t size = 0; count > 0 && in >> size; --count) {
      TORCH_CHECK(size < text.size(), "expected the keys of tensors, got another text");
      tensors.emplace_back(size, '\0');
      in.ignore(1).read(tensors.back().data(), static_cast<std::streamsize>(size));
    }
  }
  return wanted;
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

class Server {
 public:
  Server(Communicator& pair, const FileWishes& wishes) : pair_(pair), wishes_(wishes) {}

  // An error of a file is sent to the client, which reports it to all ranks.
  void serve() {
    const Wanted wanted = parse_wanted(broadcast_text(pair_, {}, kClient, "wanted tensors"));
    std::vector<Run> runs;
    std::string problem;
    try {
      runs = find_runs(wanted);
    } catch (const std::exception& error) {
      problem = error_text(error);
    }
    broadcast_text(pair_, problem, kServer, "problem of a file");
    if (!problem.empty()) return;
    broadcast_text(pair_, text_of(runs), kServer, "places of tensors");
    stream(runs);
  }

 private:
  std::vector<Run> find_runs(const Wanted& wanted) {
    std::vector<Run> runs;
    for (const auto& [f, keys] : wanted) {
      const ManifestFile& about = wishes_.manifest.files.at(f);
      auto file = std::make_unique<StoredFile>(wishes_.open(about), about, wishes_.manifest.id);
      for (const FileBytes& part : file->index()) {
        if (part.begin < part.end) runs.push_back({f, part.begin, part.end});
      }
      for (const std::string& key : keys) {
        const StoredTensor& tensor = file->tensor(key);
        if (tensor.begin < tensor.end) runs.push_back({f, tensor.begin, tensor.end});
      }
      file->release();  // a client may want more files than can be open
      files_[f] = std::move(file);
    }
    return runs;
  }

  // A file that fails in the middle is reported at the end, so that both ranks stay in step.
  void stream(const std::vector<Run>& runs) {
    const uint64_t bytes = total(runs);
    const at::Tensor buffer = host_bytes(std::min(kPart, bytes));
    RunCursor cursor(runs);
    std::string problem;
    size_t last = runs.empty() ? 0 : runs.front().file;  // that was read
    for (uint64_t at = 0; at < bytes; at += kPart) {
      const at::Tensor part = buffer.narrow(0, 0, std::min(kPart, bytes - at));
      auto* const data = part.mutable_data_ptr<uint8_t>();
      cursor.advance(part.nbytes(), [&](const Run& run, uint64_t offset, uint64_t to, uint64_t n) {
        if (!problem.empty()) return;
        try {
          if (run.file != last) files_.at(std::exchange(last, run.file))->release();
          files_.at(run.file)->bytes().read(offset, data + to, n);
        } catch (const std::exception& error) {
          problem = error_text(error);
        }
      });
      pair_.broadcast(part, kServer, "tensors of a checkpoint").wait();
    }
    broadcast_text(pair_, problem, kServer, "problem of a file");
  }

  Communicator& pair_;
  const FileWishes& wishes_;
  std::map<size_t, std::unique_ptr<StoredFile>> files_;
};

// Returns the problem of the server, if it has one. Adds to `received`.
std::string receive(Communicator& pair, const Manifest& manifest, const Wanted& wanted,
                    ReceivedFiles& received) {
  broadcast_text(pair, text_of(wanted), kClient, "wanted tensors");
  const std::string problem = broadcast_text(pair, {}, kServer, "problem of a file");
  if (!problem.empty()) return problem;
  const std::vector<Run> runs = parse_runs(broadcast_text(pair, {}, kServer, "places of tensors"));
  std::vector<uint8_t*> targets;
  for (const Run& run : runs) {
    TORCH_CHECK(wanted.count(run.file) > 0 && run.begin < run.end &&
                    run.end <= manifest.files[run.file].bytes,
                "expected bytes of a file that was asked for, got ", run.begin, " to ", run.end,
                " of file ", run.file);
    const at::Tensor bytes = host_bytes(run.end - run.begin);
    const bool added = received.parts[run.file].emplace(run.begin, bytes).second;
    TORCH_CHECK(added, "expected each part of a file once, got that from ", run.begin, " of file ",
                run.file, " twice");
    targets.push_back(bytes.mutable_data_ptr<uint8_t>());
  }
  const uint64_t bytes = total(runs);
  received.bytes += bytes;
  const at::Tensor buffer = host_bytes(std::min(kPart, bytes));
  RunCursor cursor(runs);
  for (uint64_t at = 0; at < bytes; at += kPart) {
    const at::Tensor part = buffer.narrow(0, 0, std::min(kPart, bytes - at));
    pair.broadcast(part, kServer, "tensors of a checkpoint").wait();
    const auto* const data = part.const_data_ptr<uint8_t>();
    cursor.advance(part.nbytes(), [&](const Run& run, uint64_t offset, uint64_t from, uint64_t n) {
      std::memcpy(targets[&run - runs.data()] + (offset - run.begin), data + from, n);
    });
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
  std::sort(pairs.begin(), pairs.end(),
            [&](const FilePair& a, const FilePair& b) { return key(a) < key(b); });
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
      const auto pair = group.subgroup({server, client}, c10::str("files of ", server))
                            .make_communicator("files", Purpose::kControl, /*two_level=*/false);
      if (server == rank) {
        Server(*pair, wishes).serve();
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
  run_on_all_ranks(control, what, [&]() -> std::string {
    TORCH_CHECK(problem.empty(), problem);
    return {};
  });
  return received;
}

}  // namespace zero
