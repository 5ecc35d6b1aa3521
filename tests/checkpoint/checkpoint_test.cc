// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints bring back every bit, on any number of ranks and in any layout.
#include <gtest/gtest.h>
#include <sched.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/version.h>

#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/base/threads.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint_options.h"
#include "zero/combined_optimizer.h"
#include "zero/mesh.h"
#include "zero/optimizer/shard_file.h"
#include "zero/training/engine.h"

namespace zero {
namespace {

using Use = OddModelImpl::Use;

// Runs on all ranks and returns rank 0's snapshot.
Snapshot on_ranks(int world_size, const std::function<Snapshot(const Group&)>& body) {
  Snapshot result;
  run_ranks(world_size, [&](const Group& group) {
    Snapshot own = body(group);
    if (group.rank() == 0) result = std::move(own);
  });
  return result;
}

Training training(Inner inner, c10::ScalarType dtype, int world_size, int64_t stage, Layout layout,
                  int64_t bucket_bytes) {
  Training t;
  t.inner = inner;
  t.dtype = dtype;
  t.world_size = world_size;
  t.max_norm = 0.7;
  t.options.stage(stage).layout(layout).bucket_bytes(bucket_bytes);
  t.options.elementwise(inner == Inner::kOwn);
  // A layer is dropped everywhere in every third step, so that step counts differ.
  t.use = [](int, int step, int) {
    return step % 3 == 1 ? Use::kLeft | Use::kTrunk : static_cast<unsigned>(Use::kAll);
  };
  return t;
}

// Both orders of a convolution of one by one have the same bytes.
TEST(StridesTest, AConvolutionOfOneByOneLoadsInEitherMemoryFormat) {
  const std::string folder = fresh_folder("strides") + "/a";
  run_ranks(2, [&](const Group& group) {
    const auto make = [&](at::IntArrayRef strides, torch::nn::Conv2d& conv) {
      at::NoGradGuard no_grad;
      conv->weight.set_data(conv->weight.detach().as_strided({8, 4, 1, 1}, strides));
      return std::make_unique<ZeroOptimizer>(
          *conv, std::make_unique<torch::optim::AdamW>(conv->parameters()), group, ZeroOptions());
    };
    torch::manual_seed(1);
    const torch::nn::Conv2dOptions options(4, 8, 1);
    torch::nn::Conv2d saved(options), loaded(options);
    make({4, 1, 1, 1}, saved)->save_checkpoint(folder);
    const auto optimizer = make({4, 1, 4, 4}, loaded);
    EXPECT_FALSE(loaded->weight.equal(saved->weight));
    optimizer->load_checkpoint(folder);
    EXPECT_TRUE(loaded->weight.equal(saved->weight));
  });
}

TEST(StridesTest, AnotherMemoryFormatIsRefusedAndAnExportFitsIt) {
  const std::string folder = fresh_folder("formats") + "/a";
  const at::Tensor values = at::arange(8 * 4 * 3 * 3, at::kFloat).view({8, 4, 3, 3});
  torch::nn::Conv2d loaded(torch::nn::Conv2dOptions(4, 8, 3));
  run_ranks(1, [&](const Group& group) {
    torch::nn::Conv2d saved(torch::nn::Conv2dOptions(4, 8, 3));
    saved->weight.set_data(values.contiguous(at::MemoryFormat::ChannelsLast));
    const auto make = [&](torch::nn::Conv2d& conv) {
      return std::make_unique<ZeroOptimizer>(
          *conv, std::make_unique<torch::optim::AdamW>(conv->parameters()), group, ZeroOptions());
    };
    make(saved)->save_checkpoint(folder);
    expect_words(error_of([&] { make(loaded)->load_checkpoint(folder); }),
                 {"parameter weight: memory order (strides)", "export_model()"});
  });
  load_weights(*loaded, export_model(folder, folder + ".safetensors"));
  EXPECT_TRUE(loaded->weight.equal(values));
}

class Reload : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(SavedBy, Reload, ::testing::Values(1, 2, 3, 4, 5));

constexpr Layout kLayouts[] = {Layout::kPerParameter, Layout::kContiguous,
                               Layout::kWholeParameters};

// Saved by `saved_by` ranks, loaded by 1 to 5, or by a third of them. Every cell also changes
// stage, layout and bucket size.
void expect_every_bit_back(int saved_by, Inner inner, const std::vector<c10::ScalarType>& dtypes,
                           bool by_all = true) {
  const std::vector<int64_t> sizes = {0, 300, 1500, 4096};
  for (const auto dtype : dtypes) {
    const Training saver = training(inner, dtype, saved_by, 1 + saved_by % 2,
                                    kLayouts[saved_by % 3], sizes[saved_by % 4]);
    const std::string folder =
        fresh_folder("reload" + std::to_string(saved_by)) + "/" + c10::toString(dtype);
    const Snapshot saved = on_ranks(saved_by, [&](const Group& group) {
      CheckpointRun run(saver, group, 1);
      run.train(0, 5);
      run.optimizer->save_checkpoint(folder, SaveOptions().metadata({{"epoch", "3"}}));
      return run.snapshot();
    });
    std::string row = "saved by " + std::to_string(saved_by) + ", loaded by";
    for (int loaded_by = 1; loaded_by <= 5; ++loaded_by) {
      if (!by_all && (saved_by + 2 * loaded_by + static_cast<int>(inner)) % 3 != 0) continue;
      const int number = saved_by + loaded_by;
      const Training loader = training(inner, dtype, loaded_by, 1 + number % 2,
                                       kLayouts[number % 3], sizes[number % 4]);
      const Snapshot loaded = on_ranks(loaded_by, [&](const Group& group) {
        CheckpointRun run(loader, group, 50 + group.rank());
        if (loaded_by % 2 == 0) run.train(0, 2);  // what was there must not shine through
        const LoadReport report = run.optimizer->load_checkpoint(folder);
        EXPECT_EQ(report.metadata.at("epoch"), "3");
        EXPECT_EQ(report.world_size, saved_by);
        run.optimizer->check_replicas();
        return run.snapshot();
      });
      const int64_t count = differing(saved, loaded);
      row += " " + std::to_string(loaded_by) + ": " + std::to_string(count);
      EXPECT_EQ(count, 0) << "loaded by " << loaded_by;
    }
    std::printf("%s differing values, %s\n", row.c_str(), c10::toString(dtype));
  }
}

// Dtypes take turns, so that each has savers of odd and even numbers of ranks. Each number of ranks
// loads, too.
void expect_every_bit_back_of_one_dtype(int saved_by, Inner inner) {
  const bool narrow = (saved_by + saved_by / 3 + static_cast<int>(inner)) % 2 == 0;
  expect_every_bit_back(saved_by, inner, {narrow ? at::kBFloat16 : at::kFloat}, /*by_all=*/false);
}

TEST_P(Reload, AnyNumberOfRanksAnyStageLayoutAndBucketSizeBringBackEveryBit) {
  const std::vector<Inner> inners = {Inner::kAdamW, Inner::kSgdMomentum, Inner::kRmsprop,
                                     Inner::kAdagrad, Inner::kAdam};
  expect_every_bit_back(GetParam(), inners[GetParam() - 1], {at::kFloat, at::kBFloat16});
}

TEST_P(Reload, AnyNumberOfRanksBringsBackTheStateOfLion) {
  expect_every_bit_back_of_one_dtype(GetParam(), Inner::kLion);
}

TEST_P(Reload, AnyNumberOfRanksBringsBackTheStateOfWholeParameters) {
  for (const Inner inner : {Inner::kMuon, Inner::kLamb, Inner::kAdafactor}) {
    expect_every_bit_back_of_one_dtype(GetParam(), inner);
  }
}

TEST_P(Reload, AnyNumberOfRanksBringsBackTheStateOfAClassOfTheUsersOwn) {
  expect_every_bit_back_of_one_dtype(GetParam(), Inner::kOwn);
}

// Dtypes take turns, and so do one rank and three. OwnDisksSaveTest has a run that never saves.
TEST(ResumeTest, TwentyStepsEqualTenSaveLoadTenInEveryBit) {
  int turn = 0;
  for (Inner inner : {Inner::kAdamW, Inner::kSgdMomentum, Inner::kRmsprop, Inner::kLion,
                      Inner::kOwn, Inner::kMuon, Inner::kLamb, Inner::kAdafactor}) {
    const auto dtype = turn % 2 == 0 ? at::kFloat : turn % 4 == 1 ? at::kBFloat16 : at::kHalf;
    const int world_size = (turn / 4 + turn / 2) % 2 == 0 ? 3 : 1;
    ++turn;
    Training t = training(inner, dtype, world_size, 2, Layout::kContiguous, 900);
    if (dtype == at::kHalf) {
      // Grows and overflows within the run, on both sides of the save.
      t.options.loss_scaler(
          LossScalerOptions().initial_scale(8192).growth_interval(2).growth_factor(64));
    }
    // In between two changes of the scale, which is where its counters matter.
    const int middle = dtype == at::kHalf ? 11 : 10;
    const std::string folder = fresh_folder("resume") + "/a";
    const Snapshot whole = on_ranks(world_size, [&](const Group& group) {
      CheckpointRun run(t, group, 1);
      run.train(0, middle);
      run.optimizer->save_checkpoint(folder);
      run.train(middle, 20);
      return run.snapshot();
    });
    const Snapshot resumed = on_ranks(world_size, [&](const Group& group) {
      CheckpointRun run(t, group, 9);
      run.optimizer->load_checkpoint(folder);
      run.train(middle, 20);
      return run.snapshot();
    });
    EXPECT_EQ(differing(whole, resumed), 0)
        << c10::toString(dtype) << " inner " << static_cast<int>(inner) << " W " << world_size;
    if (dtype == at::kHalf) {
      EXPECT_GT(whole.at("steps/skipped").item<double>(), 1) << "the scaler had nothing to do";
    }
  }
}

// A step waits only for the copies of the bucket that it changes next.
TEST(ResumeTest, ATensorOfAShardIsSavedWithTheBucketInWhichAStepChangesIt) {
  run_ranks(2, [](const Group& group) {
    OddModel model(1);
    auto inner = make_inner(Inner::kAdamW, *model);
    const Engine::ParamGroups groups = inner->param_groups();
    const auto engine =
        Engine::make(*model, inner, group, ZeroOptions().bucket_bytes(900), Engine::Frozen::kAll);
    engine->passes.run(
        model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), Use::kAll));
    engine->step(groups);
    std::map<std::pair<std::string, int64_t>, int64_t> buckets;
    std::set<int64_t> all;
    for (const SegmentTensors& s : engine->shards.segments()) {
      const std::string& name = engine->table.parameters()[s.segment.parameter].name;
      buckets[{name, s.segment.begin}] = s.segment.bucket;
      all.insert(s.segment.bucket);
    }
    EXPECT_GE(all.size(), 3U);
    std::map<std::string, std::set<int64_t>> of_kinds;
    for (const TensorToSave& t : shard_file(*engine).tensors) {
      EXPECT_EQ(t.bucket, buckets.at({t.about.owner, t.about.begin}))
          << t.about.kind << " of " << t.about.owner;
      of_kinds[t.about.kind].insert(t.bucket);
    }
    EXPECT_EQ(of_kinds["master"], all);
    for (const char* kind : {"exp_avg", "exp_avg_sq", "step"}) {
      EXPECT_GE(of_kinds[kind].size(), 2U) << kind;
    }
  });
}

// Steps go on while the shard is copied.
void expect_moment_of_save(Inner inner, bool fused, Layout layout, int64_t width) {
  Training t = training(inner, at::kFloat, 3, 2, layout, 900);
  t.width = width;
  t.options.fused(fused).bucket_bytes(40 * width);
  const std::string folder = fresh_folder("async") + "/a";
  Snapshot saved;
  on_ranks(3, [&](const Group& group) {
    CheckpointRun run(t, group, 1);
    run.train(0, 4);
    Snapshot then = run.snapshot();
    auto pending = run.optimizer->save_checkpoint_async(folder);
    run.train(4, 9);
    pending->finish();
    if (group.rank() == 0) saved = std::move(then);
    return Snapshot();
  });
  const Snapshot loaded = on_ranks(2, [&](const Group& group) {
    CheckpointRun run(t, group, 9);
    run.optimizer->load_checkpoint(folder);
    return run.snapshot();
  });
  EXPECT_EQ(differing(saved, loaded), 0);
}

TEST(ResumeTest, AsynchronousSaveIsOfTheMomentItWasCalled) {
  for (const int64_t width : {23, 700}) {
    expect_moment_of_save(Inner::kAdamW, true, Layout::kContiguous, width);
    expect_moment_of_save(Inner::kAdamW, false, Layout::kPerParameter, width);
    expect_moment_of_save(Inner::kSgdMomentum, true, Layout::kWholeParameters, width);
    expect_moment_of_save(Inner::kMuon, true, Layout::kContiguous, width);
  }
}

// As at the limit of processes: the thread that trains removes the replaced one.
TEST(ResumeTest, WithoutAThreadAnAsynchronousSaveLeavesItsCallersPriority) {
  const std::string parent = fresh_folder("no-thread");
  run_ranks(1, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.optimizer->save_checkpoint(parent + "/a");
    const int before = sched_getscheduler(0);
    threads_refused = true;
    run.optimizer->save_checkpoint_async(parent + "/a", SaveOptions().overwrite(true))->finish();
    threads_refused = false;
    EXPECT_EQ(sched_getscheduler(0), before);
    EXPECT_EQ(names_in(parent).size(), 1U);
  });
}

TEST(ResumeTest, OptionsAreRestoredOrKeptAsAsked) {
  const Training t = training(Inner::kAdamW, at::kFloat, 2, 2, Layout::kContiguous, 900);
  const std::string folder = fresh_folder("options") + "/a";
  on_ranks(2, [&](const Group& group) {
    CheckpointRun run(t, group, 1);
    run.train(0, 2);
    const double saved = run.optimizer->param_groups()[0].options().get_lr();
    run.optimizer->save_checkpoint(folder);
    for (bool restore : {false, true}) {
      for (auto& g : run.optimizer->param_groups()) g.options().set_lr(0.5);
      run.optimizer->load_checkpoint(folder, LoadOptions().restore_options(restore));
      EXPECT_EQ(run.optimizer->param_groups()[0].options().get_lr(), restore ? saved : 0.5);
      run.train(2, 3);
    }
    return Snapshot();
  });
}

// Adagrad makes state in its constructor, and none in step().
TEST(ResumeTest, AParameterWithoutSavedStateStepsInAClassThatBeginsWithSome) {
  const std::string folder = fresh_folder("unused") + "/a";
  run_ranks(2, [&](const Group& group) {
    for (const bool first : {true, false}) {
      torch::nn::Module model;
      std::vector<at::Tensor> of_adamw = {model.register_parameter("a", at::ones({6}))};
      std::vector<at::Tensor> of_adagrad = {model.register_parameter("c", at::ones({6}))};
      const at::Tensor unused = model.register_parameter("unused", at::ones({6}));
      (first ? of_adamw : of_adagrad).push_back(unused);
      std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
      parts.push_back(std::make_unique<torch::optim::AdamW>(of_adamw, 0.1));
      parts.push_back(std::make_unique<torch::optim::Adagrad>(of_adagrad, 0.1));
      ZeroOptimizer optimizer(model, std::make_unique<CombinedOptimizer>(std::move(parts)), group);
      if (!first) optimizer.load_checkpoint(folder, LoadOptions().strict(false));
      const at::Tensor used = of_adamw[0].sum() + of_adagrad[0].sum();
      optimizer.backward(first ? used : used + unused.sum());
      optimizer.step();
      if (first) optimizer.save_checkpoint(folder);
      EXPECT_EQ(unused.eq(1).all().item<bool>(), first);
    }
  });
}

TEST(ResumeTest, TheManifestSaysWhatWasSavedAndByWhat) {
  const std::string folder = fresh_folder("manifest") + "/a";
  Training t = training(Inner::kAdamW, at::kHalf, 2, 1, Layout::kPerParameter, 700);
  t.options.loss_scaler(LossScalerOptions().initial_scale(64).growth_interval(5).hysteresis(3));
  on_ranks(2, [&](const Group& group) {
    CheckpointRun run(t, group, 1);
    run.train(0, 3);
    run.optimizer->save_checkpoint(folder, SaveOptions().metadata({{"epoch", "3"}}));
    const Manifest m = read_manifest(folder);
    EXPECT_EQ(m.torch_version, TORCH_VERSION);
    EXPECT_EQ(m.world_size, 2);
    EXPECT_EQ(m.stage, 1);
    EXPECT_EQ(m.layout, "per parameter");
    EXPECT_EQ(m.bucket_bytes, 700);
    EXPECT_EQ(m.plan_fingerprint, run.optimizer->plan().fingerprint());
    EXPECT_EQ(m.optimizer, "AdamW");
    EXPECT_EQ(m.steps, 3);
    EXPECT_EQ(m.skipped_steps, 0);
    EXPECT_TRUE(m.dynamic_scale);
    EXPECT_EQ(m.scale, 64);
    EXPECT_EQ(m.good_steps, 3);
    EXPECT_EQ(m.hysteresis_left, 3);
    EXPECT_EQ(m.groups.size(), 2U);
    EXPECT_EQ(m.parameters.size(), 11U);
    EXPECT_EQ(m.frozen.size(), 1U);
    EXPECT_EQ(m.buffers.size(), 1U);
    EXPECT_EQ(m.metadata.at("epoch"), "3");
    return Snapshot();
  });
}

// As by those who want a scale that never shrinks.
TEST(ResumeTest, AHysteresisThatNeverEndsIsSavedAndLoadedAndOutlivesFreezing) {
  const std::string folder = fresh_folder("hysteresis") + "/a";
  Training t = training(Inner::kAdamW, at::kHalf, 2, 2, Layout::kContiguous, 900);
  t.options.loss_scaler(
      LossScalerOptions().initial_scale(64).hysteresis(std::numeric_limits<int64_t>::max()));
  on_ranks(2, [&](const Group& group) {
    CheckpointRun run(t, group, 1);
    run.train(0, 1);
    run.optimizer->save_checkpoint(folder);
    CheckpointRun other(t, group, 9);
    other.optimizer->load_checkpoint(folder);
    other.train(1, 2);
    run.optimizer->freeze({run.model->left->weight});
    run.train(1, 2);
    return Snapshot();
  });
}

// Two copies of two shards, and back into one copy of any number.
TEST(ReplicasTest, CopiesOfAShardAreSavedOnceAndAllOfThemAreLoaded) {
  const std::string parent = fresh_folder("replicas");
  const Training plain = training(Inner::kAdamW, at::kBFloat16, 4, 2, Layout::kContiguous, 900);
  const auto replicated = [&](const Group& group) {
    const Mesh mesh(group, {{"dp_replicate", 2}, {"dp_shard", 2}});
    Training t = plain;
    for (int g = 0; g < 2; ++g) {
      t.options.placement(g, GroupPlacement()
                                 .sharded_over(mesh.group({"dp_shard"}))
                                 .replicated_over(mesh.group({"dp_replicate"})));
    }
    return t;
  };
  const auto masters = [](CheckpointRun& run) {
    Snapshot result;
    for (const auto& item : run.model->named_parameters()) {
      if (!item.value().requires_grad()) continue;
      result["master/" + item.key()] = run.optimizer->master(item.value());
    }
    return result;
  };
  const auto load = [&](int world_size, const std::string& name) {
    return on_ranks(world_size, [&](const Group& group) {
      CheckpointRun run(plain, group, 9);
      run.optimizer->load_checkpoint(parent + name);
      return run.snapshot();
    });
  };
  const Snapshot saved = on_ranks(4, [&](const Group& group) {
    CheckpointRun run(replicated(group), group, 1);
    run.train(0, 3);
    run.optimizer->save_checkpoint(parent + "/a");
    return masters(run);
  });
  const Snapshot one = load(1, "/a");
  EXPECT_EQ(differing(one, load(3, "/a")), 0);
  for (const auto& [name, tensor] : saved) EXPECT_TRUE(tensor.equal(one.at(name))) << name;
  on_ranks(4, [&](const Group& group) {
    CheckpointRun run(replicated(group), group, 7);
    run.optimizer->load_checkpoint(parent + "/a");
    run.optimizer->check_replicas();
    run.optimizer->save_checkpoint(parent + "/b");
    return Snapshot();
  });
  EXPECT_EQ(differing(one, load(2, "/b")), 0);
}

}  // namespace
}  // namespace zero
