// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A random program of a ZeroOptimizer's calls, decided by one seed: the group, the options, what
// every rank's backward passes do between two collective calls, and which call comes next.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/training.h"
#include "tests/support/transports.h"
#include "zero/options.h"

namespace zero {

enum class PassKind {
  kOwn,          // optimizer.backward(loss)
  kPlain,        // scale_loss(loss).backward()
  kNoSync,       // kOwn under no_sync
  kPlainNoSync,  // kPlain under no_sync
  kWithGrad,     // torch::autograd::grad() of the loss, then kOwn
  kOnlyGrad,     // torch::autograd::grad() alone, which sends nothing
  kNoGraph,      // kOwn of a constant
  kByHand,       // p.grad() is set without a backward pass
};

// A pass uses units of the model: unit i is layer i, and the last one is all other parameters.
struct Pass {
  PassKind kind = PassKind::kOwn;
  unsigned units = 0;  // bits
  int again = -1;      // this unit is used twice
  int nonfinite = -1;  // the gradient of this unit has a NaN or an infinity
  uint64_t seed = 0;   // of the batch
};

// The calls from kDifferentNorms on are misuse, which all ranks must refuse and survive.
enum class Action {
  kNothing,
  kReduce,
  kNorm,
  kClip,
  kClipValue,
  kStep,
  kZeroGrad,
  kModuleZeroGrad,  // zero_grad() of the module, on all ranks
  kGradient,
  kMaster,
  kAllMasters,
  kCheckReplicas,
  kRefreshWorking,
  kRefreshMasters,
  kBroadcastBuffers,
  kCheckpoint,
  kCheckpointAsync,
  kResizeRows,  // of one layer
  kDifferentNorms,
  kDifferentClips,
  kDifferentParameters,
  kDifferentRates,
  kDifferentCalls,
  kInvalidNorm,
  kInsideNoSync,
  kBrokenBackward,     // and zero_grad() on all ranks
  kBackwardAfterClip,  // on one rank
  kUnevenZeroGrad,     // on ranks of which only some have gradients
  kSaveWithGradients,
};

inline bool is_misuse(Action action) { return action >= Action::kDifferentNorms; }

struct Event {
  std::vector<std::vector<Pass>> passes;  // by rank, before the call
  Action action = Action::kNothing;
  double norm_type = 2.0;
  std::optional<double> max_norm;  // of kClip; of kClipValue the largest element
  std::optional<double> rate;      // of kStep: the learning rate from now on
  int64_t parameter = 0;           // of kGradient and kMaster
  int odd = 0;                     // the rank that does something else
  int late = -1;                   // this rank comes to the call later than the others
  unsigned units = 0;              // of kRefreshMasters: what is edited
  int64_t layer = 0;               // of kResizeRows
  std::vector<int64_t> rows;       // of kResizeRows: for each new row that of before, or -1
  bool has_values = false;         // of kResizeRows: rows have new values
  unsigned look = ~0U;             // the units whose parameters are read after the call
  ZeroOptions options;             // of kCheckpoint: those of the optimizer that loads it
  bool average = false;            // the average is looked at after the call
  uint64_t seed = 0;
};

// Where parameters live. Vectors are parameter group 1.
enum class MeshKind {
  kFlat,      // shards over all ranks
  kReplicas,  // matrices, and with an even seed vectors, have shards over two ranks or one
  kExperts,   // each rank has vectors of its own
};

struct CallSequence {
  uint64_t seed = 0;
  int world_size = 2;
  int ranks_per_machine = 0;  // 0: all
  MeshKind mesh_kind = MeshKind::kFlat;
  Wire wire = Wire::kMemory;
  c10::ScalarType dtype = c10::ScalarType::Float;
  Inner inner = Inner::kSgd;
  Reduction reduction = Reduction::kMean;  // of all its optimizers
  std::optional<double> largest_norm;      // of a step that their rule does not leave out
  std::optional<EmaOptions> ema;           // of all its optimizers
  // Its optimizers have ZeroOptions::moments, and the first layer has enough elements for them.
  bool has_moments = false;
  ZeroOptions options;
  std::vector<std::pair<int64_t, int64_t>> layers;  // inputs, outputs
  std::vector<Event> events;

  unsigned all_units() const { return (2U << layers.size()) - 1; }
};

// Whether the next call has to reduce something on the rank that ran this pass.
bool needs_round(const Pass& pass);

CallSequence draw_sequence(uint64_t seed);
// A line for the options and one for each event.
std::string describe(const CallSequence& sequence);
const char* name_of(Action action);

}  // namespace zero
