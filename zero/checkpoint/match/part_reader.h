// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reads tensors that a checkpoint holds whole or in tensor-parallel parts, into tensors that are
// whole or parts themselves, cut in the same way or in another.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/reader.h"

namespace zero {

// Elements of what a rank holds of a tensor.
struct HeldRange {
  std::string name;
  std::vector<WantedRange> stored;  // that make them up, in their order
  std::string same;                 // the stored tensor, if it has the same shape and place
};

// Views with the same elements: first of `part`, of shape about.shape, then of the tensor `whole`
// that it is a part of, of shape about.whole. One pair, or one for each section of a fused tensor.
std::vector<std::pair<at::Tensor, at::Tensor>> part_views(const ManifestParameter& about,
                                                          const at::Tensor& part,
                                                          const at::Tensor& whole);

// For each stored tensor of a range, the range from its first element to its last: what one value
// that stands for all elements is of.
std::vector<WantedRange> hulls(const HeldRange& range);

class PartReader {
 public:
  // `reader` must outlive this. Throws c10::Error where entries of one name are parts of wholes of
  // different shapes.
  explicit PartReader(CheckpointReader& reader);

  // The elements [begin, begin + numel) of `held`, in its memory order. Throws c10::Error unless
  // the checkpoint has each of them once. This and the rest: `held` is a tensor of the checkpoint,
  // with the same whole shape and memory order.
  HeldRange find(const ManifestParameter& held, int64_t begin, int64_t numel) const;

  // The entries of a tensor in the manifest: one, or one for each part, however often it is listed.
  using Parts = std::vector<const ManifestParameter*>;
  const Parts& parts(const std::string& name) const;

  // The kinds of tensors stored of what `range` is of, or of any part that may have elements of it.
  std::set<std::string> kinds(const HeldRange& range) const;
  // The dtype of what read() reads of a range.
  c10::ScalarType dtype(const std::string& kind, const HeldRange& range);

  // Fills into[i], 1-D in host memory, with ranges[i] of `kind`.
  void read(const std::string& kind, const std::vector<const HeldRange*>& ranges,
            const std::vector<at::Tensor>& into);
  // The value of `kind` of each range; undefined for a range without elements. Throws unless all
  // that is stored for a range has the same.
  std::vector<at::Tensor> read_values(const std::string& kind,
                                      const std::vector<const HeldRange*>& ranges);
  // An uncut tensor of what `range` is of. Throws unless that is stored as it is held here.
  at::Tensor read_uncut(const std::string& kind, const HeldRange& range);
  // All elements of what is `held`, 1-D in its memory order. A frozen parameter or buffer has the
  // dtype of the checkpoint's, and the rest that of what is stored.
  at::Tensor read_all(const ManifestParameter& held, const std::string& kind);
  // The same of a tensor as if it were held whole, in its shape.
  at::Tensor read_whole(const std::string& name, const std::string& kind);

 private:
  // How many elements of `held` read_all() finds and reads at a time.
  int64_t elements_at_once(const ManifestParameter& held) const;

  CheckpointReader& reader_;
  std::map<std::string, Parts> parts_;  // by name
};

// Which stored tensors of a checkpoint a rank reads.
class NeededTensors {
 public:
  // The pieces of values that overlap a hull of `range`, and of tensors those that overlap the
  // range itself: between its runs lie the other parts.
  void add(const HeldRange& range);
  // The state of an object that is included.
  void add_state(const std::string& owner, const std::string& kind);

  bool contains(const ManifestTensor& tensor) const;

 private:
  using Ends = std::map<int64_t, int64_t>;  // by begin, of ranges that neither overlap nor touch

  std::map<std::string, Ends> ranges_;  // by owner
  std::map<std::string, Ends> hulls_;
  std::set<std::pair<std::string, std::string>> states_;
};

}  // namespace zero
