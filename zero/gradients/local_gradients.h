// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The gradients of this rank that are not in a bucket: in p.grad(), or apart in fp32.
//
// p.grad() of a parameter holds one of these:
//   nothing
//   a gradient that was accumulated and not sent, from no_sync(), late in its pass, or put there by
//   hand
//   in stage 1, the averaged gradient of the last reduction, to be read only
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "zero/memory/parameter_table.h"

namespace zero {

class LocalGradients {
 public:
  // `fp32`: 16-bit gradients under no_sync add up apart, in fp32. `table` must outlive this.
  LocalGradients(const ParameterTable& table, bool fp32)
      : table_(table), fp32_(fp32), states_(table.parameters().size()) {}

  // Returns whether there is a gradient that was not sent.
  bool has(int64_t parameter) const;
  // Throws c10::Error when p.grad() cannot be sent.
  void check(int64_t parameter) const;
  // p.grad() was accumulated and stays on this rank for now.
  void keep(int64_t parameter);
  // p.grad() waits for the next round.
  void leave(int64_t parameter) { states_[parameter].kept = true; }
  // Returns all that there is for the parameter, in its memory order; nothing is left.
  at::Tensor release(int64_t parameter);
  // The tensor to which `gradient` can be added while both are rounded to `dtype` once; undefined
  // if there is none, so that `gradient` can be taken as it is. Nothing if it cannot be done.
  std::optional<at::Tensor> addend(int64_t parameter, const at::Tensor& gradient,
                                   c10::ScalarType dtype) const;

  // p.grad() was replaced by an average.
  void mark_average(int64_t parameter);
  bool is_average(int64_t parameter) const { return states_[parameter].averaged; }
  // Drops p.grad() if it holds an average.
  void drop_average(int64_t parameter);

  // Throws c10::Error when a gradient was reset or replaced by one that cannot be sent, or when an
  // average was changed.
  void verify() const;
  void discard();
  int64_t bytes() const;  // without averages

 private:
  struct State {
    bool kept = false;      // p.grad() holds a gradient that is not in a bucket
    bool averaged = false;  // p.grad() holds an average: this tensor, of this version
    const void* average = nullptr;
    int64_t average_version = 0;
    at::Tensor fp32;  // the sum of earlier gradients; mostly undefined
  };

  const ParameterTable& table_;
  const bool fp32_;
  std::vector<State> states_;  // per parameter
};

}  // namespace zero
