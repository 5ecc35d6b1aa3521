// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One rank with backward passes and all that they use, and losses whose gradients are given.
#pragma once

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/flat_model.h"
#include "tests/support/random_tensors.h"
#include "tests/support/reducer_options.h"
#include "tests/support/run_ranks.h"
#include "zero/agreement/shard_domains.h"
#include "zero/training/backward.h"

namespace zero {

using Tensors = std::vector<at::Tensor>;

inline Tensors zeros() {
  return {at::zeros({3, 5}), at::zeros({7}), at::zeros({33}), at::zeros({4, 2})};
}

// Multiples of 1/8 of at most 8, so that all sums are exact.
inline at::Tensor exact(at::IntArrayRef shape, uint64_t seed) {
  return random_tensor(shape, seed).mul_(64).round_().div_(8);
}

inline ZeroOptions with_scale(double scale) {
  return scale == 1 ? ZeroOptions()
                    : ZeroOptions().loss_scaler(LossScalerOptions().initial_scale(scale));
}

// One rank with all that a pass uses.
struct Rank {
  Rank(const Group& group, double scale)
      : options(with_scale(scale)),
        domains(make_domains(group, options, 1)),
        flat(zeros(), group.world_size(), {Layout::kContiguous, 256}),
        domain_of(flat.model.values.size(), 0),
        arena(flat.plan, flat.table, flat.pool),
        comms(connected(group, domains)),
        protocol(domains, domain_of, *comms, at::kCPU),
        reducer(flat.plan, flat.table, comms->domains, flat.pool, reducer_options(flat.plan)),
        shards({flat.plan, flat.table, {group.rank()}, arena, reducer, flat.pool},
               std::make_unique<torch::optim::SGD>(flat.model.values, torch::optim::SGDOptions(1)),
               {}),
        clipping(shards.segments(), domains.norm_weights, at::kCPU, *comms->norm),
        gathers(flat.plan, flat.table, arena, *comms, options),
        record(options, false, false, at::kCPU, group.rank(), reducer) {
    make_passes();
  }
  static std::unique_ptr<OptimizerCommunicators> connected(const Group& group,
                                                           const ShardDomains& domains) {
    auto comms = std::make_unique<OptimizerCommunicators>(group);
    comms->connect(domains);
    return comms;
  }
  void make_passes() {
    passes = std::make_unique<BackwardPasses>(
        BackwardPasses::Parts{flat.table, reducer, shards, protocol, clipping, record, gathers});
  }

  int rank() const { return comms->rank(); }
  int world_size() const { return domains.mesh.world_size(); }
  const at::Tensor& value(int64_t p) const { return flat.model.values[p]; }
  const at::Tensor& grad(int64_t p) const { return value(p).grad(); }
  at::Tensor gradient(int64_t p, int pass, int rank) const {
    return exact(value(p).sizes(), 100 * rank + 10 * pass + p);
  }
  at::Tensor gradient(int64_t p, int pass) const { return gradient(p, pass, rank()); }
  at::Tensor loss(int pass) const {
    Tensors gradients;
    for (size_t p = 0; p < domain_of.size(); ++p) gradients.push_back(gradient(p, pass));
    return flat.model.loss(gradients);
  }
  // The loss of one parameter.
  at::Tensor loss_of(int64_t p, int pass) const {
    Tensors gradients(domain_of.size());
    gradients[p] = gradient(p, pass);
    return flat.model.loss(gradients);
  }
  std::string error_of_run(const at::Tensor& loss) {
    return error_of([&] { passes->run(loss); });
  }
  // That this rank has nothing to send.
  void expect_nothing() const {
    EXPECT_FALSE(reducer.any_used());
    EXPECT_EQ(reducer.rounds_needed(), 0);
    for (size_t p = 0; p < domain_of.size(); ++p) EXPECT_FALSE(grad(p).defined()) << p;
  }
  // A call as ZeroOptimizer makes it, with zeros for what zero_grad() drops.
  std::string call(Call call) {
    return error_of([&] {
      const Agreement agreement =
          protocol.exchange(call, protocol.take_problem(call), {},
                            {reducer.rounds_needed(), passes->any(), reducer.used()});
      if (call == Call::kZeroGrad) reducer.discard();
      reducer.complete(agreement.rounds);
    });
  }
  void zero_grad() {
    EXPECT_EQ(call(Call::kZeroGrad), "");
    reducer.consume();
    protocol.repaired();
  }
  // That the shards are the mean over ranks of the sum of these passes. Nothing is left.
  void expect_mean(const std::vector<int>& of_passes) {
    EXPECT_EQ(call(Call::kReduceGradients), "");
    for (int64_t b = 0; b < flat.buckets(); ++b) {
      for (const Segment& s : flat.plan.segments(b, rank())) {
        at::Tensor sum = at::zeros_like(value(s.parameter)).detach();
        for (int rank = 0; rank < world_size(); ++rank) {
          for (const int pass : of_passes) sum += gradient(s.parameter, pass, rank);
        }
        const at::Tensor got = reducer.shard(b).narrow(0, s.offset, s.numel);
        EXPECT_TRUE(at::allclose(got, part_of(sum / world_size(), s), 1e-6, 1e-6))
            << "parameter " << s.parameter << " on rank " << rank() << " of " << world_size();
      }
    }
    reducer.consume();
    expect_nothing();
  }

  const ZeroOptions options;
  const ShardDomains domains;
  FlatModel flat;
  const std::vector<int64_t> domain_of;
  WorkingArena arena;
  const std::unique_ptr<OptimizerCommunicators> comms;
  CallProtocol protocol;
  GradientReducer reducer;
  ShardOptimizer shards;
  Clipping clipping;
  ParameterGathers gathers;
  StepRecord record;
  std::unique_ptr<BackwardPasses> passes;
};

inline void on_ranks(int world_size, const std::function<void(Rank&)>& body, double scale = 1) {
  run_ranks(world_size,
            [&](const Group& group) {
              Rank rank(group, scale);
              body(rank);
            },
            {.timeout = std::chrono::seconds(60)});
}

}  // namespace zero
