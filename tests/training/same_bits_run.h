// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A training with ZeroOptions::micro_batches on any number of ranks, and the same in one process of
// plain torch, which adds up the gradients over the tree of that option's definition and shares
// nothing with the library but the formulas of tests/kernels/reference.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/training.h"
#include "tests/support/transports.h"
#include "zero/options.h"
#include "zero/zero_optimizer.h"

namespace zero {

struct SameBitsModel;

struct SameBitsCase {
  std::string name = {};
  int64_t micro_batches = 5;
  std::vector<int> world_sizes = {};  // besides 1
  Inner inner = Inner::kAdamW;        // kAdamW, kSgdMomentum, kLion, kMuon, kLamb or kAdafactor
  c10::ScalarType dtype = at::kFloat;
  std::optional<double> max_norm = std::nullopt;
  ZeroOptions options = {};
  bool drops = true;  // some micro-batches do not use all parameters
  int bad_step = -1;  // one micro-batch of this step has an infinity
  int steps = 4;
  int ranks_per_machine = 0;  // 0: all
  Wire wire = Wire::kMemory;
  bool looks = false;  // at gradients and the average of the parameters, in each step
  bool plain = false;  // compared with one process of plain torch, too
  // Makes another model than that of this file, with the same values on every call.
  std::function<std::unique_ptr<SameBitsModel>(const SameBitsCase& c)> make_model = {};
};
// So that a failure does not print bytes.
inline void PrintTo(const SameBitsCase& c, std::ostream* out) { *out << c.name; }

// Values in the order in which a run made them.
struct NamedValue {
  std::string name = {};
  at::Tensor value;
};
using Record = std::vector<NamedValue>;

// Empty where all bits are equal.
std::string first_difference(const Record& expected, const Record& got);

// Parameters with more than one block of 256 elements, with a block that is not whole, with one
// element, with none, in another memory order, and one that only runs without drops use.
std::vector<at::Tensor> same_bits_values(c10::ScalarType dtype);
inline constexpr size_t kUnusedValue = 7;

struct SameBitsModel : torch::nn::Module {
  SameBitsModel() = default;
  explicit SameBitsModel(const std::vector<at::Tensor>& initial);
  // Of a micro-batch of a step.
  virtual at::Tensor loss_of(const SameBitsCase& c, int step, int64_t number) const;
  // The gradient of parameter i is gradients[i], and for i in 1 to 3 besides a quarter of the
  // parameter, all of it times `scale`. Undefined: not used.
  at::Tensor loss(const std::vector<at::Tensor>& gradients, double scale = 1) const;

  std::vector<at::Tensor> values;
};

// What micro-batch `number` of a step has for parameters of these sizes.
std::vector<at::Tensor> same_bits_gradients(const SameBitsCase& c,
                                            const std::vector<at::Tensor>& values, int step,
                                            int64_t number);

// The scale of the loss of a micro-batch: with equal ones, fp32 sums of a few 16-bit gradients
// would be exact, and have no order.
inline double same_bits_scale(int64_t number) { return std::exp2(-9.0 * (number % 3)); }

// Two groups: matrices, and all others.
std::unique_ptr<torch::optim::Optimizer> same_bits_inner(Inner inner,
                                                         const std::vector<at::Tensor>& values);

// The sum over the tree: tree_sum(leaves, 0, n) with a power of 2 not below the number of leaves.
// An undefined tensor is an absent leaf, or a sum of absent leaves.
at::Tensor tree_sum(const std::vector<at::Tensor>& leaves, size_t begin, size_t count);
at::Tensor tree_sum(const std::vector<at::Tensor>& leaves);

// The sum of squares, rounded once, of blocks of 256 elements in memory order.
double exact_norm(const std::vector<at::Tensor>& gradients);

// A rank of a run.
class SameBitsRun {
 public:
  SameBitsRun(const Group& group, const SameBitsCase& c,
              std::optional<std::vector<at::Tensor>> initial = std::nullopt,
              const std::vector<bool>& frozen = {});
  void pass(int step, int64_t number);
  void passes(int step);
  // Clips, steps and records, after all passes.
  void finish(int step);
  void step(int number) {
    passes(number);
    finish(number);
  }
  void add(const std::string& name, const at::Tensor& value);

  const SameBitsCase c;
  const std::unique_ptr<SameBitsModel> owned_model;
  SameBitsModel& model = *owned_model;
  std::unique_ptr<ZeroOptimizer> optimizer;
  Record record;
};

// Steps of one process.
class SameBitsPlain {
 public:
  explicit SameBitsPlain(const SameBitsCase& c);
  void step(int number);

  Record record;

 private:
  void update(size_t p, const at::Tensor& gradient, const float* coefficient);

  const SameBitsCase c_;
  const std::unique_ptr<SameBitsModel> model_;
  std::vector<at::Tensor> masters_, first_, second_;
  std::vector<int64_t> counts_;
};

// The state of the inner optimizers of all ranks, joined, where it is fp32.
class JoinedState {
 public:
  void add(const SameBitsRun& run);
  Record record() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_ = make();
  static std::shared_ptr<Shared> make();
};

// The record of rank 0, with the state at the end.
Record run_same_bits(const SameBitsCase& c, int world_size);
Record run_plain(const SameBitsCase& c);

// The norm may differ from that of plain torch by the order of additions within a block.
void expect_plain_bits(Record expected, Record got);

}  // namespace zero
