// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "bookkeeping/layout.h"
#include "bookkeeping/whole_parameters.h"

namespace zero {
namespace {

// The owners of the parameters of one arena, by load: who owns which of several equal parameters
// is open until their bucket is known.
class EqualParameters {
 public:
  EqualParameters(c10::ArrayRef<ParameterInfo> parameters, const Arena& arena, const Plan& plan) {
    for (const int64_t p : arena.parameters) {
      owners_[key(parameters[p])].push_back(plan.parameter_owner[p]);
    }
  }

  // Takes an owner of a parameter like `info` out: that with the shortest of `rows`, and of those
  // the one that has waited longest. Looks at kNearest owners, so that planning takes linear time.
  int64_t take(const ParameterInfo& info, std::map<int64_t, int64_t>& rows) {
    constexpr size_t kNearest = 64;
    std::deque<int64_t>& open = owners_.at(key(info));
    size_t best = 0;
    int64_t least = -1;
    for (size_t i = 0; i < std::min(open.size(), kNearest) && least != 0; ++i) {
      const auto row = rows.find(open[i]);
      const int64_t numel = row == rows.end() ? 0 : row->second;
      if (least >= 0 && numel >= least) continue;
      best = i;
      least = numel;
    }
    const int64_t owner = open[best];
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(best));
    rows[owner] += load_of(info).numel;
    return owner;
  }

 private:
  static std::pair<int64_t, int64_t> key(const ParameterInfo& info) {
    return {load_of(info).numel, load_of(info).cost};
  }

  std::map<std::pair<int64_t, int64_t>, std::deque<int64_t>> owners_;
};

class WholeParameters : public ParameterLayout {
 public:
  Layout id() const override { return Layout::kWholeParameters; }
  const char* name() const override { return "whole parameters"; }
  bool in_place() const override { return true; }
  bool is_whole() const override { return true; }

  void assign_owners(c10::ArrayRef<ParameterInfo> parameters, const PlanOptions& options,
                     Plan& plan) const override {
    plan.parameter_owner.assign(parameters.size(), -1);
    std::map<int64_t, std::vector<int64_t>> by_domain;  // in reverse registration order
    std::map<int64_t, int64_t> world_size;
    for (int64_t p = static_cast<int64_t>(parameters.size()) - 1; p >= 0; --p) {
      if (plan.arenas[plan.parameter_arena[p]].layout == this) {
        by_domain[parameters[p].domain].push_back(p);
      }
    }
    for (const Arena& arena : plan.arenas) world_size[arena.domain] = arena.world_size;
    for (const auto& [domain, members] : by_domain) {
      std::vector<ParameterLoad> loads;
      loads.reserve(members.size());
      for (const int64_t p : members) loads.push_back(load_of(parameters[p]));
      const std::vector<int64_t> owners =
          zero::assign_owners(loads, world_size.at(domain), options.ranks_per_machine);
      for (size_t i = 0; i < members.size(); ++i) plan.parameter_owner[members[i]] = owners[i];
    }
  }

  // A bucket is the next parameters in reverse registration order until it is large enough. Inside
  // it they are in the order of their owners.
  std::vector<Bucket> cut(c10::ArrayRef<ParameterInfo> parameters, int64_t arena_index,
                          int64_t bucket_bytes, Plan& plan) const override {
    Arena& arena = plan.arenas[arena_index];
    const auto element = static_cast<int64_t>(c10::elementSize(arena.dtype));
    EqualParameters equals(parameters, arena, plan);
    const std::vector<int64_t> order = std::exchange(arena.parameters, {});
    std::vector<Bucket> buckets;
    std::vector<int64_t> members;
    int64_t numel = 0;
    for (const int64_t p : order) {
      numel += load_of(parameters[p]).numel;
      members.push_back(p);
      const bool full = bucket_bytes != 0 && numel * element >= bucket_bytes;
      if (!full && p != order.back()) continue;
      Bucket bucket =
          make_bucket(parameters, arena_index, std::exchange(members, {}), equals, plan);
      if (!bucket.slots.empty()) buckets.push_back(std::move(bucket));
      numel = 0;
    }
    return buckets;
  }

  std::vector<Span> spans(const Bucket& /*bucket*/, const Slot& slot) const override {
    return {{slot.begin, slot.offset, slot.numel}};
  }

  Span span_in_row(const Bucket& bucket, const Slot& slot, int64_t row) const override {
    const bool owned = bucket.rows.begin(row) <= slot.offset && slot.offset < bucket.rows.end(row);
    return {slot.begin, slot.offset, owned ? slot.numel : 0};
  }

 private:
  // Gives `members` their owners and their places at the end of the arena.
  static Bucket make_bucket(c10::ArrayRef<ParameterInfo> parameters, int64_t arena_index,
                            std::vector<int64_t> members, EqualParameters& equals, Plan& plan) {
    Arena& arena = plan.arenas[arena_index];
    std::vector<int64_t> by_size = members;
    std::stable_sort(by_size.begin(), by_size.end(), [&](int64_t a, int64_t b) {
      return parameters[a].numel > parameters[b].numel;
    });
    std::map<int64_t, int64_t> row_numel;
    for (const int64_t p : by_size) plan.parameter_owner[p] = equals.take(parameters[p], row_numel);
    std::stable_sort(members.begin(), members.end(), [&](int64_t a, int64_t b) {
      return plan.parameter_owner[a] < plan.parameter_owner[b];
    });

    Bucket bucket{arena_index, arena.numel, {}, {}};
    std::vector<int64_t> filled, ends;
    for (const int64_t p : members) {
      arena.parameters.push_back(p);
      plan.parameter_offset[p] = arena.numel;
      if (parameters[p].numel == 0) continue;
      bucket.slots.push_back({p, 0, parameters[p].numel, arena.numel - bucket.begin, 0});
      arena.numel += load_of(parameters[p]).numel;
      if (filled.empty() || filled.back() != plan.parameter_owner[p]) {
        filled.push_back(plan.parameter_owner[p]);
        ends.push_back(0);
      }
      ends.back() = arena.numel - bucket.begin;
    }
    bucket.rows = BucketRows(arena.world_size, std::move(filled), std::move(ends));
    return bucket;
  }
};

}  // namespace

const ParameterLayout& whole_parameters_layout() {
  static const WholeParameters layout;
  return layout;
}

}  // namespace zero
