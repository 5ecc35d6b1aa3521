// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptimizer over meshes: replicas, experts, stages and tensor-parallel parts
// against the same model in one piece in one process, compared after every step.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/lamb.h"
#include "zero/mesh.h"
#include "zero/skip_rule.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using Names = std::vector<std::string>;

constexpr int kSteps = 5;

// A parameter of the whole model.
struct MeshParameter {
  std::string name;
  std::vector<int64_t> shape = {};
  size_t group = 0;        // parameter group
  Names cut = {};          // mesh dimensions over which its rows are split
  Names sees = {};         // data dimensions whose batches all pass through every rank (experts)
  int stage = -1;          // pipeline stage, -1: all
  bool sometimes = false;  // only one batch uses it, in odd steps
};

struct JobShape {
  std::string name = {};
  std::vector<Mesh::Dimension> dimensions = {};
  Names data = {};            // dimensions over which batches differ
  Names home = {};            // of the optimizer's group
  int ranks_per_machine = 0;  // 0: all
  std::vector<MeshParameter> parameters = {};
  std::function<void(const Mesh&, ZeroOptions&)> place = {};

  int ranks() const {
    int product = 1;
    for (const auto& d : dimensions) product *= d.size;
    return product;
  }
  int batches() const {
    int product = 1;
    for (const auto& d : dimensions) product *= is_data(d.name) ? d.size : 1;
    return product;
  }
  bool is_data(const std::string& name) const {
    return std::find(data.begin(), data.end(), name) != data.end();
  }
};

// The loss of a batch is the sum over parameters of c * p + d * p^2 / 2, element by element: any
// part of a parameter can be trained by itself, and gradients depend on the parameter.
struct Coefficients {
  at::Tensor c, d;
};

Coefficients coefficients(const MeshParameter& p, int step, int batch) {
  const uint64_t seed = std::hash<std::string>()(p.name) % 1000 + 7919u * step + 104729u * batch;
  return {random_tensor(p.shape, seed), random_tensor(p.shape, seed + 1)};
}

bool uses(const MeshParameter& p, int step, int batch) {
  return !p.sometimes || (step % 2 == 1 && batch == 0);
}

at::Tensor part_of(const at::Tensor& whole, const MeshParameter& p, const Mesh& mesh) {
  const Group group = mesh.group(p.cut);
  return whole.tensor_split(group.world_size())[group.rank()];
}

// The batches that pass through this rank's part of `p`.
std::vector<int> batches_of(const JobShape& t, const MeshParameter& p, const Mesh& mesh) {
  std::vector<int> result{0};
  for (const Mesh::Dimension& d : t.dimensions) {
    if (!t.is_data(d.name)) continue;
    const bool all = std::find(p.sees.begin(), p.sees.end(), d.name) != p.sees.end();
    std::vector<int> next;
    for (const int batch : result) {
      for (int c = 0; c < d.size; ++c) {
        if (all || c == mesh.coordinate(d.name)) next.push_back(batch * d.size + c);
      }
    }
    result = std::move(next);
  }
  return result;
}

at::Tensor initial(const MeshParameter& p) {
  return random_tensor(p.shape, std::hash<std::string>()(p.name) % 997) * 0.5;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::vector<std::vector<at::Tensor>>& groups, bool adam) {
  std::vector<torch::optim::OptimizerParamGroup> list;
  for (size_t g = 0; g < groups.size(); ++g) {
    const double decay = 0.05 * static_cast<double>(g + 1);
    std::unique_ptr<torch::optim::OptimizerOptions> options;
    if (adam) {
      options = std::make_unique<torch::optim::AdamWOptions>(
          torch::optim::AdamWOptions(0.01).weight_decay(decay));
    } else {
      options = std::make_unique<torch::optim::SGDOptions>(
          torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(decay));
    }
    list.emplace_back(groups[g], std::move(options));
  }
  if (adam) return std::make_unique<torch::optim::AdamW>(list, torch::optim::AdamWOptions(0.01));
  return std::make_unique<torch::optim::SGD>(list, torch::optim::SGDOptions(0.1));
}

size_t group_count(const JobShape& t) {
  size_t count = 0;
  for (const MeshParameter& p : t.parameters) count = std::max(count, p.group + 1);
  return count;
}

// This rank's part of the model.
struct Local {
  torch::nn::Module module;
  std::vector<const MeshParameter*> parameters;
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<at::Tensor>> groups;

  Local(const JobShape& t, const Mesh& mesh, c10::ScalarType dtype) : groups(group_count(t)) {
    for (const MeshParameter& p : t.parameters) {
      if (p.stage >= 0 && p.stage != mesh.coordinate("pp")) continue;
      // The first rank of a domain and its replicas sends its values to the others.
      bool first = true;
      for (const std::string& d : t.data) {
        const bool cut = std::find(p.cut.begin(), p.cut.end(), d) != p.cut.end();
        first = first && (cut || mesh.coordinate(d) == 0);
      }
      const at::Tensor value = part_of(initial(p), p, mesh).clone() * (first ? 1.0 : 5.0);
      tensors.push_back(module.register_parameter(p.name, value.to(dtype)));
      parameters.push_back(&p);
      groups[p.group].push_back(tensors.back());
    }
  }

  at::Tensor loss(const JobShape& t, const Mesh& mesh, int step) const {
    at::Tensor sum = at::zeros({});
    for (size_t i = 0; i < tensors.size(); ++i) {
      const MeshParameter& p = *parameters[i];
      for (const int batch : batches_of(t, p, mesh)) {
        if (!uses(p, step, batch)) continue;
        const Coefficients k = coefficients(p, step, batch);
        const at::Tensor x = tensors[i].to(at::kFloat);
        sum = sum + (part_of(k.c, p, mesh) * x + part_of(k.d, p, mesh) * x * x * 0.5).sum();
      }
    }
    return sum;
  }
};

struct Reference {
  std::vector<double> norms;
  std::vector<std::map<std::string, at::Tensor>> values;  // after each step
};

Reference train_whole(const JobShape& t, bool adam, std::optional<double> max_norm) {
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<at::Tensor>> groups(group_count(t));
  for (const MeshParameter& p : t.parameters) {
    tensors.push_back(initial(p));
    groups[p.group].push_back(tensors.back());
  }
  const auto optimizer = make_optimizer(groups, adam);
  Reference reference;
  for (int step = 0; step < kSteps; ++step) {
    double square = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      at::Tensor gradient;
      for (int batch = 0; batch < t.batches(); ++batch) {
        if (!uses(t.parameters[i], step, batch)) continue;
        const Coefficients k = coefficients(t.parameters[i], step, batch);
        const at::Tensor g = (k.c + k.d * tensors[i]).to(at::kDouble) / t.batches();
        gradient = gradient.defined() ? gradient + g : g;
      }
      if (gradient.defined()) square += gradient.pow(2).sum().item<double>();
      tensors[i].mutable_grad() = gradient.defined() ? gradient.to(at::kFloat) : at::Tensor();
    }
    reference.norms.push_back(std::sqrt(square));
    if (max_norm) {
      const double factor = std::min(1.0, *max_norm / (std::sqrt(square) + 1e-6));
      for (at::Tensor& p : tensors) {
        if (p.grad().defined()) p.mutable_grad().mul_(factor);
      }
    }
    optimizer->step();
    reference.values.emplace_back();
    for (size_t i = 0; i < tensors.size(); ++i) {
      reference.values.back()[t.parameters[i].name] = tensors[i].clone();
    }
  }
  return reference;
}

struct Largest {
  double value = 0;
  double norm = 0;
  int64_t control_messages = 0;  // per step with clipping
  int64_t norm_messages = 0;
};

double error_of(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  return ((x - y).abs() / (1 + y.abs())).max().item<double>();
}

void raise(double& largest, double value) {
  if (!(value <= largest)) largest = value;  // a NaN must not pass
}

ZeroOptimizer make_placed(const JobShape& t, const Mesh& mesh, Local& local, bool adam = true,
                          ZeroOptions options = {}) {
  t.place(mesh, options);
  return ZeroOptimizer(local.module, make_optimizer(local.groups, adam), mesh.group(t.home),
                       options);
}

Largest train_in_parts(const JobShape& t, const Mesh& mesh, bool adam,
                       std::optional<double> max_norm, const ZeroOptions& options,
                       const Reference& reference) {
  Local local(t, mesh, at::kFloat);
  ZeroOptimizer optimizer = make_placed(t, mesh, local, adam, options);
  Largest largest;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.backward(local.loss(t, mesh, step));
    const Stats before = optimizer.stats();
    const double norm = optimizer.clip_grad_norm_(max_norm).item<double>();
    largest.norm_messages = optimizer.stats().data.small_calls - before.data.small_calls;
    raise(largest.norm, std::abs(norm - reference.norms[step]) / reference.norms[step]);
    optimizer.step();
    largest.control_messages = optimizer.stats().control.small_calls - before.control.small_calls;
    for (size_t i = 0; i < local.tensors.size(); ++i) {
      const MeshParameter& p = *local.parameters[i];
      const at::Tensor& whole = reference.values[step].at(p.name);
      raise(largest.value, error_of(local.tensors[i].detach(), part_of(whole, p, mesh)));
    }
  }
  optimizer.check_replicas();
  EXPECT_TRUE(at::equal(optimizer.master(local.tensors[0]), local.tensors[0].detach()));
  return largest;
}

GroupPlacement expert(const Mesh& mesh, const Names& reduce, int64_t batches) {
  return GroupPlacement().sharded_over(mesh.group(reduce)).averaged_over(batches);
}

GroupPlacement replicated(const Mesh& mesh, const Names& over) {
  return GroupPlacement().replicated_over(mesh.group(over));
}

std::vector<JobShape> topologies() {
  const std::vector<MeshParameter> dense{
      {.name = "a", .shape = {7, 5}},
      {.name = "b", .shape = {13}, .group = 1},
      {.name = "s", .shape = {3, 3}, .group = 1, .sometimes = true}};
  std::vector<MeshParameter> with_experts = dense;
  with_experts.push_back(
      {.name = "e", .shape = {6, 11}, .group = 2, .cut = {"ep"}, .sees = {"ep"}});
  with_experts.push_back(
      {.name = "f", .shape = {4, 3}, .group = 2, .cut = {"ep"}, .sees = {"ep"}, .sometimes = true});
  const auto replicate_both = [](const Mesh& mesh, ZeroOptions& options) {
    const GroupPlacement copies = replicated(mesh, {"rep"});
    options.mesh_group(mesh.all()).placement(0, copies).placement(1, copies);
  };
  return {
      {.name = "replicate 2 x shard 2",
       .dimensions = {{"rep", 2}, {"shard", 2}},
       .data = {"rep", "shard"},
       .home = {"shard"},
       .parameters = dense,
       .place = replicate_both},
      {.name = "replicate 3 x shard 2",
       .dimensions = {{"rep", 3}, {"shard", 2}},
       .data = {"rep", "shard"},
       .home = {"shard"},
       .parameters = dense,
       .place = replicate_both},
      {.name = "expert data 2 x expert 2",
       .dimensions = {{"edp", 2}, {"ep", 2}},
       .data = {"edp", "ep"},
       .home = {"edp", "ep"},
       .parameters = with_experts,
       .place = [](const Mesh& mesh,
                   ZeroOptions& options) { options.placement(2, expert(mesh, {"edp"}, 4)); }},
      {.name = "replicate 2 x expert data 2 x expert 2",
       .dimensions = {{"rep", 2}, {"edp", 2}, {"ep", 2}},
       .data = {"rep", "edp", "ep"},
       .home = {"edp", "ep"},
       .parameters = with_experts,
       .place =
           [=](const Mesh& mesh, ZeroOptions& options) {
             replicate_both(mesh, options);
             options.placement(2, expert(mesh, {"edp"}, 8).replicated_over(mesh.group({"rep"})));
           }},
      {.name = "pipeline 2 x data 2",
       .dimensions = {{"pp", 2}, {"dp", 2}},
       .data = {"dp"},
       .home = {"dp"},
       .parameters = {{.name = "a", .shape = {7, 5}, .stage = 0},
                      {.name = "b", .shape = {13}, .group = 1, .stage = 0},
                      {.name = "c", .shape = {2, 9}, .stage = 1},
                      {.name = "d", .shape = {5}, .group = 1, .stage = 1},
                      {.name = "e", .shape = {31}, .group = 1, .stage = 1, .sometimes = true}},
       .place = [](const Mesh& mesh, ZeroOptions& options) { options.mesh_group(mesh.all()); }},
      {.name = "data 2 x tensor 2",
       .dimensions = {{"dp", 2}, {"tp", 2}},
       .data = {"dp"},
       .home = {"dp"},
       .parameters = {{.name = "m", .shape = {7, 5}, .cut = {"tp"}},
                      {.name = "n", .shape = {13}, .group = 1},
                      {.name = "o", .shape = {6, 6}, .cut = {"tp"}, .sometimes = true}},
       .place =
           [](const Mesh& mesh, ZeroOptions& options) {
             options.mesh_group(mesh.all()).placement(1, GroupPlacement().copies(2));
           }},
      {.name = "pipeline 2 x data 2 x tensor 2, tied",
       .dimensions = {{"pp", 2}, {"dp", 2}, {"tp", 2}},
       .data = {"dp"},
       .home = {"dp"},
       .parameters = {{.name = "m", .shape = {7, 5}, .cut = {"tp"}, .stage = 0},
                      {.name = "n", .shape = {9, 4}, .cut = {"tp"}, .stage = 1},
                      {.name = "v", .shape = {13}, .group = 1},
                      {.name = "w", .shape = {3}, .group = 1}},
       .place =
           [](const Mesh& mesh, ZeroOptions& options) {
             // "v" and "w" are on both stages: the first one counts them.
             const bool first = mesh.coordinate("pp") == 0;
             options.mesh_group(mesh.all()).placement(1, GroupPlacement().copies(2).owner(first));
           }},
      // The middle copy is on two machines, and the others are on one each.
      {.name = "replicate 3 x shard 4, 6 ranks a machine",
       .dimensions = {{"rep", 3}, {"shard", 4}},
       .data = {"rep", "shard"},
       .home = {"shard"},
       .ranks_per_machine = 6,
       .parameters = {{.name = "a", .shape = {8}},
                      {.name = "b", .shape = {8}},
                      {.name = "c", .shape = {8}},
                      {.name = "d", .shape = {8}}},
       .place =
           [](const Mesh& mesh, ZeroOptions& options) {
             options.mesh_group(mesh.all()).placement(0, replicated(mesh, {"rep"}));
           }},
      // Ranks with one copy of "a" and "z" have different places in "m", of which one row is empty.
      {.name = "replicate 4, and shard 2 x replicate 2",
       .dimensions = {{"shard", 2}, {"rep", 2}},
       .data = {"shard", "rep"},
       .home = {"shard", "rep"},
       .parameters = {{.name = "a", .shape = {16, 4}},
                      {.name = "m", .shape = {4, 4}, .group = 1},
                      {.name = "z", .shape = {16, 4}}},
       .place =
           [](const Mesh& mesh, ZeroOptions& options) {
             options.placement(0, replicated(mesh, {"shard", "rep"}).sharded_over(mesh.group({})))
                 .placement(1, replicated(mesh, {"rep"}).sharded_over(mesh.group({"shard"})))
                 .layout(1, Layout::kWholeParameters);
           }},
      // Every tensor-parallel rank has "b", whose first copy alone counts in the norm.
      {.name = "data 2 x tensor 2, replicate and one owner",
       .dimensions = {{"dp", 2}, {"tp", 2}},
       .data = {"dp"},
       .home = {"dp"},
       .parameters = {{.name = "m", .shape = {8, 5}, .cut = {"tp"}},
                      {.name = "n", .shape = {13}, .group = 1},
                      {.name = "b", .shape = {4, 3}, .group = 2}},
       .place = [](const Mesh& mesh, ZeroOptions& options) {
         const bool first = mesh.coordinate("tp") == 0;
         options.mesh_group(mesh.all())
             .placement(1, replicated(mesh, {"tp"}))
             .placement(2, GroupPlacement().owner(first));
       }}};
}

JobShape topology(const std::string& name) {
  const std::vector<JobShape> all = topologies();
  return *std::ranges::find(all, name, &JobShape::name);
}

TEST(HybridOptimizerTest, EveryTopologyEqualsOneProcess) {
  std::printf("%-40s %-10s %-10s %-10s %s\n", "topology", "SGD", "AdamW", "norm",
              "messages per step: control, norm");
  const auto all = topologies();
  for (size_t i = 0; i < all.size(); ++i) {
    const JobShape& t = all[i];
    Largest sgd, adamw;
    for (const bool adam : {false, true}) {
      const Reference reference = train_whole(t, adam, 0.5);
      for (const Layout layout :
           {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
        // Optimizers and layouts in turns, so that each two of all are together somewhere.
        if ((i + adam + static_cast<size_t>(layout)) % 2 == 1) continue;
        const auto stage = 1 + static_cast<int64_t>(i / 2 + static_cast<size_t>(layout)) % 2;
        std::mutex mutex;
        const auto train = [&](const Group& world) {
          const Mesh mesh(world, t.dimensions);
          const auto options = ZeroOptions().stage(stage).layout(layout).bucket_bytes(100);
          const Largest mine = train_in_parts(t, mesh, adam, 0.5, options, reference);
          const std::lock_guard<std::mutex> lock(mutex);
          Largest& of_all = adam ? adamw : sgd;
          raise(of_all.value, mine.value);
          raise(of_all.norm, mine.norm);
          of_all.control_messages = std::max(of_all.control_messages, mine.control_messages);
          of_all.norm_messages = std::max(of_all.norm_messages, mine.norm_messages);
        };
        run_ranks(t.ranks(), train, {.ranks_per_machine = t.ranks_per_machine});
      }
    }
    std::printf("%-40s %-10.1e %-10.1e %-10.1e %lld, %lld\n", t.name.c_str(), sgd.value,
                adamw.value, std::max(sgd.norm, adamw.norm),
                static_cast<long long>(sgd.control_messages),
                static_cast<long long>(sgd.norm_messages));
    EXPECT_LE(sgd.value, 1e-6) << t.name;
    EXPECT_LE(adamw.value, 2e-5) << t.name;
    EXPECT_LE(std::max(sgd.norm, adamw.norm), 1e-6) << t.name;
    EXPECT_EQ(sgd.norm_messages, 1) << t.name;
  }
}

// Shards have no copies there, which are summed in collective calls alone.
TEST(HybridOptimizerTest, UpdatesInTheBackwardPassHaveTheBitsOfUpdatesInTheStep) {
  for (const char* name : {"expert data 2 x expert 2", "pipeline 2 x data 2", "data 2 x tensor 2",
                           "pipeline 2 x data 2 x tensor 2, tied"}) {
    const JobShape t = topology(name);
    for (const Layout layout :
         {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      run_ranks(t.ranks(),
                [&](const Group& world) {
                  const Mesh mesh(world, t.dimensions);
                  auto options =
                      ZeroOptions().layout(layout).bucket_bytes(100).skip_nonfinite(false);
                  Local early(t, mesh, at::kFloat), late(t, mesh, at::kFloat);
                  ZeroOptimizer in_step = make_placed(t, mesh, late, true, options);
                  options.update_in_backward(true);
                  ZeroOptimizer in_backward = make_placed(t, mesh, early, true, options);
                  for (int step = 0; step < kSteps; ++step) {
                    in_step.backward(late.loss(t, mesh, step));
                    in_backward.backward(early.loss(t, mesh, step));
                    in_step.step();
                    in_backward.step();
                    for (size_t p = 0; p < early.tensors.size(); ++p) {
                      EXPECT_TRUE(at::equal(early.tensors[p], late.tensors[p]))
                          << t.name << ", " << early.parameters[p]->name << ", step " << step;
                    }
                  }
                  in_backward.check_replicas();
                },
                {Transport::kMemory});
    }
  }
}

// Makes step `step` of three, of which the second changes nothing.
void expect_second_step_skipped(ZeroOptimizer& optimizer, const Local& local, int step,
                                const std::string& name) {
  std::vector<at::Tensor> before;
  for (const at::Tensor& p : local.tensors) before.push_back(p.detach().clone());
  optimizer.step();
  EXPECT_EQ(optimizer.step_skipped(), step == 1) << name;
  for (size_t i = 0; i < before.size(); ++i) {
    const bool unused = local.parameters[i]->sometimes && step != 1;
    EXPECT_EQ(at::equal(before[i], local.tensors[i].detach()), step == 1 || unused)
        << name << " " << local.parameters[i]->name << " step " << step;
  }
}

// `bad` multiplies the loss of one rank in step 1.
void expect_all_skip(const JobShape& t, c10::ScalarType dtype, double bad, int bad_rank) {
  std::mutex mutex;
  std::vector<double> scales(t.ranks());
  run_ranks(t.ranks(), [&](const Group& world) {
    const Mesh mesh(world, t.dimensions);
    Local local(t, mesh, dtype);
    ZeroOptimizer optimizer = make_placed(t, mesh, local);
    const double scale = optimizer.loss_scale();
    EXPECT_EQ(scale, dtype == at::kHalf ? 65536.0 : 1.0);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = local.loss(t, mesh, step) * (dtype == at::kHalf ? 1e-4 : 1.0);
      optimizer.backward(step == 1 && world.rank() == bad_rank ? loss * bad : loss);
      expect_second_step_skipped(optimizer, local, step, t.name);
    }
    EXPECT_EQ(optimizer.loss_scale(), dtype == at::kHalf ? scale / 2 : scale);
    EXPECT_EQ(optimizer.stats().skipped_steps, 1);
  });
}

TEST(HybridOptimizerTest, OneBadRankMakesTheWholeMeshSkip) {
  for (const JobShape& t : topologies()) {
    expect_all_skip(t, at::kHalf, 1e9, 0);
    expect_all_skip(t, at::kFloat, std::nan(""), t.ranks() - 1);
  }
}

// Says yes to the second norm, where it is told to.
class OneYes final : public SkipRule {
 public:
  explicit OneYes(bool yes) : yes_(yes) {}
  at::Tensor leaves_out(const at::Tensor&) override {
    return at::full({}, yes_ && ++calls_ == 2, at::kBool);
  }
  std::string state() const override { return {}; }
  void set_state(const std::string&) override {}

 private:
  const bool yes_;
  int calls_ = 0;
};

TEST(HybridOptimizerTest, ARuleOfOneRankMakesTheWholeMeshLeaveOutTheStep) {
  for (const JobShape& t : topologies()) {
    run_ranks(t.ranks(), [&](const Group& world) {
      const Mesh mesh(world, t.dimensions);
      Local local(t, mesh, at::kFloat);
      const bool says = world.rank() == t.ranks() - 1;
      ZeroOptimizer optimizer = make_placed(t, mesh, local, /*adam=*/true,
                                            ZeroOptions().skip_if(std::make_shared<OneYes>(says)));
      for (int step = 0; step < 3; ++step) {
        optimizer.backward(local.loss(t, mesh, step));
        expect_second_step_skipped(optimizer, local, step, t.name);
      }
    });
  }
}

// Stages scale alike even where only one has fp16 parameters.
TEST(HybridOptimizerTest, OneFp16StageScalesAllStages) {
  const JobShape t = topology("pipeline 2 x data 2");
  run_ranks(4, [&](const Group& world) {
    const Mesh mesh(world, t.dimensions);
    Local local(t, mesh, mesh.coordinate("pp") == 1 ? at::kHalf : at::kFloat);
    ZeroOptimizer optimizer = make_placed(t, mesh, local);
    EXPECT_EQ(optimizer.loss_scale(), 65536.0);
  });
}

TEST(HybridOptimizerTest, ADriftedExpertIsFoundByEveryRank) {
  const JobShape t = topology("expert data 2 x expert 2");
  run_ranks(4, [&](const Group& world) {
    const Mesh mesh(world, t.dimensions);
    Local local(t, mesh, at::kBFloat16);
    ZeroOptimizer optimizer = make_placed(t, mesh, local);
    optimizer.check_replicas();
    if (world.rank() == 3) local.tensors[3].detach()[0][0] += 1;
    const std::string text = zero::error_of([&] { optimizer.check_replicas(); });
    expect_words(text, {"rank " + std::to_string(world.rank()) + ": ", local.parameters[3]->name,
                        "expected the same values on every rank", "hold hash"});
    EXPECT_EQ(text.find("the optimizer was not made"), std::string::npos) << text;
    // Which is an edit in place as well, of one rank.
    expect_words(
        zero::error_of([&] { optimizer.save_checkpoint(::testing::TempDir() + "/hybrid"); }),
        {"rank 3: parameter " + local.parameters[3]->name, "edited in place"});
  });
}

// What `construct` throws on every rank; all must throw and none may hang.
void expect_refused(const JobShape& t, const std::string& part) {
  run_ranks(t.ranks(), [&](const Group& world) {
    const Mesh mesh(world, t.dimensions);
    Local local(t, mesh, at::kFloat);
    try {
      const ZeroOptimizer optimizer = make_placed(t, mesh, local);
      ADD_FAILURE() << "not refused on rank " << world.rank() << ": " << part;
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  });
}

TEST(HybridOptimizerTest, PlacementsThatCannotWorkAreRefusedOnEveryRank) {
  JobShape t = topology("expert data 2 x expert 2");
  t.place = [](const Mesh& mesh, ZeroOptions& o) { o.placement(3, expert(mesh, {"edp"}, 4)); };
  expect_refused(t, "one of the 3 groups");
  t.place = [](const Mesh& mesh, ZeroOptions& o) {
    // On one rank only: the others hear of it.
    if (mesh.all().rank() == 2) o.placement(2, GroupPlacement().copies(0));
  };
  expect_refused(t, "copies of 1 or more");
  t.place = [](const Mesh& mesh, ZeroOptions& o) {
    o.placement(2, expert(mesh, {"edp"}, 4).replicated_over(mesh.group({"edp", "ep"})));
  };
  expect_refused(t, "share only rank");
  t.place = [](const Mesh& mesh, ZeroOptions& o) {
    o.placement(2, expert(mesh, {"edp"}, mesh.all().rank() == 1 ? 2 : 4));
  };
  expect_refused(t, "averaged over");
  t.place = [](const Mesh& mesh, ZeroOptions& o) {
    o.placement(2, expert(mesh, {"edp"}, 4).owner(mesh.coordinate("edp") == 0));
  };
  expect_refused(t, "weight in the norm");
  t.place = [](const Mesh& mesh, ZeroOptions& o) {
    o.placement(1, GroupPlacement().copies(mesh.all().rank() == 3 ? 2 : 1));
  };
  expect_refused(t, "weight in the norm");
  t.home = {"edp"};
  t.place = [](const Mesh& mesh, ZeroOptions& o) {
    o.placement(0, GroupPlacement().replicated_over(mesh.group({"ep"})));
  };
  expect_refused(t, "mesh_group()");
  // All ranks share everything, in another order on rank 1: it would wait for a place that is
  // taken.
  t = {.dimensions = {{"s", 4}},
       .data = {"s"},
       .home = {"s"},
       .parameters = {{.name = "a", .shape = {7, 5}}}};
  t.place = [](const Mesh& mesh, ZeroOptions& o) {
    std::vector<int> order{0, 1, 2, 3};
    if (mesh.all().rank() == 1) std::swap(order[0], order[1]);
    o.placement(0, GroupPlacement().sharded_over(mesh.all().subgroup(order, "every")));
  };
  expect_refused(t, "in the order of ranks");
  // Copies of groups {0, 1} and {2, 3}: of all parameters, or of some.
  t = topology("replicate 2 x shard 2");
  for (const bool all : {true, false}) {
    t.place = [all](const Mesh& mesh, ZeroOptions& o) {
      const bool outer = mesh.all().rank() % 3 == 0;
      const auto ranks = outer ? std::vector<int>{0, 3} : std::vector<int>{1, 2};
      const auto copies = GroupPlacement().replicated_over(mesh.all().subgroup(ranks, "crossed"));
      o.mesh_group(mesh.all()).placement(0, copies);
      if (all) o.placement(1, copies);
    };
    expect_refused(t, "expected ranks that have one place in their sharded_over()");
  }
  // Copies of one place each, of groups {0, 1}, {2, 3}, {4, 5} and {6, 7}: the first row of {0, 1}
  // has one in {2, 3}, and the second in {4, 5}.
  t = {.dimensions = {{"g", 4}, {"s", 2}},
       .data = {"g", "s"},
       .home = {"s"},
       .parameters = {{.name = "a", .shape = {7, 5}}}};
  t.place = [](const Mesh& mesh, ZeroOptions& o) {
    for (const auto& ranks : std::vector<std::vector<int>>{{0, 2}, {4, 6}, {1, 5}, {3, 7}}) {
      if (std::ranges::count(ranks, mesh.all().rank()) == 0) continue;
      const Group copies = mesh.all().subgroup(ranks, "copies");
      o.mesh_group(mesh.all()).placement(0, GroupPlacement().replicated_over(copies));
    }
  };
  expect_refused(t, "to have copies in the same groups");
  // Ranks 2 and 3, which hold the copies, do not say so.
  t.place = [](const Mesh& mesh, ZeroOptions& o) {
    const int rank = mesh.all().rank();
    o.mesh_group(mesh.all());
    if (rank >= 2) return;
    const Group copies = mesh.all().subgroup({rank, rank + 2}, "copies");
    o.placement(0, GroupPlacement().replicated_over(copies));
  };
  expect_refused(t, "expected the same on all its ranks, got another or none");
  // The copies of rank 1's shards begin with rank 3, and those of rank 0's with rank 0.
  t = topology("replicate 2 x shard 2");
  t.place = [](const Mesh& mesh, ZeroOptions& o) {
    const bool first = mesh.coordinate("shard") == 0;
    const auto ranks = first ? std::vector<int>{0, 2} : std::vector<int>{3, 1};
    const auto copies = GroupPlacement().replicated_over(mesh.all().subgroup(ranks, "copies"));
    o.mesh_group(mesh.all()).placement(0, copies).placement(1, copies);
  };
  expect_refused(t, "to have one place among the copies");
}

// Rank 0's would be sent to all ranks of the optimizer's group, by their places in the list.
TEST(HybridOptimizerTest, FrozenTensorsThatDifferInTheOptimizersGroupAreRefusedOnEveryRank) {
  run_ranks(4, [](const Group& world) {
    const Mesh mesh(world, {{"edp", 2}, {"ep", 2}});
    const int e = mesh.coordinate("ep");
    const std::string name = "expert" + std::to_string(e);
    const Group same = mesh.group({"edp"});
    for (const bool buffer : {false, true}) {
      for (const bool dense : {true, false}) {  // else no parameter group is of the whole mesh
        torch::nn::Module module;
        const at::Tensor value = at::full({8, 8}, 1.0 + e);
        const at::Tensor base = buffer ? module.register_buffer(name + "_base", value)
                                       : module.register_parameter(name + "_base", value, false);
        std::vector<std::vector<at::Tensor>> groups{{module.register_parameter(name, at::ones(8))}};
        if (dense) groups.push_back({module.register_parameter("dense", at::ones(5))});
        const auto options = ZeroOptions().mesh_group(world).placement(0, expert(mesh, {"edp"}, 4));
        const auto make = [&](const Group& group) {
          return ZeroOptimizer(module, make_optimizer(groups, true), group,
                               ZeroOptions(options).placement(
                                   groups.size() - 1, dense ? GroupPlacement().sharded_over(world)
                                                            : options.placements().at(0)));
        };
        expect_words(zero::error_of([&] { make(world); }),
                     {"rank " + std::to_string(world.rank()) + ": ", "rank 0: ", "rank 1: ",
                      "expert0_base", "expert1_base", "give the constructor the group"});
        EXPECT_TRUE(base.eq(1.0 + e).all().item<bool>());
        ZeroOptimizer optimizer = make(same);
        EXPECT_TRUE(base.eq(1.0 + e).all().item<bool>());
        // What is registered later is compared in the calls that send it.
        module.register_buffer(name + "_late", at::full({2}, 1.0 + e));
        optimizer.broadcast_buffers();
      }
      // Nothing but what all ranks share is trained.
      torch::nn::Module module;
      const at::Tensor value = at::full({8, 8}, 1.0 + e);
      const at::Tensor base = buffer ? module.register_buffer(name, value)
                                     : module.register_parameter(name, value, false);
      ZeroOptimizer optimizer(
          module, make_optimizer({{module.register_parameter("dense", at::ones(5))}}, true), same,
          ZeroOptions().mesh_group(world).placement(0, GroupPlacement().sharded_over(world)));
      const std::string folder = ::testing::TempDir() + "/experts-" + std::to_string(buffer);
      optimizer.save_checkpoint(folder);
      base.detach().zero_();
      optimizer.load_checkpoint(folder);
      EXPECT_TRUE(base.eq(1.0 + e).all().item<bool>());
    }
  });
}

// Norms that replicas share, beside matrices of which each of these holds a part, frozen ones too.
TEST(HybridOptimizerTest, FrozenPartsStayThoseOfTheirRanksBesideNormsWithReplicas) {
  run_ranks(4, [](const Group& world) {
    const Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
    const int part = mesh.coordinate("tp");
    int64_t number = 0;
    for (const Names& trained : {Names{"norm", "lora"}, Names{"lora", "norm"}, Names{"norm"}}) {
      for (const int64_t rows : {2, 2 + part}) {  // parts of equal sizes, and of others
        torch::nn::Module module;
        const at::Tensor value = at::full({rows, 4}, 1.0 + part + 4 * mesh.coordinate("dp"));
        const std::vector<at::Tensor> parts{module.register_parameter("base", value.clone(), false),
                                            module.register_buffer("table", value.clone())};
        const auto expect_own = [&] {
          for (const at::Tensor& p : parts) EXPECT_TRUE(p.eq(1.0 + part).all().item<bool>());
        };
        std::vector<std::vector<at::Tensor>> groups;
        ZeroOptions options;
        options.mesh_group(world).tensor_parts(
            {mesh.group({"tp"}), [](const std::string& name) -> std::optional<int64_t> {
               return name == "norm" ? std::nullopt : std::optional<int64_t>(0);
             }});
        for (const std::string& name : trained) {
          if (name == "norm") {
            options.placement(
                groups.size(),
                GroupPlacement().replicated_over(mesh.group({"tp"})).averaged_over(2));
          }
          groups.push_back({module.register_parameter(name, at::ones({3, 4}))});
        }
        ZeroOptimizer optimizer(module, make_optimizer(groups, true), mesh.group({"dp"}), options);
        expect_own();  // dp rank 0's
        for (const at::Tensor& p : parts) p.detach().copy_(value);
        optimizer.refresh_master_parameters();
        optimizer.broadcast_buffers();
        expect_own();
        const std::string folder = ::testing::TempDir() + "/parts-" + std::to_string(number++);
        optimizer.save_checkpoint(folder);
        for (const at::Tensor& p : parts) p.detach().zero_();
        optimizer.load_checkpoint(folder);
        expect_own();
      }
    }
  });
}

// Else ranks would wait for copies that others do not send.
TEST(HybridOptimizerTest, TensorPartsThatDifferInTheOptimizersGroupAreRefusedOnEveryRank) {
  run_ranks(8,
            [](const Group& world) {
              const Mesh mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}});
              torch::nn::Module module;
              const std::vector<std::vector<at::Tensor>> groups{
                  {module.register_parameter("norm", at::ones(5))}};
              ZeroOptions options;
              options.mesh_group(world).placement(
                  0, GroupPlacement().replicated_over(mesh.group({"tp"})).averaged_over(2));
              if (mesh.coordinate("dp") == 0) {
                options.tensor_parts({mesh.group({"tp"}),
                                      [](const std::string&) { return std::optional<int64_t>(); }});
              }
              expect_words(zero::error_of([&] {
                             ZeroOptimizer(module, make_optimizer(groups, true), mesh.group({"dp"}),
                                           options);
                           }),
                           {"expected one group on all ranks of", "tensor_parts()"});
            },
            {.timeout = std::chrono::seconds(10)});
}

TEST(HybridOptimizerTest, OptimizersGroupsThatDifferAreRefusedOnEveryRank) {
  run_ranks(4,
            [](const Group& world) {
              const Mesh mesh(world, {{"a", 2}, {"b", 2}});
              for (const bool whole : {true, false}) {  // the mesh is uniform
                torch::nn::Module module;
                const std::vector<std::vector<at::Tensor>> groups{
                    {module.register_parameter("p", at::ones(5))}};
                const auto placed =
                    GroupPlacement().sharded_over(whole ? world : mesh.group({"a"}));
                const Group home = mesh.group(world.rank() == 3 ? Names{"b"} : Names{"a"});
                expect_words(
                    zero::error_of([&] {
                      ZeroOptimizer(module, make_optimizer(groups, true), home,
                                    ZeroOptions().mesh_group(world).placement(0, placed));
                    }),
                    {"rank " + std::to_string(world.rank()) + ": ", "expected one group on all"});
              }
            },
            {.timeout = std::chrono::seconds(10)});
}

// A stage before the last one gets gradients that are scaled already, and says so by a division.
TEST(HybridOptimizerTest, StagesThatSendScaledGradientsEqualOneProcess) {
  constexpr double kScale = 65536;  // of fp16 parameters
  const auto linear = [](uint64_t seed) {
    torch::nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
    const at::NoGradGuard no_grad;
    layer->weight.copy_(random_tensor({4, 4}, seed) * 0.5);
    return layer;
  };
  const at::Tensor x = random_tensor({6, 4}, 3);
  torch::nn::Linear first = linear(1), last = linear(2);
  // Small enough to be 0 in fp16 without the scale.
  const auto loss_of = [](const at::Tensor& y) { return (y * y).to(at::kFloat).sum() * 1e-9; };
  loss_of(last->forward(first->forward(x))).backward();
  run_ranks(2, [&](const Group& world) {
    const Mesh mesh(world, {{"pp", 2}});
    const int stage = world.rank();
    torch::nn::Linear own = linear(stage + 1);
    own->to(at::kHalf);
    ZeroOptimizer optimizer(
        *own, std::make_unique<torch::optim::SGD>(own->parameters(), torch::optim::SGDOptions(0.1)),
        mesh.group({}), ZeroOptions().mesh_group(world));
    const auto activations = world.make_communicator("activations", Purpose::kData);
    at::Tensor sent = at::empty({6, 4}, at::kHalf);
    if (stage == 0) {
      const at::Tensor out = own->forward(x.to(at::kHalf));
      activations->broadcast(out.detach(), 0, "output").wait();
      activations->broadcast(sent, 1, "gradient").wait();
      EXPECT_EQ(optimizer.loss_scale(), kScale);
      optimizer.backward({out}, {sent.to(at::kFloat) / optimizer.loss_scale()});
    } else {
      activations->broadcast(sent, 0, "output").wait();
      const at::Tensor received = sent.detach().requires_grad_();
      optimizer.backward(loss_of(own->forward(received)));
      activations->broadcast(received.grad(), 1, "gradient").wait();
    }
    const at::Tensor expected = (stage == 0 ? first : last)->weight.grad();
    const at::Tensor got = optimizer.gradient(own->weight);
    EXPECT_LE(error_of(got / expected.abs().max(), expected / expected.abs().max()), 5e-3);
  });
}

TEST(HybridOptimizerTest, ASharedParameterOfTwoStagesHasTheSumOfTheirGradients) {
  run_ranks(2, [](const Group& world) {
    const Mesh mesh(world, {{"pp", 2}});
    const int stage = world.rank();
    torch::nn::Module module;
    if (stage == 0) module.register_parameter("first", at::ones({3}));  // another number of it
    const at::Tensor shared = module.register_parameter("shared", at::ones({2, 4}));
    ZeroOptimizer optimizer(
        module, make_optimizer({module.parameters()}, false), mesh.group({}),
        ZeroOptions().mesh_group(world).placement(0, GroupPlacement().owner(stage == 0)));
    const auto stages = world.make_communicator("stages", Purpose::kData);
    const auto gradient_of = [](int s) { return random_tensor({2, 4}, 7 + s); };
    {
      const auto guard = optimizer.no_sync();
      for (int pass = 0; pass < 2; ++pass) {
        optimizer.backward((shared * gradient_of(stage)).sum() * 0.5);
      }
    }
    at::Tensor rows = at::empty({2, shared.numel()});
    rows[stage].copy_(shared.grad().view({-1}));
    stages->gather_rows(rows, "gradients").wait();
    shared.mutable_grad().copy_(rows.sum(0).view_as(shared));
    const at::Tensor sum = gradient_of(0) + gradient_of(1);
    EXPECT_NEAR(optimizer.grad_norm().item<double>(), sum.norm().item<double>(), 1e-6);
    optimizer.step();
    const at::Tensor expected = 1.0 - 0.1 * (sum + 0.05);  // of SGD with this decay
    EXPECT_LE(error_of(shared.detach(), expected), 1e-6);
  });
}

// As documented: the whole matrix has the norm 5, and its parts 3 and 4.
TEST(HybridOptimizerTest, LambTakesTheTrustRatioOfEachTensorParallelPart) {
  run_ranks(2, [](const Group& world) {
    const Mesh mesh(world, {{"tp", 2}});
    const float norm = world.rank() == 0 ? 3 : 4;
    torch::nn::Module module;
    const at::Tensor part =
        module.register_parameter("part", at::tensor({norm, 0.0F}).view({1, 2}));
    ZeroOptimizer optimizer(module, std::make_unique<Lamb>(module.parameters(), LambOptions(0.1)),
                            mesh.group({}), ZeroOptions().mesh_group(world));
    optimizer.backward(part.sum());  // the update is 1 for each element, of norm sqrt(2)
    optimizer.step();
    const double moved = 0.1 * norm / std::sqrt(2.0);
    EXPECT_NEAR(part[0][0].item<double>(), norm - moved, 1e-5);
    EXPECT_NEAR(part[0][1].item<double>(), -moved, 1e-5);
  });
}

// One expert more on half of the ranks: dense buckets would travel in different orders.
TEST(HybridOptimizerTest, UnequalExpertsAreRefusedOnEveryRank) {
  run_ranks(4, [&](const Group& world) {
    const Mesh mesh(world, {{"edp", 2}, {"ep", 2}});
    torch::nn::Module module;
    std::vector<std::vector<at::Tensor>> groups(2);
    groups[0].push_back(module.register_parameter("dense", at::ones({5})));
    for (int e = 0; e <= mesh.coordinate("ep"); ++e) {
      groups[1].push_back(module.register_parameter("expert" + std::to_string(e), at::ones({3})));
    }
    const std::string text = zero::error_of([&] {
      ZeroOptimizer(module, make_optimizer(groups, true), world,
                    ZeroOptions().placement(1, expert(mesh, {"edp"}, 4)));
    });
    expect_words(text, {"rank " + std::to_string(world.rank()) + ": ",
                        "expected the same model, options and optimizer on every rank",
                        "rank 0: ", "rank 1: "});
  });
}

// Its dense group is the other one's second: both would wait in the first.
TEST(HybridOptimizerTest, ParameterGroupsInAnotherOrderAreRefusedOnEveryRank) {
  run_ranks(4,
            [](const Group& world) {
              const Mesh mesh(world, {{"edp", 2}, {"ep", 2}});
              const int64_t experts = world.rank() == 1 ? 0 : 1;
              torch::nn::Module module;
              std::vector<std::vector<at::Tensor>> groups(2);
              groups[1 - experts].push_back(module.register_parameter("dense", at::ones({5})));
              groups[experts].push_back(module.register_parameter("expert", at::ones({3})));
              const std::string text = zero::error_of([&] {
                ZeroOptimizer(module, make_optimizer(groups, true), world,
                              ZeroOptions().placement(experts, expert(mesh, {"edp"}, 4)));
              });
              expect_words(text, {"rank " + std::to_string(world.rank()) + ": ",
                                  "placement of parameter group 0: shared by"});
            },
            {.timeout = std::chrono::seconds(10)});
}

}  // namespace
}  // namespace zero
