// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints whose checksums are right and whose content is not: a load refuses them,
// in bounded time and memory, before it has changed anything.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/files.h"
#include "tests/support/forged_manifest.h"
#include "tests/support/peak_memory.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/json.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/format/safetensors.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

Training fp16(Inner inner = Inner::kAdamW) {
  Training t;
  t.inner = inner;
  t.dtype = at::kHalf;
  t.options.loss_scaler(LossScalerOptions().initial_scale(256));
  return t;
}

// A checkpoint of two ranks whose manifest can be changed and signed again.
class Forgery {
 public:
  explicit Forgery(const std::string& name, Inner inner = Inner::kAdamW)
      : training_(fp16(inner)), folder_(fresh_folder(name) + "/a") {
    run_ranks(2, [&](const Group& group) {
      CheckpointRun run(training_, group, 1);
      run.train(0, 2);
      run.optimizer->save_checkpoint(folder_);
    });
    text_ = content(manifest());
  }

  std::string manifest() const { return folder_ + "/" + kManifestName; }
  const std::string& folder() const { return folder_; }
  const Training& training() const { return training_; }

  // And puts `by` in place of `what`, where no manifest is written so.
  void change(const std::function<void(Manifest&)>& edit, const std::string& what = {},
              const std::string& by = {}) {
    Manifest m = parse_manifest(text_, "m");
    edit(m);
    overwrite(manifest(), signed_again(replaced(manifest_text(m), what, by)));
  }
  void change_text(const std::string& what, const std::string& by) {
    overwrite(manifest(), signed_again(replaced(text_, what, by)));
  }

  // Loads on `world_size` ranks and expects an error with `words`, and no change at all.
  void expect_refused(const std::vector<std::string>& words, int world_size = 2,
                      const LoadOptions& options = {}) const {
    run_ranks(world_size, [&](const Group& group) {
      CheckpointRun run(training_, group, 7);
      run.train(0, 1);
      const Snapshot before = run.snapshot();
      expect_words(error_of([&] { run.optimizer->load_checkpoint(folder_, options); }), words);
      EXPECT_EQ(differing(before, run.snapshot()), 0) << words[0];
      run.train(1, 2);
    });
  }

 private:
  const Training training_;
  const std::string folder_;
  std::string text_;
};

using Edit = std::function<void(Manifest&)>;

TEST(HostileTest, ALossScaleThatCannotBeOneIsRefusedBeforeAnythingChanges) {
  Forgery forgery("scale");
  for (const double scale : {0.0, -1.0, 1e-320}) {
    forgery.change([&](Manifest& m) { m.scale = scale; });
    for (int world_size : {1, 2, 3}) forgery.expect_refused({"loss scale", "positive"}, world_size);
  }
  for (const char* text : {"null", "1e999", "\"inf\"", "true"}) {
    forgery.change_text("\"scale\":256.0", std::string("\"scale\":") + text);
    forgery.expect_refused({kManifestName});
  }
}

TEST(HostileTest, CountersThatWouldOverflowAreRefused) {
  Forgery forgery("counters");
  const std::vector<Edit> edits = {
      [](Manifest& m) { m.steps = kCountLimit; },
      [](Manifest& m) { m.skipped_steps = kCountLimit; },
      [](Manifest& m) { m.good_steps = kCountLimit; },
      [](Manifest& m) { m.hysteresis_left = kCountLimit; },
      [](Manifest& m) { m.skipped_at_min = kCountLimit; },
  };
  for (const Edit& edit : edits) {
    forgery.change(edit, std::to_string(kCountLimit), std::to_string(INT64_MAX));
    forgery.expect_refused({kManifestName, "expected at most 9007199254740992"});
  }
}

void drop_tensors(Manifest& m, const std::string& owner, const std::string& kind,
                  bool first_only = false) {
  for (size_t i = 0; i < m.tensors.size(); ++i) {
    ManifestTensors& entry = m.tensors[i];
    if (entry.owner != owner || std::erase(entry.kinds, kind) == 0 || !first_only) continue;
    ManifestTensors others = entry;  // which keep it
    others.kinds.push_back(kind);
    others.pieces.erase(others.pieces.begin());
    entry.pieces.resize(1);
    m.tensors.push_back(std::move(others));
    return;
  }
}

TEST(HostileTest, StateThatTheOptimizerCannotDoWithoutIsADifference) {
  const std::vector<std::pair<Inner, std::vector<std::string>>> needed = {
      {Inner::kAdamW, {"exp_avg", "exp_avg_sq", "step"}},
      {Inner::kAdam, {"exp_avg", "exp_avg_sq", "step"}},
      {Inner::kRmsprop, {"square_avg", "step"}},
      {Inner::kAdagrad, {"sum", "step"}},
  };
  for (const auto& [inner, kinds] : needed) {
    Forgery forgery("state", inner);
    for (const std::string& kind : kinds) {
      forgery.change([&](Manifest& m) { drop_tensors(m, "trunk.weight", kind); });
      forgery.expect_refused(
          {"parameter trunk.weight: state " + kind + " missing", "strict(false)"});
      // Without strict its state stays as it is, and everything else is loaded.
      run_ranks(2, [&](const Group& group) {
        CheckpointRun run(forgery.training(), group, 7);
        run.train(0, 1);
        const Snapshot before = run.snapshot();
        const auto report =
            run.optimizer->load_checkpoint(forgery.folder(), LoadOptions().strict(false));
        EXPECT_EQ(report.differences.size(), 1u);
        const Snapshot after = run.snapshot();
        for (const char* part : {"exp_avg", "exp_avg_sq", "square_avg", "sum", "step"}) {
          const std::string name = std::string(part) + "/trunk.weight";
          EXPECT_TRUE(after.at(name).equal(before.at(name))) << name;
        }
        EXPECT_FALSE(after.at("master/trunk.weight").equal(before.at("master/trunk.weight")));
        run.train(1, 2);
      });
    }
  }
}

TEST(HostileTest, APieceWithoutAStepIsRefused) {
  Forgery forgery("piece");
  std::string cut;  // a parameter with pieces on both ranks
  forgery.change([&](Manifest& m) {
    for (const ManifestTensors& entry : m.tensors) {
      if (entry.pieces.size() > 1 && entry.kinds.size() > 1) cut = entry.owner;
    }
    drop_tensors(m, cut, "step", /*first_only=*/true);
  });
  ASSERT_FALSE(cut.empty());
  for (int world_size : {1, 2, 3})
    forgery.expect_refused({cut, "step", "in a stored range, got none"}, world_size);
}

TEST(HostileTest, AStepThatIsNegativeOrWouldOverflowIsRefused) {
  for (const int64_t step : {int64_t{-1}, INT64_MAX}) {
    Forgery forgery("step");
    // The first file again, with other steps in it.
    forgery.change([&](Manifest& m) {
      const std::string path = forgery.folder() + "/" + m.files[0].name;
      CheckpointReader reader(forgery.folder());
      FileToSave file{m.files[0].name, {}};
      for (const ManifestTensors& entry : m.tensors) {
        for (const ManifestPiece& p : entry.pieces) {
          if (p.file != 0) continue;
          for (const std::string& kind : entry.kinds) {
            at::Tensor tensor = at::full({1}, step, at::kLong);
            if (kind != "step") {
              tensor = at::empty({p.numel});
              reader.read(kind, {{entry.owner, p.begin, p.numel}}, {tensor});
            }
            file.tensors.push_back({{entry.owner, kind, p.begin, p.numel}, tensor});
          }
        }
      }
      fs::remove(path);
      m.files[0] = write_file(file, path, m.id).about;
    });
    forgery.expect_refused({"expected a step from 0", std::to_string(step)});
  }
}

TEST(HostileTest, OptionsThatNoOptimizerHasAreRefused) {
  Forgery forgery("options");
  forgery.change([](Manifest& m) { m.groups[0].emplace_back("speed", 3.0); });
  forgery.expect_refused({"parameter group 0: option speed in the checkpoint, unknown here"});
  const auto set_option = [&](const std::string& name, double value) {
    forgery.change([&](Manifest& m) {
      for (auto& option : m.groups[0]) {
        if (option.first == name) option.second = value;
      }
    });
  };
  for (const double value : {INFINITY, -INFINITY, NAN}) {
    set_option("lr", value);
    forgery.expect_refused(
        {"parameter group 0: expected a number as lr", "restore_options(false)"});
    forgery.expect_refused({"a number as lr"}, 1, LoadOptions().strict(false));
  }
  // The present options are kept, so those of the checkpoint do no harm.
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(forgery.training(), group, 7);
    run.optimizer->load_checkpoint(forgery.folder(), LoadOptions().restore_options(false));
    run.train(2, 3);
  });
  set_option("beta1", NAN);
  forgery.expect_refused({"expected a number as beta1, got nan"});
  for (const char* groups : {"[3]", "[[]]", "[null]", "3", "\"x\""}) {
    forgery.change([](Manifest& m) { m.groups.clear(); });
    overwrite(forgery.manifest(),
              signed_again(replaced(content(forgery.manifest()), "\"groups\":[]",
                                    std::string("\"groups\":") + groups)));
    forgery.expect_refused({kManifestName});
  }
}

std::string refusal(const std::string& text) {
  return error_of([&] { parse_manifest(text, "m"); });
}

std::string many(int count, const std::function<std::string(int)>& entry) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (i > 0 ? "," : "") + entry(i);
  return text;
}

double cpu_seconds(const std::function<void()>& work) {
  const std::clock_t start = std::clock();
  work();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

TEST(LimitTest, ManyEntriesTakeTimeInProportionAndMoreAreRefused) {
  const auto entry = [](int i) { return "\"entry" + std::to_string(i) + "\":\"x\""; };
  const std::string most = forged("\"metadata\":{}", "\"metadata\":{" + many(100000, entry) + "}");
  // A linear search for each of them took 7 s.
  EXPECT_LT(cpu_seconds([&] { EXPECT_EQ(parse_manifest(most, "m").metadata.size(), 100000u); }), 3);
  expect_words(refusal(forged("\"metadata\":{}", "\"metadata\":{" + many(100001, entry) + "}")),
               {"metadata", "at most 100000"});
  expect_words(
      refusal(forged("\"groups\":[]",
                     "\"groups\":[" + many(100001, [](int) { return std::string("{}"); }) + "]")),
      {"groups", "at most 100000"});
}

// 200 MB of text, which take minutes of an unoptimized build: in the long test alone.
TEST(LimitTest, ManySmallValuesAreRefusedBeforeTheyTakeMemory) {
  if (std::getenv("ZERO_MANY_VALUES") == nullptr) GTEST_SKIP() << "set ZERO_MANY_VALUES";
  std::string text;
  {
    std::string groups;
    for (int64_t i = 0; i < kValuesLimit; ++i) groups += "[],";
    text = forged("\"groups\":[]", "\"groups\":[" + groups + "[]]");
  }
  // They would take 4 GB, and what the parser keeps of the text up to twice its size.
  EXPECT_LT(peak_growth([&] { expect_words(refusal(text), {"at most 67108864 values"}); }), 500);
  text = {};
  Manifest m;
  m.files.resize(1);
  m.files[0].name = "rank";
  m.tensors = {{"p", {"master"}, std::vector<ManifestPiece>(kValuesLimit / 3)}};
  expect_words(error_of([&] { manifest_text(m); }), {"and 67108864 values", "Layout::kContiguous"});
}

TEST(LimitTest, AHeaderThatIsTooLargeIsRefusedWithWhatMakesItSmaller) {
  if (std::getenv("ZERO_MANY_VALUES") == nullptr) GTEST_SKIP() << "set ZERO_MANY_VALUES";
  std::vector<StoredTensor> tensors{
      {std::string(kSafetensorsHeaderLimit, 'a'), at::kFloat, {1}, 0, 0}};
  expect_words(error_of([&] { lay_out_safetensors(tensors, {}, "a file"); }),
               {"a file: expected a header of at most 100000000 bytes, got 1000000",
                "shorter names, fewer tensors", "max_file_bytes", "more ranks"});
}

TEST(LimitTest, ManyPartsOfOneNameTakeTimeInProportion) {
  const std::string folder = fresh_folder("many_parts");
  const auto entry = [](int) {
    return std::string(R"({"name":"p","shape":[1],"strides":[1],"dtype":"Float","group":0})");
  };
  overwrite(folder + "/" + kManifestName,
            forged("\"parameters\":[]", "\"parameters\":[" + many(50000, entry) + "]"));
  EXPECT_LT(cpu_seconds([&] {
              expect_words(error_of([&] { export_model(folder, folder + "/model"); }),
                           {"expected parts of 1 elements together, got 0"});
            }),
            5);
}

TEST(LimitTest, WhatCouldNotBeLoadedIsNotSaved) {
  const std::string parent = fresh_folder("unloadable");
  SaveOptions options;
  for (int i = 0; i < 100001; ++i) options.metadata()[std::to_string(i)] = "x";
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 1);
    run.optimizer->save_checkpoint(parent + "/a");
    expect_words(error_of([&] {
                   run.optimizer->save_checkpoint(parent + "/a",
                                                  SaveOptions(options).overwrite(true));
                 }),
                 {"at most 100000 entries of metadata, got 100001"});
    run.optimizer->load_checkpoint(parent + "/a");
  });
}

TEST(LimitTest, ALargeFileThatIsNoManifestTakesNoMemory) {
  const std::string folder = fresh_folder("large");
  overwrite(folder + "/" + kManifestName, "{");
  fs::resize_file(folder + "/" + kManifestName, kManifestLimit - 1);  // sparse
  const double grown = peak_growth([&] {
    expect_words(error_of([&] { verify_checkpoint(folder); }), {"matches its checksum"});
  });
  EXPECT_LT(grown, 64);
  fs::resize_file(folder + "/" + kManifestName, kManifestLimit + 1000);
  expect_words(error_of([&] { verify_checkpoint(folder); }), {"expected a manifest of at most"});
}

TEST(NotAFileTest, PipesAndDevicesAreRefusedAtOnce) {
  Forgery forgery("pipes");
  const std::string parent = fs::path(forgery.folder()).parent_path();
  for (const char* name :
       {kManifestName, "rank-00001.safetensors", "frozen.safetensors", "buffers.safetensors"}) {
    const std::string path = forgery.folder() + "/" + name;
    const std::string bytes = content(path);
    fs::remove(path);
    ASSERT_EQ(mkfifo(path.c_str(), 0644), 0);
    forgery.expect_refused({name, "as a file"});
    EXPECT_NE(error_of([&] { verify_checkpoint(forgery.folder()); }), "");
    if (name == std::string(kManifestName)) {
      EXPECT_EQ(latest(parent), std::nullopt);
      EXPECT_TRUE(keep_last(parent, 1).empty());
    }
    fs::remove(path);
    fs::create_symlink("/dev/zero", path);
    forgery.expect_refused({name, "as a file"});
    fs::remove(path);
    overwrite(path, bytes);
  }
  verify_checkpoint(forgery.folder());
}

TEST(TextTest, ANulIsShownAndEndsNoErrorText) {
  const auto with_name = [](const std::string& name) {
    return forged("\"files\":[]", "\"files\":[{\"name\":\"" + name +
                                      "\",\"bytes\":1,\"xxh3\":\"0000000000000000\","
                                      "\"blocks\":0}]");
  };
  expect_words(refusal(with_name("rank\\u0000zero")),
               {"m: name: expected text without a NUL", "rank\\x00zero\""});
  expect_words(refusal(with_name("../a\\u0007")), {"plain file name", "../a\\x07\""});
  // A user's own text may hold anything that is UTF-8.
  const std::string text = forged("\"metadata\":{}", "\"metadata\":{\"a\":\"b\\u0000c\"}");
  EXPECT_EQ(parse_manifest(text, "m").metadata.at("a"), std::string("b\0c", 3));
}

TEST(TextTest, AnObjectWithANameTwiceIsRefused) {
  expect_words(refusal(forged("\"steps\":0", "\"steps\":0,\"steps\":7")),
               {"once in an object", "\"steps\" twice"});
}

}  // namespace
}  // namespace zero
