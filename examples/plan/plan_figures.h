// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a plan costs a rank, by arithmetic: memory, padding, traffic, time.
#pragma once

#include <cstdint>
#include <vector>

#include "bookkeeping/memory.h"
#include "bookkeeping/plan.h"
#include "examples/plan/model_shapes.h"

namespace zero::examples {

struct JobOptions {
  int64_t world_size = 8;
  int64_t stage = 2;
  c10::ScalarType dtype = c10::ScalarType::BFloat16;
  PlanOptions plan;
  // Ranks over which the experts of a layer are dealt out; divides their number and world_size.
  // The ranks with the same experts share their state. 1: every rank has all experts.
  int64_t expert_parallel = 1;
};

// The plan of a rank's part of `model`: domain 0 is all ranks, domain 1 those with the same
// experts. Throws c10::Error when expert_parallel does not fit.
Plan plan_job(const ModelShape& model, const JobOptions& options);

// Elements of parameters in the rows of each rank of domain 0; padding is not counted. A rank r
// has row r modulo the domain's size of each domain. O(parameters + buckets + ranks).
std::vector<int64_t> owned_elements(const Plan& plan);

struct PlanFigures {
  int64_t parameters = 0;    // elements on one rank
  int64_t padding = 0;       // elements in rows of all ranks that belong to no parameter
  double padding_share = 0;  // of the parameters
  int64_t buckets = 0;
  int64_t largest_bucket_bytes = 0;
  int64_t least_owned = 0, most_owned = 0;  // elements of a rank
  double imbalance = 0;                     // (most - mean) / mean
  MemoryReport memory;                      // of the rank that owns most
  // One step of one round.
  int64_t collective_calls = 0;
  int64_t bytes_sent = 0;     // by one rank
  int64_t ring_messages = 0;  // one after another, where a collective is a ring
  int64_t tree_messages = 0;  // the same where it takes log2(ranks) messages
  int64_t pair_messages = 0;  // sent by one rank where rows travel pairwise, as on Gloo
};

PlanFigures plan_figures(const Plan& plan, int64_t stage);

// Messages wait for each other, bytes for the link.
double communication_seconds(int64_t messages, int64_t bytes, double latency_seconds,
                             double bytes_per_second);

}  // namespace zero::examples
