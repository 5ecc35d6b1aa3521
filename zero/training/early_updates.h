// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptions::update_in_backward: the part of a step's update that the reducer asks for, bucket by
// bucket, while the backward pass runs. step() makes the rest.
//
// On a GPU the update of a bucket is enqueued behind its sum, and the host waits for neither:
//
//   stream of the pass   layer k ---- begin, counts, pack k ---- layer k-1 ---- ... ---- step()
//                                                       \                               /
//   stream of the sums                                   sum k, update k, shard k is free
//
// Kernels of the pass that read a weight are before the pack of its gradient on that stream, or on
// one that it waits for, as autograd lets a gradient's stream wait for the node that made it. What
// is enqueued behind the pack cannot read the weight from a graph: its version has changed. Memory
// that outlives a step is made on the stream of the pass, to which it belongs.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>

#include "zero/gradients/early_shards.h"
#include "zero/update/group_options.h"

namespace zero {

struct Engine;

class EarlyUpdates final : public BucketUpdates {
 public:
  // Of `engine`, which must outlive this.
  explicit EarlyUpdates(Engine& engine) : engine_(engine) {}

  // An update has the options of `groups`, those that users see, as they are when it begins.
  void read_options_of(const GroupOptions::ParamGroups* groups) { groups_ = groups; }
  const GroupOptions::ParamGroups* groups() const { return groups_; }
  // Makes them the inner optimizer's. Throws c10::Error where that cannot be done.
  void take_options();

  void before_sending(int64_t bucket, bool has_all_gradients) override;
  void update(int64_t bucket) override;

 private:
  void begin();

  Engine& engine_;
  const GroupOptions::ParamGroups* groups_ = nullptr;
  std::optional<c10::Stream> begun_on_;  // a GPU's stream of the update that is under way
};

}  // namespace zero
