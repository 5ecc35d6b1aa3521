// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/match/mesh_tensors.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>

namespace zero {
namespace {

// Equal for options that a file holds alike: there NaN equals NaN.
std::string text_of(const OptionGroups::value_type& options) {
  std::string text;
  for (const auto& [name, value] : options) {
    const bool nan = std::isnan(value);
    text += name + '\0' + (nan ? "nan" : std::to_string(std::bit_cast<int64_t>(value + 0.0))) + ' ';
  }
  return text;
}

template <typename Value>
void check_same(const std::string& name, const char* what, const Value& a, const Value& b,
                const HeldTensor& first, const HeldTensor& other) {
  TORCH_CHECK(a == b, name, ": expected one ", what, " on all ranks that hold it, got ", a,
              " on rank ", first.first_rank, " and ", b, " on rank ", other.first_rank,
              "; give different parameters different names");
}

// Throws unless what sets say of one tensor, or of one part of it, are copies.
void check_copies(const std::string& kind, const std::vector<const HeldTensor*>& copies) {
  const HeldTensor& first = *copies.front();
  const std::string name = "checkpoint: " + kind + " " + first.about.name;
  double counted = 0;
  std::string ranks;
  for (const HeldTensor* other : copies) {
    check_same(name, "shape", c10::IntArrayRef(first.about.shape),
               c10::IntArrayRef(other->about.shape), first, *other);
    if (memory_order(first.about) != memory_order(other->about)) {
      check_same(name, "memory order (strides)", c10::IntArrayRef(first.about.strides),
                 c10::IntArrayRef(other->about.strides), first, *other);
    }
    check_same(name, "dtype", first.about.dtype, other->about.dtype, first, *other);
    TORCH_CHECK(first.hash == other->hash, name,
                ": expected the same values on all ranks that hold it, got others on rank ",
                other->first_rank, " than on rank ", first.first_rank,
                "; give different tensors different names");
    counted += other->norm_copies == 0 ? 0.0 : 1.0 / static_cast<double>(other->norm_copies);
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(other->first_rank);
  }
  // A name that counts more than once in the norm stands for several parameters.
  TORCH_CHECK(counted < 1 + 1e-6, name,
              ": expected different names for different parameters, got one name on the sets of "
              "ranks that begin with ",
              ranks, ", where the norm counts it ", counted,
              " times; give each expert or layer a name of its own, for example by its number in "
              "the whole model, or say with copies() or owner(false) of its placement that these "
              "are one parameter");
}

constexpr char kPartsRemedy[] = "; tensor_parts() says on each rank how a tensor is cut";

std::string cut_text(const HeldTensor& t) {
  if (t.parts == 1) return "a whole tensor";
  return "one of " + std::to_string(t.parts) + " parts along dimension " +
         std::to_string(t.dimension) +
         (t.sections.empty() ? "" : c10::str(" of the sections ", c10::IntArrayRef(t.sections)));
}

// Of a part, whose cut dimension counts however few of its elements the part has.
std::vector<size_t> part_order(const HeldTensor& t) {
  ManifestParameter about = t.about;
  about.whole = about.shape;
  about.whole[t.dimension] = t.parts;
  return memory_order(about);
}

// What sets say of each part of one tensor. Throws unless the parts make up one whole.
std::vector<std::vector<const HeldTensor*>> sort_into_parts(
    const std::string& kind, const std::vector<const HeldTensor*>& same_name) {
  const HeldTensor& first = *same_name.front();
  const std::string name = "checkpoint: " + kind + " " + first.about.name;
  std::vector<std::vector<const HeldTensor*>> parts(first.parts);
  for (const HeldTensor* t : same_name) {
    TORCH_CHECK(cut_text(*t) == cut_text(first), name,
                ": expected one cut on all ranks that hold it, got ", cut_text(first), " on rank ",
                first.first_rank, " and ", cut_text(*t), " on rank ", t->first_rank, kPartsRemedy);
    parts[t->part].push_back(t);
  }
  for (size_t p = 0; p < parts.size(); ++p) {
    TORCH_CHECK(!parts[p].empty(), name, ": expected all of its ", first.parts, " parts, got none ",
                "with number ", p, kPartsRemedy);
    if (first.parts == 1) continue;
    ManifestParameter part = parts[p].front()->about;
    part.shape[first.dimension] = first.about.shape[first.dimension];
    TORCH_CHECK(part.shape == first.about.shape && part.dtype == first.about.dtype &&
                    part_order(*parts[p].front()) == part_order(first),
                name, ": expected parts that differ along dimension ", first.dimension,
                " alone, got ", c10::IntArrayRef(first.about.shape), " of ", first.about.dtype,
                " on rank ", first.first_rank, " and ",
                c10::IntArrayRef(parts[p].front()->about.shape), " of ", part.dtype, " on rank ",
                parts[p].front()->first_rank, ", or another memory order", kPartsRemedy);
  }
  return parts;
}

}  // namespace

MeshTensors::MeshTensors(const std::vector<HeldTensors>& held, int64_t own_part)
    : own_part_(static_cast<size_t>(own_part)) {
  number_groups(held);
  std::set<int64_t> sets;
  for (const HeldTensors& rank : held) {
    for (const HeldTensor& t : rank.parameters) sets.insert(t.first_rank);
  }
  sets_ = static_cast<int64_t>(sets.size());
  merge_by_name(held, &HeldTensors::parameters, "parameter", parameters_);
  merge_by_name(held, &HeldTensors::frozen, "frozen parameter", frozen_);
  merge_by_name(held, &HeldTensors::buffers, "buffer", buffers_);
}

// The first set's groups keep their numbers. A later one's get those of equal options, its own
// number where it is among them.
void MeshTensors::number_groups(const std::vector<HeldTensors>& held) {
  std::map<std::string, size_t> numbers;  // the lowest of each options
  for (size_t rank = 0; rank < held.size(); ++rank) {
    const bool first = groups_.empty();
    for (size_t g = 0; g < held[rank].groups.size(); ++g) {
      const auto& options = held[rank].groups[g];
      const std::string text = text_of(options);
      size_t number = groups_.size();
      if (!first) {
        const auto equal = numbers.find(text);
        const bool own = g < groups_.size() && text_of(groups_[g]) == text;
        if (equal != numbers.end()) number = own ? g : equal->second;
      }
      if (number == groups_.size()) {
        groups_.push_back(options);
        numbers.try_emplace(text, number);
      }
      group_numbers_[{static_cast<int64_t>(rank), static_cast<int64_t>(g)}] =
          static_cast<int64_t>(number);
    }
  }
}

//   1. Put the tensors of all ranks into one order: by set, and as each set has them.
//   2. Gather those of one name, which stand where the first of them does.
//   3. Refuse names that two kinds share.
//   4. Sort them into parts, compare the copies of each part, and store each part once.
void MeshTensors::merge_by_name(const std::vector<HeldTensors>& held, Held HeldTensors::*list,
                                const char* kind, std::vector<ManifestParameter>& into) {
  std::vector<const HeldTensor*> order;
  for (const HeldTensors& rank : held) {
    for (const HeldTensor& t : rank.*list) order.push_back(&t);
  }
  std::ranges::sort(order, {},
                    [](const HeldTensor* t) { return std::pair(t->first_rank, t->index); });
  std::map<std::string, Copies> by_name;
  for (const HeldTensor* t : order) by_name[t->about.name].push_back(t);
  for (const HeldTensor* t : order) {
    const Copies& same_name = by_name.at(t->about.name);
    if (same_name.front() != t) continue;
    const auto [other, added] = kinds_.emplace(t->about.name, kind);
    TORCH_CHECK(added, "checkpoint: ", t->about.name,
                ": expected a tensor of one kind on all ranks, got a ", other->second,
                " on some and a ", kind, " on rank ", t->first_rank,
                "; give different tensors different names");
    const std::vector<Copies> parts = sort_into_parts(kind, same_name);
    for (const Copies& part : parts) check_copies(kind, part);
    add_parts(parts, into);
  }
}

void MeshTensors::add_parts(const std::vector<Copies>& parts,
                            std::vector<ManifestParameter>& into) {
  const HeldTensor& first = *parts.front().front();
  std::vector<int64_t> whole;  // the shape of all parts together; empty for an uncut tensor
  if (parts.size() > 1) {
    whole = first.about.shape;
    int64_t& size = whole[first.dimension] = 0;
    for (const Copies& part : parts) {
      const std::vector<int64_t>& shape = part.front()->about.shape;
      TORCH_CHECK(
          first.sections.empty() || shape == first.about.shape, "checkpoint: ", first.about.name,
          ": expected ", parts.size(), " equal parts of a tensor with sections, got shapes ",
          c10::IntArrayRef(first.about.shape), " and ", c10::IntArrayRef(shape), kPartsRemedy);
      size += shape[first.dimension];
    }
  }
  int64_t from = 0;  // where the part begins along the dimension of the cut
  for (const Copies& part : parts) {
    const HeldTensor& t = *part.front();
    ManifestParameter about = t.about;
    if (&into == &parameters_) about.group = group_numbers_.at({t.first_rank, t.about.group});
    if (parts.size() > 1) {
      about.whole = whole;
      about.dimension = t.dimension;
      about.from = from;
      about.sections = t.sections;
      from += t.about.shape[t.dimension];
      check_part(about);
    }
    stored_by_[stored_name(about)] = t.first_rank;
    parts_[about.name].push_back(about);
    into.push_back(std::move(about));
  }
}

const ManifestParameter& MeshTensors::own(const std::string& name) const {
  const std::vector<ManifestParameter>& parts = parts_.at(name);
  return parts.size() == 1 ? parts.front() : parts.at(own_part_);
}

}  // namespace zero
