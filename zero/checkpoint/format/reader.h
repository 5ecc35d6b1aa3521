// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reads parts of a checkpoint, in a folder or in memory, whatever number of ranks wrote it. Nothing
// is returned whose checksum was not verified; what is damaged, missing or of another checkpoint is
// a c10::Error that names the file. Nothing is allocated that is larger than the files that are
// there. Knows nothing of optimizers.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bookkeeping/reshard.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/stored_file.h"

namespace zero {

// Elements [begin, begin + numel) of a parameter in its memory order.
struct WantedRange {
  std::string owner;
  int64_t begin = 0;
  int64_t numel = 0;
};

class CheckpointReader {
 public:
  // Reads the manifest alone.
  explicit CheckpointReader(const std::string& folder);
  // The same, of a manifest that was read from there.
  CheckpointReader(const std::string& folder, Manifest manifest);
  // Of a checkpoint that is in no folder: `open` gives the bytes of a file of `manifest`, each
  // once. `name` is for errors.
  using Open = std::function<std::unique_ptr<StoredBytes>(const ManifestFile& file)>;
  CheckpointReader(std::string name, Manifest manifest, Open open);
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const Manifest& manifest() const { return manifest_; }

  // The kinds of tensors stored for a parameter: "master", "exp_avg", "step".
  std::set<std::string> kinds(const std::string& owner) const;

  // The states of the objects that the save included.
  std::vector<std::string> state_names() const;

  // How many elements of `kind` are stored for an owner, which are in the files, too; `dtype` as in
  // read_all().
  int64_t count_stored(const std::string& owner, const std::string& kind,
                       std::optional<c10::ScalarType> dtype = std::nullopt);

  // Fills into[i], 1-D in host memory, with elements wanted[i] of `kind`. Reads the blocks of
  // stored tensors that overlap, each once and whole, for its checksum.
  void read(const std::string& kind, const std::vector<WantedRange>& wanted,
            const std::vector<at::Tensor>& into);
  // All elements of `wanted`, one range behind the other, 1-D in host memory. What is stored of
  // them has one dtype; `dtype` is that of tensors which are stored as bytes, since a file cannot
  // have it. Sizes are compared with the files before memory is taken.
  at::Tensor read_all(const std::string& kind, const std::vector<WantedRange>& wanted,
                      std::optional<c10::ScalarType> dtype = std::nullopt);
  // Compares the sizes of what is stored of `wanted` with the files, as read_all() does. Sets
  // `dtype`, if it is none, to that of what is stored.
  void check_sizes(const std::string& kind, const std::vector<WantedRange>& wanted,
                   std::optional<c10::ScalarType>& dtype);
  // The value of `kind` of each wanted range, shape [1]; undefined for a range without
  // elements. Throws unless what is stored stands for every wanted element.
  std::vector<at::Tensor> read_values(const std::string& kind,
                                      const std::vector<WantedRange>& wanted);
  // As read_all(), of all of what is stored once: an uncut tensor of a parameter, or a state.
  at::Tensor read_uncut(const std::string& owner, const std::string& kind,
                        std::optional<c10::ScalarType> dtype = std::nullopt);
  // The dtype of what read() reads of a range; `kind` must be stored for its owner.
  c10::ScalarType dtype(const std::string& kind, const WantedRange& range);
  // The bytes of the state of an included object.
  std::string read_bytes(const std::string& owner, const std::string& kind);

  // Compares a file of manifest().files with its size and the hash of its index.
  void verify_index(size_t file) { open(file); }
  // Of the blocks of all files, in their order, a bit for each that was read: 32 in an element of
  // int32. Files of before version 5 have none.
  at::Tensor blocks_read() const;
  // Reads what `read`, as blocks_read(), has no bit for: what no rank has read. Undefined: all.
  void verify_file(size_t file, const at::Tensor& read = {});

  uint64_t bytes_read() const;

 private:
  struct Place {  // of a stored tensor
    const ManifestTensors* entry = nullptr;
    const std::string* kind = nullptr;
    ManifestPiece piece;
  };

  StoredFile& open(size_t index);
  std::vector<Place> places(const std::string& owner, const std::string& kind) const;
  // How the stored pieces, which are appended to `stored`, make up `wanted`.
  std::vector<RangeOverlap> overlaps(const std::string& kind,
                                     const std::vector<WantedRange>& wanted,
                                     std::vector<Place>& stored) const;
  const StoredTensor& stored(const Place& place);
  // Returns the place of a tensor's bytes. Throws unless they are `numel` of `dtype`; so
  // that of this size may be allocated.
  const StoredTensor& stored(const Place& place, c10::ScalarType dtype, int64_t numel);

  const std::string folder_;  // or the name
  const Manifest manifest_;
  const Open open_;
  std::unordered_map<std::string_view, std::vector<const ManifestTensors*>> entries_;  // by owner
  std::vector<int64_t> first_block_;  // of each file
  int64_t blocks_ = 0;
  std::map<size_t, std::unique_ptr<StoredFile>> files_;
  std::vector<size_t> recent_;  // the files that are open, the one that was used last at the end
};

}  // namespace zero
