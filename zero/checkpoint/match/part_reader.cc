// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/match/part_reader.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <unordered_set>

#include "bookkeeping/part_ranges.h"
#include "zero/base/error_text.h"

namespace zero {
namespace {

// Bounds the memory of a read whose parts are cut along a fast dimension.
constexpr size_t kRangesAtOnce = size_t{1} << 16;

// Adds the elements of `range` to those up to `ends`.
void join(std::map<int64_t, int64_t>& ends, const WantedRange& range) {
  int64_t begin = range.begin, end = range.begin + range.numel;
  auto at = ends.upper_bound(begin);
  if (at != ends.begin() && std::prev(at)->second >= begin) begin = (--at)->first;
  while (at != ends.end() && at->first <= end) {
    end = std::max(end, at->second);
    at = ends.erase(at);
  }
  ends.emplace(begin, end);
}

}  // namespace

std::vector<std::pair<at::Tensor, at::Tensor>> part_views(const ManifestParameter& about,
                                                          const at::Tensor& part,
                                                          const at::Tensor& whole) {
  std::vector<std::pair<at::Tensor, at::Tensor>> views;
  const TensorPart place = part_of(about);
  int64_t begin = 0;  // of the box in the part
  for (const TensorBox& box : place.boxes) {
    const int64_t size = box.sizes[place.along];
    views.emplace_back(part.narrow(about.dimension, begin, size),
                       whole.narrow(about.dimension, box.from[place.along], size));
    begin += size;
  }
  return views;
}

std::vector<WantedRange> hulls(const HeldRange& range) {
  std::map<std::string, WantedRange> by_owner;
  for (const WantedRange& r : range.stored) {
    WantedRange& hull = by_owner.try_emplace(r.owner, r).first->second;
    const int64_t end = std::max(hull.begin + hull.numel, r.begin + r.numel);
    hull.begin = std::min(hull.begin, r.begin);
    hull.numel = end - hull.begin;
  }
  std::vector<WantedRange> result;
  for (auto& item : by_owner) result.push_back(std::move(item.second));
  return result;
}

PartReader::PartReader(CheckpointReader& reader) : reader_(reader) {
  const Manifest& m = reader.manifest();
  std::unordered_set<std::string> listed;
  for (const auto* list : {&m.parameters, &m.frozen, &m.buffers}) {
    for (const ManifestParameter& p : *list) {
      Parts& parts = parts_[p.name];
      const bool is_new = listed.insert(stored_name(p)).second;
      if (is_new || parts.empty()) parts.push_back(&p);
      TORCH_CHECK(whole_shape(p) == whole_shape(*parts.front()), "parameter ", p.name,
                  ": expected parts of one tensor in the checkpoint, got parts of shapes ",
                  c10::IntArrayRef(whole_shape(*parts.front())), " and ",
                  c10::IntArrayRef(whole_shape(p)));
    }
  }
}

const PartReader::Parts& PartReader::parts(const std::string& name) const {
  return parts_.at(name);
}

HeldRange PartReader::find(const ManifestParameter& held, int64_t begin, int64_t numel) const {
  HeldRange result{held.name, {}, {}};
  const TensorPart wanted = part_of(held);
  std::vector<TensorPart> stored;
  for (const ManifestParameter* p : parts(held.name)) {
    stored.push_back(part_of(*p));
    if (stored.back() == wanted) result.same = stored_name(*p);
  }
  if (!result.same.empty()) {
    result.stored.push_back({result.same, begin, numel});
    return result;
  }
  try {
    for (const PartRange& range : part_ranges(wanted, begin, numel, stored)) {
      result.stored.push_back(
          {stored_name(*parts(held.name)[range.stored]), range.begin, range.numel});
    }
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "parameter ", held.name, ": ", error_text(error));
  }
  return result;
}

std::set<std::string> PartReader::kinds(const HeldRange& range) const {
  if (!range.same.empty()) return reader_.kinds(range.same);
  std::set<std::string> result;
  for (const ManifestParameter* p : parts(range.name)) {
    const auto& kinds = reader_.kinds(stored_name(*p));
    result.insert(kinds.begin(), kinds.end());
  }
  return result;
}

c10::ScalarType PartReader::dtype(const std::string& kind, const HeldRange& range) {
  if (!range.stored.empty()) return reader_.dtype(kind, range.stored.front());
  return reader_.dtype(kind, {stored_name(*parts(range.name).front()), 0, 0});
}

void PartReader::read(const std::string& kind, const std::vector<const HeldRange*>& ranges,
                      const std::vector<at::Tensor>& into) {
  std::vector<WantedRange> wanted;
  std::vector<at::Tensor> pieces;
  for (size_t i = 0; i < ranges.size(); ++i) {
    int64_t done = 0;
    for (const WantedRange& range : ranges[i]->stored) {
      wanted.push_back(range);
      const bool all = range.numel == into[i].numel();
      pieces.push_back(all ? into[i] : into[i].narrow(0, done, range.numel));
      done += range.numel;
    }
    // Between parameters, so that each stored tensor is read once.
    const bool last = i + 1 == ranges.size() || ranges[i + 1]->name != ranges[i]->name;
    if (i + 1 == ranges.size() || (last && wanted.size() > kRangesAtOnce)) {
      reader_.read(kind, wanted, pieces);
      wanted.clear();
      pieces.clear();
    }
  }
}

std::vector<at::Tensor> PartReader::read_values(const std::string& kind,
                                                const std::vector<const HeldRange*>& ranges) {
  std::vector<WantedRange> wanted;
  std::vector<size_t> of;
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (WantedRange& hull : hulls(*ranges[i])) {
      wanted.push_back(std::move(hull));
      of.push_back(i);
    }
  }
  const std::vector<at::Tensor> values = reader_.read_values(kind, wanted);
  std::vector<at::Tensor> result(ranges.size());
  for (size_t w = 0; w < wanted.size(); ++w) {
    at::Tensor& value = result[of[w]];
    if (!value.defined()) value = values[w];
    TORCH_CHECK(!values[w].defined() || at::equal(value, values[w]), "parameter ",
                ranges[of[w]]->name, ": expected one ", kind.substr(kind.find(':') + 1),
                " for all its parts in the checkpoint, got parts that differ, which cannot be put "
                "together; load with the tensor parallelism of the save, or export the state of a "
                "run without tensor parallelism");
  }
  return result;
}

at::Tensor PartReader::read_uncut(const std::string& kind, const HeldRange& range) {
  TORCH_CHECK(!range.same.empty(), "parameter ", range.name, ": expected state ",
              kind.substr(std::string(kUncutPrefix).size()),
              " of a tensor that is cut as it was at the save, since this state has a size of its "
              "own and cannot be cut, got another cut; load with the tensor parallelism of the "
              "save");
  return reader_.read_uncut(range.same, kind);
}

at::Tensor PartReader::read_all(const ManifestParameter& held, const std::string& kind) {
  std::optional<c10::ScalarType> dtype;
  if (is_held_whole(kind)) dtype = parts(held.name).front()->dtype;
  const int64_t all = numel(held), at_once = elements_at_once(held);
  if (at_once >= all) return reader_.read_all(kind, find(held, 0, all).stored, dtype);
  const auto in_slices = [&](const auto& work) {
    for (int64_t begin = 0; begin < all; begin += at_once) {
      const int64_t count = std::min(at_once, all - begin);
      work(find(held, begin, count), begin, count);
    }
  };
  // All sizes first: only what the files have may be allocated.
  in_slices([&](const HeldRange& range, int64_t, int64_t) {
    reader_.check_sizes(kind, range.stored, dtype);
  });
  const at::Tensor result = at::empty({all}, *dtype);
  in_slices([&](const HeldRange& range, int64_t begin, int64_t count) {
    read(kind, {&range}, {result.narrow(0, begin, count)});
  });
  return result;
}

at::Tensor PartReader::read_whole(const std::string& name, const std::string& kind) {
  const ManifestParameter& about = *parts(name).front();
  const ManifestParameter whole{name, whole_shape(about), about.strides, about.dtype, 0};
  // The time to find ranges grows with what is promised, so that has to be in the files.
  const auto dtype = is_held_whole(kind) ? std::optional(about.dtype) : std::nullopt;
  int64_t there = 0;
  for (const ManifestParameter* part : parts(name)) {
    there += reader_.count_stored(stored_name(*part), kind, dtype);
  }
  TORCH_CHECK(there == numel(whole), "parameter ", name, ": expected parts of ", numel(whole),
              " elements together, got ", there);
  const std::vector<size_t> order = memory_order(whole);
  std::vector<int64_t> sizes, dimensions(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    sizes.push_back(whole.shape[order[i]]);
    dimensions[order[i]] = static_cast<int64_t>(i);
  }
  return read_all(whole, kind).view(sizes).permute(dimensions);
}

// In rows of the slowest dimensions that no part cuts, to each of which a stored box gives at most
// one run.
int64_t PartReader::elements_at_once(const ManifestParameter& held) const {
  const TensorPart wanted = part_of(held);
  size_t along = wanted.along, boxes = 0;
  for (const ManifestParameter* p : parts(held.name)) {
    const TensorPart stored = part_of(*p);
    if (stored == wanted) return numel(held);  // one run
    along = std::max(along, stored.along);
    boxes += stored.boxes.size();
  }
  const std::vector<size_t> order = memory_order(held);
  int64_t row = 1, rows = 1;
  for (size_t i = 0; i < order.size(); ++i) (i < along ? rows : row) *= held.shape[order[i]];
  const auto at_once = static_cast<int64_t>(std::max<size_t>(kRangesAtOnce / boxes, 1));
  return row * std::min(rows, at_once);
}

void NeededTensors::add(const HeldRange& range) {
  for (const WantedRange& run : range.stored) join(ranges_[run.owner], run);
  for (const WantedRange& hull : hulls(range)) join(hulls_[hull.owner], hull);
}

void NeededTensors::add_state(const std::string& owner, const std::string& kind) {
  states_.emplace(owner, kind);
}

bool NeededTensors::contains(const ManifestTensor& tensor) const {
  if (states_.count({tensor.owner, tensor.kind}) > 0) return true;
  const auto& by_owner = is_value(tensor.kind) ? hulls_ : ranges_;
  const auto found = by_owner.find(tensor.owner);
  if (found == by_owner.end()) return false;
  if (is_uncut(tensor.kind)) return true;
  const auto after = found->second.lower_bound(tensor.begin + tensor.numel);
  return after != found->second.begin() && std::prev(after)->second > tensor.begin;
}

}  // namespace zero
