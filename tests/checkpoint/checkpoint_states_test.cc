// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Objects that a save includes get their state from the checkpoint, on all ranks or on none.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint_options.h"
#include "zero/lr_schedule.h"

namespace zero {
namespace {

// The caller's own: a sampler or a data loader.
class Position : public Stateful {
 public:
  explicit Position(std::string now = {}) : now_(std::move(now)) {}
  std::string state() const override {
    if (now_ == "no state") throw std::runtime_error("a position without a state");
    if (now_ == "nothing known") throw 1;
    return now_;
  }
  void set_state(const std::string& state) override {
    ++calls;
    now_ = state.substr(0, 1);  // halfway
    if (refuses == "everything") throw 1;
    if (state == refuses) throw std::out_of_range("no such position");
    now_ = state;
  }

  std::string refuses = "(nothing)";
  int calls = 0;

 private:
  std::string now_;
};

std::string rank_text(const Group& group) { return std::to_string(group.rank()); }

class CheckpointStatesTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointStatesTest, ::testing::Values(1, 2, 3),
                         [](const auto& info) { return "W" + std::to_string(info.param); });

TEST_P(CheckpointStatesTest, EveryRankGetsRankZerosStateAndItsOwnOfEachRank) {
  const std::string folder = fresh_folder("states" + std::to_string(GetParam())) + "/a";
  const std::string bytes("\0\xff\n", 3);  // no text
  run_ranks(GetParam(), [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(0, 2);
    const Position shared(bytes + rank_text(group)), own("of " + rank_text(group)), empty;
    const auto save = SaveOptions()
                          .include("a parameter's name: trunk.weight", shared)
                          .include_per_rank("own", own)
                          .include_per_rank("empty", empty);
    if (GetParam() == 2) {
      run.optimizer->save_checkpoint_async(folder, save)->finish();
    } else {
      run.optimizer->save_checkpoint(folder, save);
    }
    CheckpointRun other(Training(), group, 5);
    Position a, b, c("not empty");
    const LoadReport report =
        other.optimizer->load_checkpoint(folder, LoadOptions()
                                                     .include("a parameter's name: trunk.weight", a)
                                                     .include_per_rank("empty", c)
                                                     .include_per_rank("own", b));
    EXPECT_EQ(a.state(), bytes + "0");
    EXPECT_EQ(b.state(), "of " + rank_text(group));
    EXPECT_EQ(c.state(), "");
    EXPECT_TRUE(report.differences.empty());
    EXPECT_EQ(differing(run.snapshot(), other.snapshot()), 0);
  });
  verify_checkpoint(folder);
}

TEST_P(CheckpointStatesTest, AScheduleAndRandomNumbersGoOnAsIfTheyHadNotStopped) {
  const std::string folder = fresh_folder("goes-on" + std::to_string(GetParam())) + "/a";
  run_ranks(GetParam(), [&](const Group& group) {
    const LrFactor factor = linear_warmup(3, cosine_decay(10));
    const auto seed = static_cast<uint64_t>(group.rank());
    CheckpointRun run(Training(), group, 1), other(Training(), group, 5);
    LrSchedule schedule(*run.optimizer, factor), resumed(*other.optimizer, factor);
    at::Generator generator = at::detail::createCPUGenerator(seed);
    at::Generator another = at::detail::createCPUGenerator(100 + seed);
    const RandomState random({generator});
    RandomState loaded({another});
    for (int step = 0; step < 5; ++step) schedule.step();
    at::randn({7}, generator);
    run.optimizer->save_checkpoint(
        folder, SaveOptions().include("schedule", schedule).include_per_rank("random", random));
    // The schedule sets its learning rates although options are not restored.
    other.optimizer->load_checkpoint(folder, LoadOptions()
                                                 .restore_options(false)
                                                 .include("schedule", resumed)
                                                 .include_per_rank("random", loaded));
    for (int step = 5; step < 9; ++step) {
      EXPECT_EQ(run.optimizer->param_groups()[0].options().get_lr(),
                other.optimizer->param_groups()[0].options().get_lr());
      EXPECT_TRUE(at::equal(at::randn({7}, generator), at::randn({7}, another)));
      schedule.step();
      resumed.step();
    }
  });
}

// Of ranks that save and ranks that load.
class OtherRanksTest : public ::testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OtherRanksTest,
                         ::testing::Values(std::pair(2, 3), std::pair(3, 2), std::pair(1, 3),
                                           std::pair(3, 1)),
                         [](const auto& info) {
                           return "From" + std::to_string(info.param.first) + "To" +
                                  std::to_string(info.param.second);
                         });

TEST_P(OtherRanksTest, RanksWithoutAStateKeepTheirOwnAndTheReportSaysSo) {
  const auto [from, to] = GetParam();
  const std::string folder =
      fresh_folder("other" + std::to_string(from) + std::to_string(to)) + "/a";
  run_ranks(from, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    const Position shared("shared"), own("saved " + rank_text(group));
    run.optimizer->save_checkpoint(
        folder, SaveOptions().include("shared", shared).include_per_rank("own", own));
  });
  run_ranks(to, [&, saved = from](const Group& group) {
    CheckpointRun run(Training(), group, 5);
    Position shared, own("present");
    const LoadReport report = run.optimizer->load_checkpoint(
        folder, LoadOptions().include("shared", shared).include_per_rank("own", own));
    EXPECT_EQ(shared.state(), "shared");
    EXPECT_EQ(own.state(), group.rank() < saved ? "saved " + rank_text(group) : "present");
    ASSERT_EQ(report.differences.size(), 1u);
    expect_words(report.differences[0],
                 {"state own", std::to_string(saved) + " ranks", std::to_string(to) + " ranks"});
    // It is the same run still.
    run.optimizer->save_checkpoint(folder + "-next");
    EXPECT_EQ(read_manifest(folder + "-next").run, report.run);
    EXPECT_NE(report.run, "");
  });
}

TEST(CheckpointStatesErrorTest, AMissingStateIsAnErrorAndWithoutStrictADifference) {
  const std::string folder = fresh_folder("missing") + "/a";
  run_ranks(3, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    const Position shared("shared"), own("own");
    run.optimizer->save_checkpoint(
        folder, SaveOptions().include("shared", shared).include_per_rank("own", own));
    run.train(0, 1);
    const Snapshot before = run.snapshot();
    Position present("present");
    // As written by versions that knew of no states; or saved in the other way.
    const auto absent = LoadOptions().include("sampler", present);
    const auto as_own = LoadOptions().include_per_rank("shared", present);
    const auto as_shared = LoadOptions().include("own", present);
    for (LoadOptions load : {absent, as_own, as_shared}) {
      const std::string& name = load.states()[0].name;
      expect_words(error_of([&] { run.optimizer->load_checkpoint(folder, load); }),
                   {"state " + name, "included in this load", "strict(false)"});
      EXPECT_EQ(differing(before, run.snapshot()), 0);
      CheckpointRun other(Training(), group, 5);
      const LoadReport report = other.optimizer->load_checkpoint(folder, load.strict(false));
      ASSERT_GE(report.differences.size(), 1u);
      expect_words(report.differences[0], {"state " + name});
    }
    EXPECT_EQ(present.state(), "present");
    EXPECT_EQ(present.calls, 0);
  });
}

TEST(CheckpointStatesErrorTest, AStateThatIsLeftOutIsReportedAndWarnedOf) {
  const std::string folder = fresh_folder("left-out") + "/a";
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    const Position shared("shared"), own("own");
    run.optimizer->save_checkpoint(
        folder, SaveOptions().include("sampler", shared).include_per_rank("own", own));
    const LoadReport report = run.optimizer->load_checkpoint(folder);
    ASSERT_EQ(report.differences.size(), 2u);
    expect_words(report.differences[0] + report.differences[1],
                 {"state sampler: in the checkpoint, not included in this load", "state own"});
  });
  const std::string output = ::testing::internal::GetCapturedStderr();
  expect_words(output, {"state sampler: in the checkpoint, not included"});
  EXPECT_EQ(output.find("state sampler"), output.rfind("state sampler")) << "by one rank";
}

TEST(CheckpointStatesErrorTest, AStateThatOneRankRefusesChangesNothingOnAnyRank) {
  const std::string folder = fresh_folder("refused") + "/a";
  run_ranks(3, [&](const Group& group) {
    const LrFactor factor = linear_warmup(3, cosine_decay(10));
    CheckpointRun run(Training(), group, 1);
    LrSchedule schedule(*run.optimizer, factor);
    schedule.set_step(4);
    const Position first("first"), last("saved of " + rank_text(group));
    run.optimizer->save_checkpoint(folder, SaveOptions()
                                               .include("schedule", schedule)
                                               .include("first", first)
                                               .include_per_rank("last", last));
    CheckpointRun other(Training(), group, 5);
    LrSchedule present(*other.optimizer, factor);
    present.set_step(1);
    other.train(0, 2);
    // Not what the schedule would set.
    for (auto& g : other.optimizer->param_groups()) g.options().set_lr(0.125);
    const Snapshot before = other.snapshot();
    Position a("former a"), b("former b");
    b.refuses = "saved of 1";
    const auto load =
        LoadOptions().include("schedule", present).include("first", a).include_per_rank("last", b);
    for (const bool restore : {true, false}) {
      expect_words(error_of([&] {
                     other.optimizer->load_checkpoint(folder,
                                                      LoadOptions(load).restore_options(restore));
                   }),
                   {"rank " + rank_text(group), "rank 1", "no such position"});
      EXPECT_EQ(a.state(), "former a");
      EXPECT_EQ(b.state(), "former b");
      EXPECT_EQ(present.steps(), 1);
      EXPECT_EQ(differing(before, other.snapshot()), 0);
    }
    // It refuses its own former state too.
    if (group.rank() == 1) b.refuses = "everything";
    expect_words(error_of([&] { other.optimizer->load_checkpoint(folder, load); }),
                 {"rank " + rank_text(group), "rank 1", "an exception that is no std::exception"});
    EXPECT_EQ(a.state(), "former a");
    EXPECT_EQ(present.steps(), 1);
    EXPECT_EQ(differing(before, other.snapshot()), 0);
    b.refuses = "(nothing)";
    other.optimizer->load_checkpoint(folder, load);
    EXPECT_EQ(b.state(), "saved of " + rank_text(group));
    EXPECT_EQ(present.steps(), 4);
    EXPECT_EQ(differing(run.snapshot(), other.snapshot()), 0);
  });
}

TEST(CheckpointStatesErrorTest, ASaveThatCannotHaveAStateFailsOnAllRanksAndLeavesNothing) {
  const std::string parent = fresh_folder("unsaved");
  run_ranks(3, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    const auto refuses = [&](const char* state, const char* words) {
      const Position position(group.rank() == 2 ? state : "a state");
      expect_words(error_of([&] {
                     run.optimizer->save_checkpoint(
                         parent + "/a", SaveOptions().include_per_rank("position", position));
                   }),
                   {"rank 2", words});
    };
    refuses("no state", "state() of \"position\": a position without a state");
    refuses("nothing known", "an exception that is no std::exception");
    const Position position("a state");
    // Names are compared before anything is written or read.
    const std::string name = group.rank() == 1 ? "sampler" : "batches";
    expect_words(error_of([&] {
                   run.optimizer->save_checkpoint(parent + "/a",
                                                  SaveOptions().include(name, position));
                 }),
                 {"sampler", "batches"});
    Position other;
    run.optimizer->save_checkpoint(parent + "/a");
    expect_words(error_of([&] {
                   run.optimizer->load_checkpoint(parent + "/a",
                                                  group.rank() == 1
                                                      ? LoadOptions().include("b", other)
                                                      : LoadOptions().include_per_rank("b", other));
                 }),
                 {"state b", "state per rank b"});
    run.train(0, 1);  // the optimizer still works
    expect_words(error_of([&] {
                   SaveOptions().include("twice", position).include_per_rank("twice", position);
                 }),
                 {"one object", "twice"});
    EXPECT_NE(error_of([&] { LoadOptions().include("", other); }), "");
  });
  EXPECT_EQ(latest(parent), parent + "/a");
}

// Only rank 0 has that state, so that the others cannot know.
TEST(CheckpointStatesErrorTest, AFileThatOneRankCannotMakeIsAnErrorAtTheEndOfTheSaveOnAllRanks) {
  const std::string parent = fresh_folder("unmade");
  run_ranks(3, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    const Position position("a state");
    const auto save = SaveOptions().include("no text: \xff", position);
    const std::vector<std::string> expected = {"rank 0", ".no text: ", "expected a name in UTF-8",
                                               "rename it"};
    expect_words(error_of([&] { run.optimizer->save_checkpoint(parent + "/a", save); }), expected);
    const auto pending = run.optimizer->save_checkpoint_async(parent + "/a", save);
    run.train(0, 1);
    expect_words(error_of([&] { pending->finish(); }), expected);
    run.train(1, 2);
    run.optimizer->save_checkpoint_async(parent + "/b")->finish();
  });
  EXPECT_EQ(latest(parent), parent + "/b");
  EXPECT_FALSE(std::filesystem::exists(parent + "/a"));
}

}  // namespace
}  // namespace zero
