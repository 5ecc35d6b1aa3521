// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Saves and loads of meshes that cannot succeed: every rank throws, and nothing has changed.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/adafactor.h"
#include "zero/checkpoint.h"
#include "zero/mesh.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

// Each rank is a pipeline stage of its own.
struct Stage {
  std::map<std::string, std::vector<int64_t>> parameters;  // shapes by name
  std::map<std::string, double> frozen = {};               // values by name
  int64_t copies = 1;
  double lr = 0.1;
  std::optional<int64_t> cut = std::nullopt;  // each rank is a part along this dimension
  bool transposed = false;                    // the first dimension is the fastest in memory
};

class StageRun {
 public:
  StageRun(const Stage& stage, const Group& world, double value) {
    const Mesh mesh(world, {{"pp", world.world_size()}});
    std::vector<at::Tensor> tensors;
    for (const auto& [name, shape] : stage.parameters) {
      at::Tensor tensor = at::full(shape, value);
      if (stage.transposed) tensor = at::full({shape.at(1), shape.at(0)}, value).t();
      tensors.push_back(module.register_parameter(name, tensor));
    }
    for (const auto& [name, content] : stage.frozen) {
      module.register_parameter(name, at::full({3}, content), /*requires_grad=*/false);
    }
    optimizer = std::make_unique<ZeroOptimizer>(
        module, std::make_unique<torch::optim::SGD>(tensors, torch::optim::SGDOptions(stage.lr)),
        mesh.group({}),
        ZeroOptions()
            .mesh_group(world)
            .placement(0, GroupPlacement().copies(stage.copies))
            .tensor_parts({world, [cut = stage.cut](const std::string&) { return cut; }}));
  }
  bool is(double value) const {
    for (const auto& p : module.parameters()) {
      if (p.requires_grad() && !at::equal(p, at::full_like(p, value))) return false;
    }
    return true;
  }

  torch::nn::Module module;
  std::unique_ptr<ZeroOptimizer> optimizer;
};

void on_stages(const std::vector<Stage>& stages, double value,
               const std::function<void(StageRun&)>& body) {
  run_ranks(static_cast<int>(stages.size()), [&](const Group& world) {
    StageRun run(stages[world.rank()], world, value);
    body(run);
  });
}

void expect_save_refused(const std::vector<Stage>& stages, const std::vector<std::string>& words) {
  const std::string parent = fresh_folder("refused");
  on_stages(stages, 1, [&](StageRun& run) {
    expect_words(error_of([&] { run.optimizer->save_checkpoint(parent + "/a"); }), words);
    expect_words(error_of([&] { run.optimizer->load_checkpoint(parent + "/a"); }), words);
    EXPECT_TRUE(run.is(1));
  });
  EXPECT_TRUE(fs::is_empty(parent));
}

TEST(MeshErrorsTest, OneNameForDifferentTensorsIsRefusedOnAllRanks) {
  const Stage stage{{{"w", {2, 3}}}};
  expect_save_refused({stage, stage}, {"parameter w", "counts it 2 times", "a name of its own"});
  expect_save_refused({stage, {{{"w", {5, 3}}}, {}, 2}},
                      {"parameter w", "[2, 3] on rank 0 and [5, 3] on rank 1"});
}

TEST(MeshErrorsTest, FrozenParametersOfOneNameAreEqualWhenTheyAreSavedAndAfterALoad) {
  const auto stages = [](double first, double second) -> std::vector<Stage> {
    return {{{{"a", {1}}}, {{"f", first}}}, {{{"b", {1}}}, {{"f", second}}}};
  };
  const std::string folder = fresh_folder("frozen") + "/a";
  on_stages(stages(1, 1), 1, [&](StageRun& run) { run.optimizer->save_checkpoint(folder); });
  on_stages(stages(2, 3), 2, [&](StageRun& run) {
    expect_words(error_of([&] { run.optimizer->save_checkpoint(folder + "-later"); }),
                 {"frozen parameter f", "others on rank 1 than on rank 0"});
    run.optimizer->load_checkpoint(folder);
    EXPECT_TRUE(run.is(1));
    EXPECT_TRUE(run.module.named_parameters()["f"].eq(1).all().item<bool>());
  });
  EXPECT_FALSE(fs::exists(folder + "-later"));
}

TEST(MeshErrorsTest, NamesThatAreMissingOrLeftOverAreListedOnAllRanks) {
  const std::string folder = fresh_folder("names") + "/a";
  on_stages({{{{"a", {3}}}}, {{{"b", {4}}}}}, 1,
            [&](StageRun& run) { run.optimizer->save_checkpoint(folder); });
  const auto expect_refused = [&](const std::vector<Stage>& stages,
                                  const std::vector<std::string>& words) {
    on_stages(stages, 2, [&](StageRun& run) {
      expect_words(error_of([&] { run.optimizer->load_checkpoint(folder); }), words);
      EXPECT_TRUE(run.is(2));
    });
  };
  expect_refused(
      {{{{"a", {3}}, {"b", {4}}}}, {{{"c", {5}}}}},
      {"rank 1", "parameter c: in the model, missing in the checkpoint", "strict(false)"});
  expect_refused({{{{"a", {3}}}}}, {"parameter b: in the checkpoint, missing in the model"});
  // A name that none of several ranks holds is a difference for all of them.
  expect_refused({{{{"a", {3}}}}, {{{"c", {5}}}}},
                 {"rank 0", "parameter b: in the checkpoint, missing in the model"});
  expect_refused({{{{"b", {5}}}}, {{{"a", {3}}}}},
                 {"parameter b: shape [4] in the checkpoint, [5] in the model"});
  on_stages({{{{"a", {3}}, {"b", {4}}}}, {{{"c", {5}}}}}, 2, [&](StageRun& run) {
    const bool loads_all = run.module.parameters().size() == 2;
    const LoadReport report = run.optimizer->load_checkpoint(folder, LoadOptions().strict(false));
    EXPECT_TRUE(run.is(loads_all ? 1 : 2));
    EXPECT_EQ(report.differences.size(), loads_all ? 0u : 2u);
    run.optimizer->save_checkpoint(folder + "-later");
  });
  // One rank did not get all that it holds: this is another run.
  EXPECT_NE(describe_checkpoint(folder + "-later").run, describe_checkpoint(folder).run);
}

Stage part(std::vector<int64_t> shape, int64_t dimension) {
  return {{{"w", std::move(shape)}}, {}, 1, 0.1, dimension};
}

TEST(MeshErrorsTest, WholesOfOtherShapesAreADifference) {
  expect_save_refused({part({2, 3}, 1), part({4, 3}, 1)}, {"parameter w", "tensor_parts()"});
  expect_save_refused({part({2, 3}, 2), part({2, 3}, 2)},
                      {"tensor w", "expected one of its 2 dimensions, got 2"});
  const std::string folder = fresh_folder("wholes") + "/a";
  on_stages({part({2, 3}, 1), part({2, 2}, 1)}, 1,
            [&](StageRun& run) { run.optimizer->save_checkpoint(folder); });
  const auto expect_refused = [&](const std::vector<Stage>& stages) {
    on_stages(stages, 2, [&](StageRun& run) {
      expect_words(error_of([&] { run.optimizer->load_checkpoint(folder); }),
                   {"parameter w: shape [2, 5] in the checkpoint, [2, 6] in the model"});
      EXPECT_TRUE(run.is(2));
    });
  };
  expect_refused({part({2, 3}, 1), part({2, 3}, 1)});
  expect_refused({{{{"w", {2, 6}}}}});
  for (const auto& stages : {std::vector<Stage>{part({2, 2}, 1), part({2, 3}, 1)},
                             std::vector<Stage>{part({1, 5}, 0), part({1, 5}, 0)},
                             std::vector<Stage>{{{{"w", {2, 5}}}}}}) {
    on_stages(stages, 2, [&](StageRun& run) {
      run.optimizer->load_checkpoint(folder);
      EXPECT_TRUE(run.is(1));
    });
  }
}

// A part without elements has a memory order, which is that of the others.
TEST(MeshErrorsTest, AnotherMemoryOrderIsADifferenceWhereAPartIsEmpty) {
  const std::string folder = fresh_folder("transposed") + "/a";
  std::vector<Stage> stages = {part({8, 0}, 1), part({8, 8}, 1)};
  for (Stage& stage : stages) stage.transposed = true;
  on_stages(stages, 1, [&](StageRun& run) { run.optimizer->save_checkpoint(folder); });
  on_stages({{{{"w", {8, 8}}}}}, 2, [&](StageRun& run) {
    expect_words(error_of([&] { run.optimizer->load_checkpoint(folder); }),
                 {"parameter w: memory order (strides)"});
    EXPECT_TRUE(run.is(2));
  });
}

// Rows and columns of Adafactor's second moment belong to the part that they were made for.
TEST(MeshErrorsTest, StateThatIsNeverCutLoadsWithTheSameParts) {
  const std::string folder = fresh_folder("uncut") + "/a";
  const auto on_parts = [&](int parts, const std::function<void(ZeroOptimizer&)>& body) {
    run_ranks(parts, [&](const Group& world) {
      const Mesh mesh(world, {{"tp", parts}});
      torch::nn::Module module;
      const at::Tensor w = module.register_parameter("w", at::ones({8 / parts, 6}));
      ZeroOptimizer optimizer(
          module, std::make_unique<Adafactor>(std::vector<at::Tensor>{w}), mesh.group({}),
          ZeroOptions().mesh_group(world).tensor_parts(
              {world, [](const std::string&) { return std::optional<int64_t>(0); }}));
      optimizer.backward((w * w).sum());
      optimizer.step();
      body(optimizer);
    });
  };
  on_parts(2, [&](ZeroOptimizer& optimizer) { optimizer.save_checkpoint(folder); });
  on_parts(2, [&](ZeroOptimizer& optimizer) { optimizer.load_checkpoint(folder); });
  on_parts(1, [&](ZeroOptimizer& optimizer) {
    expect_words(error_of([&] { optimizer.load_checkpoint(folder); }),
                 {"parameter w", "col_var", "got another cut", "tensor parallelism of the save"});
  });
}

// It has a master and no state, as a whole parameter that no step has used.
TEST(MeshErrorsTest, APartThatWasNeverUsedLoadsWithTheSameParts) {
  const std::string parent = fresh_folder("unused");
  for (const bool adam : {false, true}) {
    const std::string folder = parent + (adam ? "/adam" : "/sgd");
    const auto on_parts = [&](int parts, const std::function<void(ZeroOptimizer&)>& body) {
      run_ranks(parts, [&](const Group& world) {
        const Mesh mesh(world, {{"tp", parts}});
        torch::nn::Module module;
        const int64_t rows = parts < 3 ? 8 / parts : world.rank() < 2 ? 1 : 0;
        const at::Tensor w = module.register_parameter("w", at::ones({rows, 6}));
        const at::Tensor used = module.register_parameter("used", at::ones({8 / parts}));
        std::unique_ptr<torch::optim::Optimizer> inner;
        if (adam) {
          inner = std::make_unique<torch::optim::AdamW>(module.parameters());
        } else {
          inner = std::make_unique<torch::optim::SGD>(module.parameters(),
                                                      torch::optim::SGDOptions(0.1).momentum(0.9));
        }
        ZeroOptimizer optimizer(
            module, std::move(inner), mesh.group({}),
            ZeroOptions().mesh_group(world).tensor_parts(
                {world, [](const std::string&) { return std::optional<int64_t>(0); }}));
        optimizer.backward(world.rank() == 0 ? w.sum() + used.sum() : used.sum());
        optimizer.step();
        body(optimizer);
      });
    };
    for (const int parts : {3, 2}) {  // the last one of 3 has no elements of w
      on_parts(parts, [&](ZeroOptimizer& optimizer) {
        optimizer.save_checkpoint(folder, SaveOptions().overwrite(true));
      });
      on_parts(parts, [&](ZeroOptimizer& optimizer) {
        const size_t used = optimizer.inner().state().size();
        EXPECT_TRUE(optimizer.load_checkpoint(folder).differences.empty());
        EXPECT_EQ(optimizer.inner().state().size(), used);
      });
    }
    // Half of its state is missing.
    on_parts(1, [&](ZeroOptimizer& optimizer) {
      const std::string missing = adam ? "exp_avg" : "momentum_buffer";
      expect_words(error_of([&] { optimizer.load_checkpoint(folder); }),
                   {"parameter w: state " + missing + " missing in the checkpoint"});
      optimizer.load_checkpoint(folder, LoadOptions().strict(false));
    });
  }
}

TEST(MeshErrorsTest, PartsAreOverRanksOfTheMesh) {
  run_ranks(2, [&](const Group& world) {
    const Mesh mesh(world, {{"tp", 2}});
    torch::nn::Module module;
    const at::Tensor w = module.register_parameter("w", at::ones({3}));
    const auto make = [&](const TensorParts& parts) {
      ZeroOptimizer(module,
                    std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{w},
                                                        torch::optim::SGDOptions(0.1)),
                    mesh.group({}), ZeroOptions().tensor_parts(parts));
    };
    expect_words(error_of([&] {
                   make({world, [](const std::string&) { return std::optional<int64_t>(0); }});
                 }),
                 {"tensor_parts()", "mesh_group()"});
    expect_words(error_of([&] {
                   make({mesh.group({}), nullptr});
                 }),
                 {"tensor_parts()", "got none"});
  });
}

// Parameters of two stages with other learning rates cannot share a group.
TEST(MeshErrorsTest, GroupsThatJoinParametersOfOtherOptionsAreADifference) {
  const std::string folder = fresh_folder("options") + "/a";
  on_stages({{{{"a", {3}}}}, {{{"b", {4}}}, {}, 1, 0.5}}, 1,
            [&](StageRun& run) { run.optimizer->save_checkpoint(folder); });
  on_stages({{{{"a", {3}}, {"b", {4}}}}}, 2, [&](StageRun& run) {
    expect_words(error_of([&] { run.optimizer->load_checkpoint(folder); }),
                 {"parameter b: in group 1 of the checkpoint", "group 0"});
    EXPECT_TRUE(run.is(2));
  });
  // A rank that restores its own leaves them too where another one does.
  const std::string of_three = folder + "-of-three";
  on_stages({{{{"a", {3}}}}, {{{"b", {4}}}, {}, 1, 0.5}, {{{"c", {2}}}}}, 1,
            [&](StageRun& run) { run.optimizer->save_checkpoint(of_three); });
  on_stages(
      {{{{"c", {2}}}, {}, 1, 0.3}, {{{"a", {3}}, {"b", {4}}}, {}, 1, 0.3}}, 2, [&](StageRun& run) {
        const auto load = [&](bool restore) {
          const auto options = LoadOptions().strict(false).restore_options(restore);
          return run.optimizer->load_checkpoint(of_three, options).differences;
        };
        const bool restores = run.module.named_parameters().contains("c");
        EXPECT_EQ(load(false).size(), restores ? 0u : 1u);
        const std::vector<std::string> differences = load(true);
        ASSERT_EQ(differences.size(), 1u);
        expect_words(differences[0],
                     restores ? std::vector<std::string>{"options", "stay as they are", "rank 1"}
                              : std::vector<std::string>{"parameter b: in group 1"});
        EXPECT_EQ(run.optimizer->param_groups()[0].options().get_lr(), 0.3);
        EXPECT_TRUE(run.is(1));
      });
  // Stages that change places take their options with them.
  on_stages({{{{"b", {4}}}}, {{{"a", {3}}}}}, 2, [&](StageRun& run) {
    run.optimizer->load_checkpoint(folder);
    const bool b = run.module.named_parameters().contains("b");
    EXPECT_EQ(run.optimizer->param_groups()[0].options().get_lr(), b ? 0.5 : 0.1);
    EXPECT_TRUE(run.is(1));
  });
}

}  // namespace
}  // namespace zero
