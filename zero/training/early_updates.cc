// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/training/early_updates.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <variant>

#include "bookkeeping/layout.h"
#include "zero/base/normal_tensors.h"
#include "zero/base/streams.h"
#include "zero/training/engine.h"

namespace zero {

void EarlyUpdates::take_options() {
  engine_.shards.groups().check(*groups_);
  engine_.shards.groups().push(*groups_);
}

void EarlyUpdates::begin() {
  // They read the bucket that backward comes to first last.
  engine_.readers.wait(0);
  take_options();
  std::variant<int64_t, at::Tensor> step = engine_.record.steps();
  std::visit([](auto& number) { number = number + 1; }, step);
  engine_.shards.begin_update({engine_.clipping.bound(), engine_.clipping.coefficient()}, {}, step);
  const at::Device device = engine_.table.parameters().front().tensor.device();
  if (has_streams(device)) begun_on_ = current_torch_stream(device);
}

void EarlyUpdates::before_sending(int64_t bucket, bool has_all_gradients) {
  const at::NoGradGuard no_grad;
  const NormalTensors normal;  // state that is made now outlives the pass
  engine_.comms->close_on_error([&] {
    if (!engine_.shards.is_updating()) begin();
    if (begun_on_) {  // a model may use several
      const c10::Stream current = current_torch_stream(begun_on_->device());
      if (current != *begun_on_) make_wait(current, *begun_on_);
    }
    if (has_all_gradients) engine_.shards.prepare_early(bucket);
  });
  const Bucket& sent = engine_.plan.buckets[bucket];
  if (!engine_.plan.layout_of(sent).in_place()) return;
  // Now, and not when the thread that reduces is done: a graph that still needs the old values must
  // notice in every run.
  for (const Slot& slot : sent.slots) engine_.table.bump_version(slot.parameter);
}

void EarlyUpdates::update(int64_t bucket) {
  const at::NoGradGuard no_grad;
  const NormalTensors normal;
  engine_.comms->close_on_error(
      [&] {
        engine_.shards.update_early(bucket);
        engine_.shards.update_ema(bucket);
      },
      kFailedUpdate);
}

}  // namespace zero
