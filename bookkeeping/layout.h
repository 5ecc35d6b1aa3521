// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A ParameterLayout answers every question that depends on how parameters are placed in memory.
// There is one class per Layout, and besides is_whole() no other code of the library asks which
// layout it is. A new layout is such a class, a value of Layout and a line in layout_of().
//
// The answers are facts about sizes, so the class is in this room: the plan and the memory formulas
// need them too, and the tensors that follow from them are made in zero/memory.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bookkeeping/plan.h"

namespace zero {

// Everything that depends on how parameters are placed in memory.
class ParameterLayout {
 public:
  virtual ~ParameterLayout() = default;

  virtual Layout id() const = 0;
  // The name in the manifest of a checkpoint.
  virtual const char* name() const = 0;

  // --- Places ---

  // Sets parameter_owner of the parameters in arenas of this layout, where they have one owner
  // each. Before cut(), since the parameters of all arenas of a domain are given to the same ranks.
  virtual void assign_owners(c10::ArrayRef<ParameterInfo> /*parameters*/,
                             const PlanOptions& /*options*/, Plan& /*plan*/) const {}
  // Cuts one arena of `plan` into buckets of about `bucket_bytes`, or into one for 0, in arena
  // order. Sets the arena's numel, and parameter_offset where in_place().
  virtual std::vector<Bucket> cut(c10::ArrayRef<ParameterInfo> parameters, int64_t arena,
                                  int64_t bucket_bytes, Plan& plan) const = 0;
  // The spans of `slot` in its flat bucket, in the parameter's order. They are as long as they can
  // be: one may reach over several rows.
  virtual std::vector<Span> spans(const Bucket& bucket, const Slot& slot) const = 0;
  // The one span of `slot` in `row`; its numel is 0 where there is none.
  virtual Span span_in_row(const Bucket& bucket, const Slot& slot, int64_t row) const = 0;

  // True: no parameter is cut, and each belongs to one rank.
  virtual bool is_whole() const { return false; }

  // --- Memory ---

  // True: working parameters are views of flat arenas, so that a bucket's rows are the parameters'
  // memory. False: parameters keep their own storage, and rows are copied to and from a buffer.
  virtual bool in_place() const = 0;
  // True: the own row of the working parameters is the fp32 master.
  bool is_master(const Arena& arena) const;
  // Elements that working parameters occupy, or gradients in full; with padding where in_place().
  int64_t full_numel(const Arena& arena) const;
  // True: a parameter must fill its memory without holes, since its elements are copied in their
  // order there.
  bool needs_dense_parameters() const { return !in_place(); }
};

// The limit of gathers under way at a time. Where some layout is not in_place(), they have buffers
// of their own: without a limit, all of them together would be another copy of the model.
size_t max_gathers(const Plan& plan);

// The names of the layouts of all arenas, each once, with " + " between them.
std::string layout_names(const Plan& plan);

// Lives as long as the process.
const ParameterLayout& layout_of(Layout layout);

// The objects behind layout_of(), each in a file of its name.
const ParameterLayout& contiguous_layout();
const ParameterLayout& per_parameter_layout();
const ParameterLayout& whole_parameters_layout();

// Elements of `dtype` in kAlignmentBytes, and `value` rounded up to a multiple of `unit`.
int64_t alignment_of(c10::ScalarType dtype);
inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace zero
