// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A CallSequence in plain torch: what every call must return and leave behind, computed in one
// thread from every rank's gradients, their mean or sum in double and torch's own optimizer in
// double.
//
// Gradients are small integers times 1/4 that do not depend on the parameters, so that sums are
// exact in every dtype and order, and one rounding does not grow into a difference of its own.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/training.h"
#include "tests/training/call_sequence.h"

namespace zero {

// Of the model that `rank` starts with.
inline uint64_t model_seed(const CallSequence& sequence, int rank) {
  return sequence.seed + 1000 * static_cast<uint64_t>(rank);
}

// Integers in [-range, range] divided by `divisor`.
at::Tensor grid(at::IntArrayRef shape, uint64_t seed, int64_t range, double divisor);

// Layers beside each other, and parameters of one element, of none and in another memory order.
struct SequenceModelImpl : torch::nn::Module {
  SequenceModelImpl(const CallSequence& sequence, uint64_t seed, at::Device device = at::kCPU);

  // Parameters that require gradients, with their names and units.
  struct Managed {
    std::string name;
    at::Tensor tensor;
    int unit = 0;
    bool expert = false;  // each rank has its own
  };
  const std::vector<Managed>& managed() const { return managed_; }
  std::vector<at::Tensor> tensors() const;

  at::Tensor loss(const Pass& pass);
  // What PassKind::kByHand puts into p.grad(), by parameter.
  std::vector<at::Tensor> gradients_by_hand(const Pass& pass) const;
  // What a rank puts into its parameters before Action::kRefreshMasters; undefined where nothing.
  std::vector<at::Tensor> edited(const Event& event, int rank) const;
  // What Action::kResizeRows changes, by index in managed(), and what it puts there.
  static std::vector<size_t> resized(const Event& event);
  at::Tensor resized_value(const Event& event, size_t parameter) const;
  // Gives a layer other rows, of zeros.
  void set_rows(size_t layer, int64_t rows);

  std::vector<Affine> layers;
  at::Tensor gain, odd, empty, frozen, buffer;

 private:
  at::Tensor unit_loss(int unit, uint64_t seed, bool nonfinite);

  std::vector<Managed> managed_;
};
TORCH_MODULE(SequenceModel);

// Over `parameters`, in the order of managed(): matrices decay more than the rest.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(Inner inner,
                                                        const std::vector<at::Tensor>& parameters);

struct Expected {
  std::vector<at::Tensor> gradients;   // before the call: double, undefined where no rank has one
  std::optional<double> norm;          // of kNorm and kClip
  std::vector<at::Tensor> parameters;  // after the call: double
  std::vector<at::Tensor> averages;    // after the call: double; of ZeroOptions::ema
  at::Tensor frozen, buffer;
  bool skipped = false;  // of kStep
  double loss_scale = 1.0;
};

// For each event, on `rank`.
std::vector<Expected> run_plain(const CallSequence& sequence, int rank);

// Throws c10::Error unless `got`, of fp32 arithmetic over all steps of a sequence and rounded to
// its dtype, is `expected`. Where `expected` is not finite, `got` must not be finite either.
void expect_close(const at::Tensor& got, const at::Tensor& expected, const std::string& what,
                  double tolerance = 1e-5);

}  // namespace zero
