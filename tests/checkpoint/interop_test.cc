// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The state of the optimizer goes out under torch's names and comes back, through Python or not.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/mesh_run.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_program.h"
#include "tests/support/run_ranks.h"
#include "zero/adafactor.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/safetensors.h"
#include "zero/checkpoint_options.h"
#include "zero/mesh.h"

namespace zero {
namespace {

// Each gradient is that of rank 0, so that the sum is exact on any number of ranks.
Training training(Inner inner) {
  Training t;
  t.inner = inner;
  t.options = ZeroOptions()
                  .reduction(Reduction::kSum)
                  .fused(false)
                  .bucket_bytes(700)
                  .elementwise(inner == Inner::kOwn);
  return t;
}

// Of a step, by the names of parameters; "never" has none, nor has "empty", which Python's
// Adafactor divides by its size.
Snapshot gradients(OddModelImpl& model, int step) {
  Snapshot result;
  uint64_t seed = 1000u * static_cast<unsigned>(step);
  for (const auto& item : model.named_parameters()) {
    const bool used = item.value().requires_grad() && item.value().numel() > 0 &&
                      item.key().rfind("never", 0) != 0;
    if (used) result[item.key()] = random_tensor(item.value().sizes(), ++seed);
  }
  return result;
}

void train(CheckpointRun& run, int first, int last) {
  for (int step = first; step < last; ++step) {
    if (run.optimizer->group().rank() == 0) {
      const Snapshot all = gradients(*run.model, step);
      at::Tensor loss = at::zeros({});
      for (const auto& item : run.model->named_parameters()) {
        if (all.count(item.key()) != 0) loss = loss + (item.value() * all.at(item.key())).sum();
      }
      run.optimizer->backward(loss);
    }
    run.optimizer->step();
  }
}

// Collective. All but the counts of steps, which load_plain_state() leaves as they are.
Snapshot state_of(CheckpointRun& run) {
  Snapshot result = run.snapshot();
  result.erase("steps/done");
  return result;
}

struct Exported {
  std::string model, state;  // the paths to load
};

// A run on `ranks` of three steps, and what it has then and three steps later.
struct Saved {
  Exported paths;
  Snapshot then, later;
};

Saved save(Inner inner, int ranks, const std::string& folder, int64_t max_file_bytes) {
  Saved saved;
  run_ranks(ranks, [&](const Group& group) {
    CheckpointRun run(training(inner), group, 1);
    train(run, 0, 3);
    run.optimizer->save_checkpoint(folder + "/a");
    const Snapshot then = state_of(run);
    train(run, 3, 6);
    const Snapshot later = state_of(run);
    if (group.rank() == 0) saved = {{}, then, later};
  });
  saved.paths.model = export_model(folder + "/a", folder + "/model.safetensors",
                                   ExportOptions().max_file_bytes(max_file_bytes));
  saved.paths.state =
      export_optimizer_state(folder + "/a", folder + "/state.safetensors", max_file_bytes);
  return saved;
}

// A run on `ranks` that begins with what is in the files.
void go_on(Inner inner, int ranks, const Exported& paths,
           const std::function<void(CheckpointRun&)>& then) {
  run_ranks(ranks, [&](const Group& group) {
    CheckpointRun run(training(inner), group, 8);
    train(run, 0, 1);  // state that is replaced
    load_weights(*run.model, paths.model);
    run.optimizer->refresh_master_parameters();
    run.optimizer->load_plain_state(paths.state);
    then(run);
  });
}

TEST(StateTest, AStateGoesOutAndComesBackOnAnyNumberOfRanksInEveryBit) {
  int number = 0;
  for (const Inner inner :
       {Inner::kSgd, Inner::kSgdMomentum, Inner::kAdamW, Inner::kAdam, Inner::kRmsprop,
        Inner::kAdagrad, Inner::kLion, Inner::kMuonFp32, Inner::kLamb, Inner::kAdafactor}) {
    const int from = 1 + number % 3;
    const int64_t limit = number % 2 == 0 ? 0 : 300;
    const std::string what = "optimizer " + std::to_string(static_cast<int>(inner));
    const std::string folder = fresh_folder("state" + std::to_string(number++));
    const Saved saved = save(inner, from, folder, limit);
    EXPECT_EQ(saved.paths.state.ends_with(".json"), limit > 0 && inner != Inner::kSgd) << what;
    for (const int to : {1, 2, 3}) {
      go_on(inner, to, saved.paths, [&](CheckpointRun& run) {
        const Snapshot then = state_of(run);
        train(run, 3, 6);
        const Snapshot later = state_of(run);
        if (run.optimizer->group().rank() != 0) return;
        EXPECT_EQ(differing(saved.then, then), 0) << what << ": " << from << " -> " << to;
        EXPECT_EQ(differing(saved.later, later), 0) << what << ": " << from << " -> " << to;
      });
    }
  }
}

TEST(StateTest, TensorsHaveTheNamesAndShapesOfTorch) {
  const std::string folder = fresh_folder("names");
  const auto shapes = [](const std::string& path) {
    std::map<std::string, std::vector<int64_t>> result;
    SafetensorsFiles files(path);
    for (const auto& item : files.names())
      result[item.first] = files.find(item.first).tensor->shape;
    return result;
  };
  const Saved adam = save(Inner::kAdamW, 2, folder, 0);
  const auto found = shapes(adam.paths.state);
  EXPECT_EQ(found.size(), 8u * 3) << "of eight parameters that have elements and gradients";
  EXPECT_EQ(found.at("state.trunk.weight.exp_avg"), (std::vector<int64_t>{23, 17}));
  EXPECT_EQ(found.at("state.last.exp_avg_sq"), (std::vector<int64_t>{1, 11, 1, 2}));
  EXPECT_EQ(found.at("state.trunk.bias.step"), std::vector<int64_t>{});
  SafetensorsFiles files(adam.paths.state);
  EXPECT_TRUE(files.find("state.trunk.bias.step").read().equal(at::full({}, 3.0, at::kFloat)));
  const at::Tensor last = files.find("state.last.exp_avg").read();
  EXPECT_TRUE(
      last.reshape({-1})
          .to(at::kDouble)
          .equal(
              adam.then.at("exp_avg/last").view({1, 1, 2, 11}).permute({0, 3, 1, 2}).reshape({-1})))
      << "memory order went out";
  const auto metadata = files.metadata();
  EXPECT_EQ(metadata.at("optimizer"), "AdamW");
  const auto groups = nlohmann::json::parse(metadata.at("param_groups"));
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].at("betas"), (std::vector<double>{0.9, 0.999}));
  EXPECT_EQ(groups[0].at("amsgrad"), false);
  EXPECT_EQ(groups[0].at("weight_decay"), 0.05);
  EXPECT_EQ(groups[0].at("params"), (std::vector<std::string>{"trunk.weight", "left.weight",
                                                              "right.weight", "never.weight"}));

  const auto groups_of = [](const std::string& path) {
    return nlohmann::json::parse(SafetensorsFiles(path).metadata().at("param_groups"));
  };
  const Saved adafactor = save(Inner::kAdafactor, 2, fresh_folder("factors"), 0);
  const auto of_adafactor = groups_of(adafactor.paths.state)[0];
  EXPECT_TRUE(of_adafactor.at("eps")[0].is_null()) << "the machine epsilon";
  EXPECT_TRUE(of_adafactor.at("maximize").is_boolean());
  const auto factored = shapes(adafactor.paths.state);
  EXPECT_TRUE(factored.contains("state.scale.variance"));
  EXPECT_EQ(factored.at("state.trunk.weight.row_var"), (std::vector<int64_t>{23, 1}));
  EXPECT_EQ(factored.at("state.trunk.weight.col_var"), (std::vector<int64_t>{1, 17}));
  const auto own = shapes(save(Inner::kOwn, 2, fresh_folder("own"), 0).paths.state);
  EXPECT_EQ(own.at("state.trunk.weight.sign"), (std::vector<int64_t>{23, 17}));
  EXPECT_EQ(own.at("state.trunk.weight.product"), std::vector<int64_t>{});
  const Saved muon = save(Inner::kMuonFp32, 1, fresh_folder("muon"), 0);
  const auto of_muon = SafetensorsFiles(muon.paths.state).metadata();
  EXPECT_EQ(of_muon.at("optimizer"), "Muon + AdamW");
  EXPECT_TRUE(shapes(muon.paths.state).contains("state.trunk.weight.momentum_buffer"));
  const auto first = groups_of(muon.paths.state)[0];
  EXPECT_EQ(first.at("ns_coefficients").size(), 3u);
  EXPECT_TRUE(first.at("ns_steps").is_number_integer()) << "Python makes a range of it";
  EXPECT_TRUE(first.at("nesterov").is_boolean());
}

// The tensors of the state and of the parameters.
std::map<std::string, at::Tensor> crossing(const WholeState& state) {
  std::map<std::string, at::Tensor> result;
  for (const auto& [key, tensor] : state.tensors()) {
    for (const char* kind : {"master/", "working/", "exp_avg/", "exp_avg_sq/", "step/"}) {
      if (key.rfind(kind, 0) == 0) result[key] = tensor;
    }
  }
  return result;
}

TEST(StateTest, AnyTensorParallelismTakesWhatAnyOtherWrote) {
  const std::string folder = fresh_folder("parts");
  for (const int from : {1, 3, 4}) {
    const std::string checkpoint = folder + "/" + std::to_string(from);
    WholeState saved;
    run_ranks(from, [&](const Group& world) {
      MeshRun run({.parts = from}, world, 1.0);
      run.train(0, 3);
      run.optimizer->save_checkpoint(checkpoint);
      run.add_to(saved);
    });
    export_optimizer_state(checkpoint, checkpoint + ".safetensors");
    std::vector<std::string> names;
    const auto metadata = SafetensorsFiles(checkpoint + ".safetensors").metadata();
    for (const auto& group : nlohmann::json::parse(metadata.at("param_groups"))) {
      for (const auto& name : group.at("params")) names.push_back(name);
    }
    EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
    EXPECT_EQ(names.size(), describe_checkpoint(checkpoint).parameters.size());
    for (const MeshShape& to : {MeshShape{}, MeshShape{.parts = 2}, MeshShape{.parts = 3},
                                MeshShape{.stages = 2}, MeshShape{.experts = 2, .parts = 2}}) {
      WholeState loaded;
      run_ranks(to.ranks(), [&](const Group& world) {
        MeshRun run(to, world, 1.0);
        run.optimizer->load_plain_state(checkpoint + ".safetensors");
        run.add_to(loaded);
      });
      const auto expected = crossing(saved), got = crossing(loaded);
      int states = 0;
      for (const auto& [key, tensor] : expected) {
        if (key.rfind("exp_avg", 0) != 0 && key.rfind("step", 0) != 0) continue;
        ++states;
        ASSERT_EQ(got.count(key), 1u) << key;
        EXPECT_TRUE(tensor.equal(got.at(key))) << key << ": " << from << " -> " << to.text();
      }
      EXPECT_GT(states, 60);
    }
  }
}

// Rows and columns of parts are means over parts: no arithmetic on them gives those of the whole.
TEST(StateTest, RowsAndColumnsOfPartsAreRefused) {
  const std::string folder = fresh_folder("rows");
  struct Matrix : torch::nn::Module {
    Matrix() { register_parameter("weight", at::zeros({4, 3})); }
  };
  run_ranks(2, [&](const Group& world) {
    const Mesh mesh(world, {{"dp", 1}, {"tp", 2}});
    Matrix model;
    ZeroOptimizer optimizer(
        model, std::make_unique<Adafactor>(model.parameters()), mesh.group({"dp"}),
        ZeroOptions()
            .mesh_group(mesh.all())
            .tensor_parts({mesh.group({"tp"}), [](const std::string&) { return 0; }}));
    optimizer.backward(model.parameters()[0].sum());
    optimizer.step();
    optimizer.save_checkpoint(folder + "/a");
  });
  expect_words(error_of([&] { export_optimizer_state(folder + "/a", folder + "/state"); }),
               {"weight", "col_var", "tensor-parallel part"});
}

// The rows of one are cut for two ranks: before the first part there is none.
TEST(StateTest, APartWithoutElementsHasNoState) {
  const std::string folder = fresh_folder("empty_part");
  run_ranks(2, [&](const Group& world) {
    const Mesh mesh(world, {{"dp", 1}, {"tp", 2}});
    torch::nn::Module model;
    const at::Tensor w = model.register_parameter("w", at::ones({world.rank(), 3}));
    ZeroOptimizer optimizer(
        model, std::make_unique<torch::optim::AdamW>(std::vector<at::Tensor>{w}),
        mesh.group({"dp"}),
        ZeroOptions()
            .mesh_group(mesh.all())
            .tensor_parts({mesh.group({"tp"}), [](const std::string&) { return 0; }}));
    optimizer.backward(w.sum());
    optimizer.step();
    optimizer.save_checkpoint(folder + "/a");
    EXPECT_TRUE(optimizer.load_checkpoint(folder + "/a").differences.empty());
  });
  const std::string path = folder + "/state.safetensors";
  export_optimizer_state(folder + "/a", path);
  SafetensorsFiles files(path);
  EXPECT_EQ(files.find("state.w.exp_avg").tensor->shape, (std::vector<int64_t>{1, 3}));
  const auto groups = nlohmann::json::parse(files.metadata().at("param_groups"));
  EXPECT_EQ(groups[0].at("params"), std::vector<std::string>{"w"});
}

// A part that had one gradient less counts one step less.
TEST(StateTest, CountsOfPartsThatDifferAreRefused) {
  const std::string folder = fresh_folder("part_counts");
  struct Two : torch::nn::Module {
    Two() {
      register_parameter("weight", at::zeros({4, 3}));
      register_parameter("other", at::zeros({2}));
    }
  };
  run_ranks(2, [&](const Group& world) {
    const Mesh mesh(world, {{"dp", 1}, {"tp", 2}});
    Two model;
    ZeroOptimizer optimizer(
        model, std::make_unique<torch::optim::AdamW>(model.parameters()), mesh.group({"dp"}),
        ZeroOptions()
            .mesh_group(mesh.all())
            .tensor_parts({mesh.group({"tp"}), [](const std::string&) { return 0; }}));
    for (int step = 0; step < 2; ++step) {
      const bool one = world.rank() == 1 && step == 1;
      const auto weight = model.named_parameters()["weight"].sum();
      const auto other = model.named_parameters()["other"].sum();
      optimizer.backward(one ? other : weight + other);
      optimizer.step();
    }
    optimizer.save_checkpoint(folder + "/a");
  });
  expect_words(error_of([&] { export_optimizer_state(folder + "/a", folder + "/state"); }),
               {"weight", "expected one step", "parts that differ, which cannot be put together",
                "export the state of a run without tensor parallelism"});
}

// Zeros, as in a new state, where the file or checkpoint is of a run without the option.
TEST(StateTest, StateThatAnOptionNeedsIsFilledIn) {
  const std::string folder = fresh_folder("options");
  const auto run = [&](const char* name, auto before, auto after) {
    const std::string path = folder + "/" + name;
    run_ranks(1, [&](const Group& group) {
      at::Tensor loaded;
      for (const int pass : {0, 1, 2}) {
        const bool first = pass == 0;
        OddModel model(1);
        const auto options = ZeroOptions().fused(false);
        ZeroOptimizer optimizer(*model, first ? before(*model) : after(*model), group, options);
        if (pass > 0) optimizer.load_checkpoint(path, LoadOptions().restore_options(false));
        if (pass > 1) optimizer.load_plain_state(path + ".state");
        optimizer.backward(model->trunk->weight.sum());
        optimizer.step();
        if (first) optimizer.save_checkpoint(path);
        if (first) export_optimizer_state(path, path + ".state");
        if (pass == 1) loaded = model->trunk->weight.detach().clone();
        EXPECT_TRUE(pass < 2 || model->trunk->weight.equal(loaded));
      }
    });
  };
  using torch::optim::AdamWOptions, torch::optim::RMSpropOptions;
  const auto adamw = [](bool amsgrad) {
    return [=](OddModelImpl& model) -> std::unique_ptr<torch::optim::Optimizer> {
      return std::make_unique<torch::optim::AdamW>(model.parameters(),
                                                   AdamWOptions(0.1).amsgrad(amsgrad));
    };
  };
  const auto rmsprop = [](bool all) {
    return [=](OddModelImpl& model) -> std::unique_ptr<torch::optim::Optimizer> {
      return std::make_unique<torch::optim::RMSprop>(
          model.parameters(), RMSpropOptions(0.1).momentum(all ? 0.9 : 0).centered(all));
    };
  };
  run("adamw", adamw(false), adamw(true));
  run("rmsprop", rmsprop(false), rmsprop(true));
}

// Writes <path> with the tensors and the metadata of `from`, changed.
using Tensors = std::map<std::string, at::Tensor>;
using Change = std::function<void(Tensors&, std::map<std::string, std::string>&)>;

std::string changed(const std::string& from, const std::string& path, const Change& change) {
  SafetensorsFiles files(from);
  Tensors tensors;
  for (const auto& item : files.names()) tensors[item.first] = files.find(item.first).read();
  auto metadata = files.metadata();
  change(tensors, metadata);
  std::vector<TensorToWrite> list;
  for (const auto& [name, tensor] : tensors) {
    list.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), [t = tensor] { return t; }});
  }
  std::filesystem::remove(path);
  return write_safetensors_files(path, list, metadata, 0);
}

TEST(StateErrorTest, AFileThatDoesNotFitOnOneRankChangesNothingOnAny) {
  const std::string folder = fresh_folder("refused");
  const Saved saved = save(Inner::kAdamW, 1, folder, 0);
  const Saved factored = save(Inner::kAdafactor, 1, folder + "/factored", 0);
  const std::string step = "state.trunk.bias.step";
  struct Case {
    Change change;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {[](auto&, auto& m) { m["optimizer"] = "Adam"; }, {"expected state of AdamW, got Adam"}},
      {[](auto&, auto& m) { m.erase("optimizer"); }, {"__metadata__", "\"optimizer\""}},
      {[](auto& t, auto&) { t["state.other.weight.exp_avg"] = at::zeros({2}); },
       {"this optimizer's parameters", "state.other.weight.exp_avg"}},
      {[](auto& t, auto&) { t["weight"] = at::zeros({2}); }, {"state.<parameter>.<state>"}},
      {[](auto& t, auto&) { t["state.trunk.bias.exp_avg"] = at::zeros({22}); },
       {"trunk.bias", "exp_avg", "expected shape [23], got [22]"}},
      {[](auto& t, auto&) { t.erase("state.trunk.bias.exp_avg_sq"); },
       {"trunk.bias", "expected state called exp_avg_sq"}},
      {[&](auto& t, auto&) { t.erase(step); }, {"trunk.bias", "expected state called step"}},
      {[&](auto& t, auto&) { t[step] = at::full({}, 2.5); }, {"whole number", "2.5"}},
      {[&](auto& t, auto&) { t[step] = at::full({}, -1.0); }, {"whole number", "-1"}},
      {[&](auto& t, auto&) { t[step] = at::full({2}, 1.0); }, {"one number"}},
      {[](auto& t, auto&) { t["state.trunk.bias.momentum"] = at::zeros({23}); }, {"momentum"}},
      {[](auto& t, auto&) { t["state.trunk.bias.exp_avg"] = at::zeros({23}, at::kLong); },
       {"trunk.bias", "exp_avg", "floating point", "Long"}},
  };
  int number = 0;
  for (const Case& test : cases) {
    const std::string path =
        changed(saved.paths.state, folder + "/bad" + std::to_string(number++), test.change);
    run_ranks(2, [&](const Group& group) {
      CheckpointRun run(training(Inner::kAdamW), group, 1);
      train(run, 0, 1);
      const Snapshot before = run.snapshot();
      // Rank 0 holds "trunk.bias" or not; the other reads what fits.
      const std::string error = error_of([&] { run.optimizer->load_plain_state(path); });
      expect_words(error, test.words);
      expect_words(
          error_of([&] {
            run.optimizer->load_plain_state(group.rank() == 0 ? path + ".none" : saved.paths.state);
          }),
          {".none"});
      EXPECT_EQ(differing(before, run.snapshot()), 0) << number;
      train(run, 1, 2);
    });
  }
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(training(Inner::kAdafactor), group, 1);
    const std::string path = folder + "/rows" + std::to_string(group.rank());
    changed(factored.paths.state, path, [](auto& t, auto&) {
      t["state.trunk.weight.row_var"] = at::zeros({1, 23});
    });
    expect_words(error_of([&] { run.optimizer->load_plain_state(path); }),
                 {"row_var", "expected shape [23, 1], got [1, 23]"});
    run.optimizer->load_plain_state(factored.paths.state);
    EXPECT_EQ(differing(factored.then, state_of(run)) > 0, true) << "masters are the run's own";
  });
}

TEST(StateTest, AParameterWithoutStateBeginsAnew) {
  const std::string folder = fresh_folder("anew");
  for (const Inner inner : {Inner::kAdamW, Inner::kAdagrad}) {
    const Saved saved = save(inner, 2, folder + "/" + std::to_string(static_cast<int>(inner)), 0);
    const std::string path =
        changed(saved.paths.state, folder + "/some.safetensors", [](auto& t, auto&) {
          std::erase_if(t, [](const auto& item) { return item.first.find("trunk.") == 6; });
        });
    run_ranks(3, [&](const Group& group) {
      CheckpointRun fresh(training(inner), group, 1), run(training(inner), group, 1);
      const Snapshot before = state_of(fresh);
      train(run, 0, 2);
      run.optimizer->load_plain_state(path);
      const Snapshot after = state_of(run);
      for (const char* kind : {"present", "step", "exp_avg", "exp_avg_sq", "sum"}) {
        for (const char* name : {"trunk.weight", "trunk.bias", "left.weight"}) {
          const std::string key = std::string(kind) + "/" + name;
          const Snapshot& expected = name[0] == 't' ? before : saved.then;
          EXPECT_TRUE(after.at(key).equal(expected.at(key))) << key;
        }
      }
      train(run, 2, 3);
    });
  }
}

TEST(StateTest, ACountThatFp32CannotHoldIsADouble) {
  const std::string folder = fresh_folder("counts"), step = "state.trunk.bias.step";
  const Saved saved = save(Inner::kAdamW, 1, folder, 0);
  for (const double count : {std::exp2(24), std::exp2(24) + 1}) {
    const std::string path =
        changed(saved.paths.state, folder + "/some.safetensors",
                [&](auto& t, auto&) { t[step] = at::full({}, count, at::kDouble); });
    const std::string again = folder + "/" + std::to_string(count);
    run_ranks(1, [&](const Group& group) {
      CheckpointRun run(training(Inner::kAdamW), group, 1);
      run.optimizer->load_plain_state(path);
      run.optimizer->save_checkpoint(again);
    });
    SafetensorsFiles files(export_optimizer_state(again, again + ".safetensors"));
    const at::Tensor stored = files.find(step).read();
    EXPECT_EQ(stored.scalar_type(), count > std::exp2(24) ? at::kDouble : at::kFloat);
    EXPECT_EQ(stored.item<double>(), count);
  }
}

TEST(StateTest, MoreFilesThanCanBeOpenAreRead) {
  const std::string folder = fresh_folder("many");
  run_ranks(1, [&](const Group& group) {
    NamedTensors list;
    for (int i = 0; i < 60; ++i) {
      list.insert("p" + std::to_string(i), at::zeros({1}).requires_grad_());
    }
    ZeroOptimizer optimizer(list, std::make_unique<torch::optim::AdamW>(list.values()), group);
    at::Tensor loss = at::zeros({1});
    for (const at::Tensor& t : list.values()) loss = loss + t;
    optimizer.backward(loss.sum());
    optimizer.step();
    optimizer.save_checkpoint(folder + "/a");
    const std::string index =
        export_optimizer_state(folder + "/a", folder + "/state", /*max_file_bytes=*/1);
    rlimit before{};
    getrlimit(RLIMIT_NOFILE, &before);
    const rlimit few{128, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
    const std::string error = error_of([&] { optimizer.load_plain_state(index); });
    setrlimit(RLIMIT_NOFILE, &before);
    EXPECT_EQ(error, "");
    EXPECT_EQ(SafetensorsFiles(index).names().size(), 180u);
  });
}

TEST(StateErrorTest, AllRanksMakeTheSameCallBetweenSteps) {
  const std::string folder = fresh_folder("calls");
  const Saved saved = save(Inner::kAdamW, 1, folder, 0);
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(training(Inner::kAdamW), group, 1);
    const auto load = [&] { run.optimizer->load_plain_state(saved.paths.state); };
    const auto plain = make_inner(Inner::kAdamW, *run.model);
    expect_words(
        error_of([&] { group.rank() == 0 ? load() : run.optimizer->load_plain_state(*plain); }),
        {"load_plain_state of a file"});
    run.optimizer->backward(run.model->trunk->weight.sum());
    expect_words(error_of(load), {"gradients"});
    run.optimizer->zero_grad();
    load();
  });
  run_ranks(1, [&](const Group& group) {
    CheckpointRun run(training(Inner::kOwn), group, 1);
    expect_words(error_of([&] { run.optimizer->load_plain_state(saved.paths.state); }),
                 {"expected torch's", "load_checkpoint()"});
  });
}

// The largest |a - b|, in units of the last place of the number or of the learning rate, if that is
// larger: about as much as one rounding in a step changes.
double units(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0;
  const at::Tensor exact = a.to(at::kDouble);
  const double unit = std::numeric_limits<float>::epsilon(), rate = 0.01;
  return (exact - b).abs().div(exact.abs().clamp_min(rate) * unit).max().item<double>();
}

struct PythonCase {
  Inner inner;
  int ranks;
  int64_t limit;
  // Adam and AdamW of Python make exp_avg by lerp, which rounds otherwise. All else is equal.
  bool like_libtorch;
  double units;  // of parameters after three steps
};

// Steps 3 to 5 are made by `script`, a command line.
void expect_back_from_python(const std::string& script, const std::vector<PythonCase>& cases) {
  for (const PythonCase& c : cases) {
    const std::string folder = fresh_folder("python");
    const Saved saved = save(c.inner, c.ranks, folder, c.limit);
    const std::string what = "optimizer " + std::to_string(static_cast<int>(c.inner));
    Snapshot steps;
    OddModel model(1);
    for (int step = 3; step < 6; ++step) {
      for (const auto& [name, gradient] : gradients(*model, step)) {
        steps[std::to_string(step - 3) + "/" + name] = gradient;
      }
    }
    write_snapshot(steps, folder + "/gradients.safetensors");
    // What the script reads is one file.
    if (c.limit > 0) export_model(folder + "/a", folder + "/whole.safetensors");
    if (c.limit > 0) {
      std::filesystem::remove(folder + "/model.safetensors.index.json");
      std::filesystem::rename(folder + "/whole.safetensors", folder + "/model.safetensors");
    }
    ASSERT_EQ(std::system(
                  (script + " " + folder + " " + saved.paths.state + (c.like_libtorch ? " 1" : ""))
                      .c_str()),
              0)
        << what;
    const Exported back{folder + "/python_model.safetensors", folder + "/python_state.safetensors"};
    Snapshot never_left;
    run_ranks(1, [&](const Group& group) {  // nine steps
      CheckpointRun run(training(c.inner), group, 1);
      train(run, 0, 9);
      never_left = state_of(run);
    });
    go_on(c.inner, c.ranks, back, [&](CheckpointRun& run) {
      const Snapshot then = state_of(run);
      train(run, 6, 9);
      const Snapshot end = state_of(run);
      if (run.optimizer->group().rank() != 0) return;
      double most = 0, most_at_the_end = 0;
      for (const auto& [key, tensor] : saved.later) {
        if (key.rfind("master/", 0) == 0) {
          most = std::max(most, units(tensor, then.at(key)));
          most_at_the_end = std::max(most_at_the_end, units(never_left.at(key), end.at(key)));
        }
        if (key.rfind("step/", 0) == 0) {
          EXPECT_TRUE(tensor.equal(then.at(key))) << key;
        }
      }
      std::printf("%s: %.2f units after Python, %.2f at the end\n", what.c_str(), most,
                  most_at_the_end);
      EXPECT_LE(most, c.units) << what;
      EXPECT_LE(most_at_the_end, 2 * c.units) << what;
      if (c.units > 0) return;
      EXPECT_EQ(differing(saved.later, then), 0) << what;
      EXPECT_EQ(differing(never_left, end), 0) << what;
    });
  }
}

TEST(PythonTest, ARunGoesOnInTorchAndComesBack) {
  const std::string command = python();
  if (std::system((command + " -c 'import safetensors.torch, torch' 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << command << " has no safetensors and torch; set ZERO_PYTHON to one that has";
  }
  std::vector<PythonCase> cases{
      {Inner::kSgdMomentum, 2, 0, false, 0}, {Inner::kRmsprop, 3, 900, false, 0},
      {Inner::kAdagrad, 1, 0, false, 0},     {Inner::kAdamW, 1, 0, false, 6},
      {Inner::kAdamW, 3, 900, true, 0},      {Inner::kAdam, 2, 0, true, 0},
      {Inner::kAdafactor, 2, 0, false, 2}};
  if (std::system((command + " -c 'import torch; torch.optim.Adafactor' 2>/dev/null").c_str()) !=
      0) {
    std::printf("Adafactor is skipped: torch of %s has no torch.optim.Adafactor\n",
                command.c_str());
    cases.pop_back();
  }
  expect_back_from_python(command + " tests/checkpoint/go_on_in_python.py", cases);
}

// Where Python has no torch, too. It computes in double and rounds what it stores; an option or a
// tensor that is taken for another one makes thousands of units.
TEST(PythonTest, ARunGoesOnInPlainPythonAndComesBack) {
  expect_back_from_python(python() + " tests/checkpoint/go_on_in_plain_python.py",
                          {{Inner::kSgdMomentum, 2, 0, false, 100},
                           {Inner::kRmsprop, 3, 900, false, 100},
                           {Inner::kAdagrad, 1, 0, false, 100},
                           {Inner::kAdamW, 2, 0, false, 100}});
}

}  // namespace
}  // namespace zero
