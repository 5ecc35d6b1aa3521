// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic over a plan: the memory of a rank, padding, bytes on links, and estimates of time.
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
  // Of the largest buckets, eight or more where they are below 4 MiB: their buffers stay allocated
  // between steps.
  int64_t kept_bucket_bytes = 0;
  int64_t least_owned = 0, most_owned = 0;  // elements of a rank
  double imbalance = 0;                     // (most - mean) / mean
  MemoryReport memory;                      // of the rank that owns most
  // One step of one round.
  int64_t collective_calls = 0;
  int64_t bytes_sent = 0;  // by one rank, to whichever ranks, unless it exchanges in two levels
};

// With Adam's moments in fp32, unless `options` say what state takes.
PlanFigures plan_figures(const Plan& plan, MemoryOptions options);

// ---- Time on the wire ----

// The machines of a job. Their ranks follow one another, and have one link to other machines.
struct Machines {
  int64_t ranks_per_machine = 8;
  double link_bytes_per_second = 400e9;   // of a machine, in each direction: 8 x 400 Gbit/s
  double local_bytes_per_second = 450e9;  // of a rank within its machine: NVLink of an H100
  double link_latency_seconds = 10e-6;    // of a message between machines
  double local_latency_seconds = 3e-6;    // of a message within one
};

// Ways to bring rows to their owners and back, in a group of H machines with L of its ranks each.
enum class ExchangeAlgorithm {
  kPairwise,   // each rank sends a row to each other rank
  kRing,       // one ring over all ranks, as NCCL has it
  kTwoLevels,  // zero/comm/exchange/two_level_exchange.h; with H or L = 1 the same as kPairwise
  kTwoLevelsLog2Steps,  // the bytes of kTwoLevels in log2(H) messages. No exchange of the library
                        // does that.
};

// An estimate for the reductions or the gathers of one step.
struct ExchangeCost {
  int64_t machine_bytes = 0;   // sent by a machine to others, without headers
  int64_t local_bytes = 0;     // sent by a rank within its machine
  int64_t link_messages = 0;   // that follow one another, between machines
  int64_t local_messages = 0;  // and within them
  double wire_seconds = 0;     // of bytes alone
  double latency_seconds = 0;
  double seconds() const { return wire_seconds + latency_seconds; }
};

struct Communication {
  int64_t buckets = 0;
  int64_t mean_bucket_bytes = 0;
  ExchangeCost reductions;
  ExchangeCost gathers;  // of parameters; in stage 1 of averaged gradients too, with a clip
  ExchangeCost total() const;
};

// Estimates by the model of Hockney, seconds = messages * latency + bytes / rate, in which messages
// of a rank follow one another (R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective
// communication operations in MPICH, 2005). For rows of b bytes and each bucket:
//
//                 bytes a machine sends   messages between machines   within a machine
//   kPairwise     L (W - L) b             W - L                       L - 1
//   kRing         (W - 1) b               H - 1                       W - H
//   kTwoLevels    L (H - 1) b             H - 1                       L - 1, or H (L - 1) if H <= 4
//   ...Log2Steps  L (H - 1) b             log2(H), rounded up         the same
//
// A sum between two levels has four bytes an element. Messages of a ring cross to another machine
// H - 1 times on their way, as in NCCL's own model (src/graph/tuning.cc, nInterSteps). Links and
// memory work at the same time in kPairwise and kRing; levels follow one another. Ranks with the
// same experts are spread over machines: neighbours have different experts. Throws c10::Error when
// machines do not fit.
Communication communication(const Plan& plan, int64_t stage, const Machines& machines,
                            ExchangeAlgorithm algorithm, bool update_in_backward = false);

// The size of buckets at which latency adds `share` to the time of bytes; 0 without bytes.
double bucket_bytes_for_latency(const Communication& communication, double share);

struct Compute {
  double forward_seconds = 0;
  double backward_seconds = 0;
};

// The time of forward and backward together, split 1 : 2: a backward pass has a product for the
// gradient of the inputs and one for that of the weights, a forward pass has one.
Compute split_compute(double seconds);

// The time of a step. A reduction starts when its bucket is complete, so that all but the last
// overlap the backward pass; gathers follow, and overlap the next forward pass only with
// overlap_gather. The update of the shards is not in it.
double step_seconds(const Communication& communication, const Compute& compute,
                    bool overlap_gather);

}  // namespace zero::examples
