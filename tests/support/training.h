// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One small training run in two ways: sharded by ZeroOptimizer, and unsharded
// in plain torch, where the ranks' gradients are computed one after another in
// one process, averaged or added up in rank order and given to the plain optimizer. Tests
// compare the two after every step.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/options.h"
#include "zero/process_group.h"

namespace zero {

// torch::nn::Linear on any device: libtorch moves no module to a private-use backend.
struct AffineImpl : torch::nn::Module {
  AffineImpl(int64_t in, int64_t out, at::Device device);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;
};
TORCH_MODULE(Affine);

// Sizes that divide by nothing, a parameter of one element, one of none, a
// convolution-like channels_last weight, two branches of equal size and a layer
// that is never used.
struct OddModelImpl : torch::nn::Module {
  // Which branches a forward pass uses, as bits.
  // kLeftAgain is a second use of the left branch, in the same pass.
  enum Use : unsigned { kLeft = 1, kRight = 2, kScale = 4, kTrunk = 8, kAll = 15, kLeftAgain = 16 };

  explicit OddModelImpl(uint64_t seed, int64_t width = 23, at::Device device = at::kCPU);
  // The loss of a batch [n, 17] -> [n, 11]; without any use a constant.
  at::Tensor loss(const at::Tensor& x, const at::Tensor& target, unsigned use);

  Affine trunk{nullptr}, left{nullptr}, right{nullptr}, never{nullptr};
  at::Tensor scale, empty, last, frozen, counter;
};
TORCH_MODULE(OddModel);

// kOwn is a class of the user's own, which needs ZeroOptions().elementwise(true). kMuon is Muon for
// matrices and AdamW for everything else, combined; kMuonFp32 has ns_dtype kFloat.
enum class Inner {
  kSgd,
  kSgdMomentum,
  kAdamW,
  kAdam,
  kRmsprop,
  kAdagrad,
  kLion,
  kOwn,
  kMuon,
  kMuonFp32,
  kLamb,
  kAdafactor
};

struct Training {
  int world_size = 2;
  int steps = 4;
  int micro_batches = 1;
  bool no_sync = false;         // for all micro batches but the last
  bool plain_backward = false;  // loss.backward() instead of optimizer.backward()
  bool reads_loss = false;      // on the host, after each pass
  std::optional<double> max_norm;
  Inner inner = Inner::kAdamW;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t width = 23;
  ZeroOptions options;
  Transport transport = Transport::kMemory;
  bool shared_memory = false;
  // The reference averages in fp32 as the ranks do, so that W > 2 has equal bits too.
  bool reference_in_fp32 = false;
  // The reference adds up the ranks of each machine first; 0: all ranks are on one.
  int reference_ranks_per_machine = 0;
  // Which layers a rank uses in a micro batch; Use bits. 0: the loss is a constant.
  std::function<unsigned(int rank, int step, int micro)> use = [](int, int, int) {
    return static_cast<unsigned>(OddModelImpl::kAll);
  };
  // Whether the rank runs this backward pass at all.
  std::function<bool(int rank, int step, int micro)> runs = [](int, int, int) { return true; };
  // Where given, it decides for each pass by itself and the flag above does not.
  std::function<bool(int rank, int step, int micro)> under_no_sync;
};

// Parameter values, in the model's order, after each step.
using Trajectory = std::vector<std::vector<at::Tensor>>;

std::unique_ptr<torch::optim::Optimizer> make_inner(Inner inner, OddModelImpl& model);

// On the calling rank. Also checks that p.grad() reads as promised.
Trajectory train_sharded(const Training& training, const Group& group);
// The same, by plain torch in this thread.
Trajectory train_reference(const Training& training);

// The largest |a - b| over all steps and parameters, relative to 1 + |b|.
double largest_difference(const Trajectory& a, const Trajectory& b);
// How many elements differ in any bit.
int64_t differing_elements(const Trajectory& a, const Trajectory& b);

// Runs train_sharded on all ranks (threads); returns rank 0's, after
// checking that all ranks hold the same bits.
Trajectory train_on_ranks(const Training& training);
Trajectory train_on_ranks(const Training& training, const RunOptions& run);

}  // namespace zero
