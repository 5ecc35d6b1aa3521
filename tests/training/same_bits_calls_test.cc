// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Calls between and around the micro-batches of ZeroOptions::micro_batches: those that begin a step
// anew, change the number of ranks or the parameters leave the bits as they are, and those that
// would make bits depend on the number of ranks are refused on every rank.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adamw.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/training/same_bits_run.h"
#include "zero/checkpoint_options.h"
#include "zero/errors.h"

namespace zero {
namespace {

using Words = std::vector<std::string>;

SameBitsCase small_case(int64_t micro_batches) {
  return {
      .micro_batches = micro_batches, .max_norm = 0.5, .options = ZeroOptions().bucket_bytes(8192)};
}

// The record of rank 0 after `body` on every rank.
Record record_of(int world_size, const SameBitsCase& c,
                 const std::function<void(SameBitsRun&)>& body) {
  Record result;
  run_ranks(
      world_size,
      [&](const Group& group) {
        SameBitsRun run(group, c);
        body(run);
        run.optimizer->check_replicas();
        if (run.optimizer->group().rank() == 0) result = run.record;
      },
      on(Wire::kMemory, std::chrono::seconds(30)));
  return result;
}

Record steps_of_one_rank(const SameBitsCase& c, int steps) {
  return record_of(1, c, [&](SameBitsRun& run) {
    for (int n = 0; n < steps; ++n) run.step(n);
  });
}

// ---------------------------------------------------------------------
// Calls that leave the bits as they are

TEST(SameBitsCallsTest, ReadingsAtTheEndOfAStepLeaveItAsItIs) {
  SameBitsCase c = small_case(6);
  const Record one = steps_of_one_rank(c, 3);
  for (const int64_t stage : {1, 2}) {
    c.options.stage(stage);
    std::vector<Record> readings;
    for (const int world_size : {1, 2, 4}) {
      readings.emplace_back();
      const Record run = record_of(world_size, c, [&](SameBitsRun& r) {
        Record values;
        const auto read = [&](const at::Tensor& value) {
          values.push_back({"reading", value.defined() ? value.clone() : at::zeros({0, 0})});
        };
        for (int n = 0; n < 3; ++n) {
          r.passes(n);
          r.optimizer->reduce_gradients();
          for (const at::Tensor& v : r.model.values) {
            if (stage == 1) read(v.grad());
            read(r.optimizer->gradient(v));
            read(r.optimizer->master(v));
          }
          read(r.optimizer->grad_norm());
          r.optimizer->check_replicas();
          read(r.optimizer->grad_norm(std::numeric_limits<double>::infinity()));
          r.finish(n);
        }
        if (r.optimizer->group().rank() == 0) readings.back() = values;
      });
      EXPECT_EQ(first_difference(one, run), "") << world_size << " ranks, stage " << stage;
      EXPECT_EQ(first_difference(readings[0], readings.back()), "") << world_size << " ranks";
    }
  }
}

TEST(SameBitsCallsTest, TheModulesZeroGradBehindAMicroBatchBeginsTheStepAnew) {
  const SameBitsCase c = small_case(6);
  const Record one = steps_of_one_rank(c, 3);
  for (const int world_size : {1, 2, 3}) {
    const Record run = record_of(world_size, c, [](SameBitsRun& r) {
      for (int n = 0; n < 3; ++n) {
        r.pass(7, *r.optimizer->micro_batches().begin());
        r.model.zero_grad();
        r.step(n);
      }
    });
    EXPECT_EQ(first_difference(one, run), "") << world_size << " ranks";
  }
}

// A rank dies between two steps, or between two micro-batches.
TEST(SameBitsCallsTest, ARunThatLostARankHasTheBitsOfOneThatLostNone) {
  struct Death {
    int rank;
    bool within;
  };
  constexpr int kSteps = 6;
  SameBitsCase c = small_case(6);
  c.options.protect(1);
  const Record one = steps_of_one_rank(small_case(6), kSteps);
  for (const Death& death : {Death{0, false}, {2, false}, {1, true}}) {
    Record after;
    const auto body = [&](const Group& group) {
      SameBitsRun run(group, c);
      for (int n = 0; n < 3; ++n) run.step(n);
      if (group.rank() == death.rank) {
        if (death.within) run.pass(3, *run.optimizer->micro_batches().begin());
        return;
      }
      const auto goes_on = [&](int first) {
        for (int n = first; n < kSteps; ++n) run.step(n);
      };
      EXPECT_THROW(goes_on(3), CommunicationError);
      const auto first = static_cast<int>(run.optimizer->recover().steps);
      EXPECT_EQ(run.optimizer->group().world_size(), 2);
      EXPECT_LE(first, 3);
      // What is made again is recorded again.
      std::erase_if(run.record, [&](const NamedValue& value) {
        return std::stoi(value.name.substr(5)) >= first;
      });
      goes_on(first);
      run.optimizer->check_replicas();
      if (run.optimizer->group().rank() == 0) after = run.record;
    };
    run_ranks(3, body, {.timeout = std::chrono::seconds(20)});
    EXPECT_EQ(first_difference(one, after), "") << "rank " << death.rank << " died";
  }
}

// A closure, losses of several outputs, steps without a gradient, and a save that goes on
// meanwhile.
TEST(SameBitsCallsTest, OtherFormsOfAStep) {
  const std::string folder = ::testing::TempDir() + "same_bits_forms";
  const SameBitsCase c = small_case(5);
  std::vector<Record> records;
  for (const int world_size : {1, 2, 3, 5}) {
    records.push_back(record_of(world_size, c, [&](SameBitsRun& r) {
      ZeroOptimizer& optimizer = *r.optimizer;
      const auto record = [&](const char* what) {
        for (const at::Tensor& v : r.model.values) r.add(what, optimizer.master(v));
      };
      optimizer.step([&] {
        r.passes(0);
        return at::zeros({});
      });
      record("closure");
      for (const int64_t number : optimizer.micro_batches()) {
        const auto given = same_bits_gradients(c, r.model.values, 2, number);
        auto first = given, second = given;
        for (size_t i = 0; i < given.size(); ++i) (i % 2 == 0 ? first : second)[i] = at::Tensor();
        const at::Tensor both =
            at::stack({r.model.loss(first), r.model.loss(second, same_bits_scale(number))});
        optimizer.backward({both.narrow(0, 0, 1), both.narrow(0, 1, 1)},
                           {at::full({1}, 0.5), at::full({1}, 3.0)});
      }
      optimizer.step();
      record("outputs");
      const auto pending = optimizer.save_checkpoint_async(folder, SaveOptions().overwrite(true));
      for (const int64_t number : optimizer.micro_batches()) {
        optimizer.backward(number % 2 == 0 ? at::zeros({}) : at::ones({}));
      }
      optimizer.step();
      record("without a gradient");
      r.step(3);
      optimizer.step();  // without a pass
      pending->finish();
      r.step(4);
      optimizer.load_checkpoint(folder);
      record("loaded");
      r.step(5);
    }));
    EXPECT_EQ(first_difference(records[0], records.back()), "") << world_size << " ranks";
  }
  std::filesystem::remove_all(folder);
}

// Autograd gives both parameters a view of one tensor.
TEST(SameBitsCallsTest, ParametersWhoseGradientsShareMemoryHaveSumsOfTheirOwn) {
  const auto given = [](int64_t number) {
    return random_tensor({4, 2}, static_cast<uint64_t>(number));
  };
  std::vector<at::Tensor> leaves;
  for (int64_t number = 0; number < 8; ++number) leaves.push_back(given(number));
  const at::Tensor expected = tree_sum(leaves) / 8;
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](const Group& group) {
      SameBitsModel model({at::zeros({8}), at::zeros({2, 4})});
      ZeroOptimizer optimizer(model, same_bits_inner(Inner::kAdamW, model.values), group,
                              ZeroOptions().micro_batches(8));
      for (const int64_t number : optimizer.micro_batches()) {
        const at::Tensor both = model.values[0].view({4, 2}) + model.values[1].view({4, 2});
        optimizer.backward(at::sum(both * given(number)));
      }
      for (const at::Tensor& v : model.values) {
        EXPECT_TRUE(at::equal(optimizer.gradient(v).view({4, 2}), expected)) << world_size;
      }
      optimizer.step();
    });
  }
}

// ---------------------------------------------------------------------
// Messages

// Of gradients in one step of rank 0.
std::pair<int64_t, int64_t> messages_of_a_step(int world_size, int64_t micro_batches,
                                               c10::ScalarType dtype) {
  std::pair<int64_t, int64_t> result;
  run_ranks(
      world_size,
      [&](const Group& group) {
        SameBitsModel model(same_bits_values(dtype));
        ZeroOptimizer optimizer(model, same_bits_inner(Inner::kAdamW, model.values), group,
                                ZeroOptions().bucket_bytes(8192).micro_batches(micro_batches));
        const int64_t passes = micro_batches > 0 ? micro_batches / world_size : 1;
        const SameBitsCase c{.drops = false};
        for (int64_t k = 0; k < passes; ++k) {
          optimizer.backward(model.loss(same_bits_gradients(c, model.values, 0, k)));
        }
        optimizer.step();
        const Traffic data = optimizer.stats().data;
        if (group.rank() == 0) result = {data.exchange_calls, data.exchange_bytes_sent};
      },
      on(Wire::kMemory));
  return result;
}

TEST(SameBitsCallsTest, PowersOfTwoSendAsOneMicroBatchOfEachRankDoes) {
  for (const int world_size : {2, 4}) {
    const auto [calls, bytes] = messages_of_a_step(world_size, 0, at::kFloat);
    const int64_t calls_16 = messages_of_a_step(world_size, 0, at::kBFloat16).first;
    for (const int64_t each : {1, 2, 4}) {
      const auto sent = messages_of_a_step(world_size, each * world_size, at::kFloat);
      EXPECT_EQ(sent.first, calls) << each;
      EXPECT_LE(sent.second, bytes + bytes / 4) << each;  // rows end with a block of 256 elements
      // Sums are sent in fp32.
      const auto sent_16 = messages_of_a_step(world_size, each * world_size, at::kBFloat16);
      EXPECT_EQ(sent_16.first, calls_16) << each;
      EXPECT_EQ(sent_16.second, each > 1 ? sent.second : sent.second / 2) << each;
    }
  }
}

// ---------------------------------------------------------------------
// Refusals

// A step, `misuse`, which may leave micro-batches of step 1 but no others behind it, and two steps
// with the bits that they have without.
void expect_survives(const std::function<void(SameBitsRun&)>& misuse, int world_size = 2,
                     SameBitsCase c = small_case(5)) {
  const Record one = steps_of_one_rank(c, 3);
  const Record run = record_of(world_size, c, [&](SameBitsRun& r) {
    r.step(0);
    misuse(r);
    r.step(1);
    r.step(2);
  });
  EXPECT_EQ(first_difference(one, run), "");
}

TEST(SameBitsCallsTest, OptionsThatCannotHaveTheSameBitsAreRefused) {
  struct Refusal {
    ZeroOptions options;
    Words words;
  };
  run_ranks(2, [](const Group& group) {
    SameBitsModel model(same_bits_values(at::kFloat));
    GroupPlacement placement;
    placement.sharded_over(group);
    const std::vector<Refusal> refusals = {
        {ZeroOptions().micro_batches(1), {"micro_batches", "2"}},
        {ZeroOptions().micro_batches(-1), {"micro_batches", "-1"}},
        {ZeroOptions().micro_batches((int64_t{1} << 31) + 1), {"micro_batches", "2147483649"}},
        {ZeroOptions().micro_batches(4).reduce_dtype(at::kBFloat16),
         {"micro_batches", "reduce_dtype"}},
        {ZeroOptions().micro_batches(4).gradient_wire(GradientWire::kBlockInt8),
         {"micro_batches", "kBlockInt8"}},
        {ZeroOptions().micro_batches(4).placement(0, placement), {"micro_batches", "placement"}},
        {ZeroOptions().micro_batches(4).mesh_group(group), {"micro_batches", "a mesh"}},
        {ZeroOptions().micro_batches(4).fused(false), {"micro_batches", "kWholeParameters"}},
    };
    for (const Refusal& r : refusals) {
      expect_words(error_of([&] {
                     ZeroOptimizer(model, same_bits_inner(Inner::kAdamW, model.values), group,
                                   r.options);
                   }),
                   r.words);
    }
    ZeroOptimizer optimizer(model, same_bits_inner(Inner::kAdamW, model.values), group,
                            ZeroOptions().micro_batches(2));
    optimizer.backward(model.loss(same_bits_gradients(small_case(2), model.values, 0, 0)));
    optimizer.step();
  });
}

TEST(SameBitsCallsTest, NumbersWithoutTheOptionAreRefused) {
  run_ranks(2, [](const Group& group) {
    SameBitsModel model(same_bits_values(at::kFloat));
    ZeroOptimizer optimizer(model, same_bits_inner(Inner::kAdamW, model.values), group);
    expect_words(error_of([&] { optimizer.micro_batches(); }),
                 {"micro_batches()", "ZeroOptions::micro_batches"});
    optimizer.backward(model.loss(same_bits_gradients(small_case(2), model.values, 0, 0)));
    optimizer.step();
  });
}

// On some ranks `misuse` throws, all others pass all micro-batches of step 5; then the next
// collective call of all ranks throws, and zero_grad() drops what is left.
void expect_refused_on_all(const std::function<void(SameBitsRun&)>& misuse, const Words& words,
                           const SameBitsCase& c = small_case(5)) {
  for (const bool on_all : {true, false}) {
    SCOPED_TRACE(on_all ? "on all ranks" : "on one rank");
    expect_survives(
        [&](SameBitsRun& r) {
          if (on_all || r.optimizer->group().rank() == 1) {
            expect_words(error_of([&] { misuse(r); }), words);
          } else {
            r.passes(5);
          }
          expect_words(error_of([&] { r.optimizer->grad_norm(); }), words);
          r.optimizer->zero_grad();
        },
        2, c);
  }
}

TEST(SameBitsCallsTest, NoSyncIsRefused) {
  expect_refused_on_all([](SameBitsRun& r) { const auto guard = r.optimizer->no_sync(); },
                        {"no_sync with ZeroOptions::micro_batches", "leave it out"});
}

TEST(SameBitsCallsTest, ABackwardPassOfTheTensorIsRefused) {
  expect_refused_on_all(
      [](SameBitsRun& r) {
        const int64_t number = *r.optimizer->micro_batches().begin();
        r.model.loss(same_bits_gradients(r.c, r.model.values, 5, number)).backward();
      },
      {"gradient of value", "outside of backward()", "micro_batches()"});
}

TEST(SameBitsCallsTest, OneBackwardPassTooManyIsRefused) {
  expect_refused_on_all(
      [](SameBitsRun& r) {
        r.passes(5);
        r.pass(5, 0);
      },
      {"backward()", "micro-batches", "one more pass"});
}

// The pass leaves nothing in p.grad() that the module could reset.
TEST(SameBitsCallsTest, APassWithoutAGradientIsNotDroppedByTheModulesZeroGrad) {
  expect_refused_on_all(
      [](SameBitsRun& r) {
        r.optimizer->backward(at::zeros({}));
        r.model.zero_grad();
        r.passes(5);
      },
      {"backward()", "one more pass", "zero_grad() of the ZeroOptimizer"});
}

// The pass of this rank's first micro-batch of step 4, with a hook that calls within(loss).
void pass_around(SameBitsRun& r, const std::function<void(const at::Tensor&)>& within) {
  const int64_t number = *r.optimizer->micro_batches().begin();
  const auto given = same_bits_gradients(r.c, r.model.values, 4, number);
  at::Tensor between = at::ones({}).requires_grad_() * 2;
  between.register_hook([&](const at::Tensor& g) {
    const at::AutoGradMode enabled(true);
    within(r.model.loss(given));
    return g;
  });
  r.optimizer->backward(between + r.model.loss(given));
}

// As activation checkpointing makes it: a backward pass within another. In the first of several
// micro-batches, and in the last one.
TEST(SameBitsCallsTest, ASecondGradientInOneMicroBatchIsRefused) {
  for (const int64_t micro_batches : {5, 2}) {
    expect_refused_on_all(
        [](SameBitsRun& r) { pass_around(r, [](const at::Tensor& loss) { loss.backward(); }); },
        {"micro_batches", "a second one"}, small_case(micro_batches));
  }
}

TEST(SameBitsCallsTest, APassOfTheOptimizerWithinAnotherIsRefused) {
  expect_refused_on_all(
      [](SameBitsRun& r) {
        pass_around(r, [&](const at::Tensor&) {
          r.optimizer->backward(at::ones({}).requires_grad_() * 3);
        });
      },
      {"micro_batches", "inside a backward pass"});
}

TEST(SameBitsCallsTest, CollectiveCallsBetweenMicroBatchesAreRefused) {
  const std::string folder = ::testing::TempDir() + "same_bits_refused";
  struct Call {
    const char* name;
    std::function<void(SameBitsRun&)> call;
  };
  const std::vector<Call> calls = {
      {"step()", [](SameBitsRun& r) { r.optimizer->step(); }},
      {"clip_grad_norm_()", [](SameBitsRun& r) { r.optimizer->clip_grad_norm_(1.0); }},
      {"clip_grad_norm_()", [](SameBitsRun& r) { r.optimizer->grad_norm(); }},
      {"clip_grad_value_()", [](SameBitsRun& r) { r.optimizer->clip_grad_value_(1.0); }},
      {"reduce_gradients()", [](SameBitsRun& r) { r.optimizer->reduce_gradients(); }},
      {"gradient()", [](SameBitsRun& r) { r.optimizer->gradient(r.model.values[0]); }},
      {"gradients since the last step",
       [&](SameBitsRun& r) { r.optimizer->save_checkpoint(folder); }},
      {"gradients since the last step", [](SameBitsRun& r) { r.optimizer->use_ema().end(); }},
  };
  for (const Call& c : calls) {
    for (const int late : {-1, 0, 1}) {  // the rank that has passed all, or none
      SCOPED_TRACE(::testing::Message() << c.name << " of all but " << late);
      SameBitsCase with_ema = small_case(5);
      with_ema.options.ema(EmaOptions());
      expect_survives(
          [&](SameBitsRun& r) {
            if (r.optimizer->group().rank() == late) {
              r.passes(6);
            } else {
              r.pass(6, *r.optimizer->micro_batches().begin());
            }
            const std::string text = error_of([&] { c.call(r); });
            expect_words(text, {c.name});
            EXPECT_EQ(text.find("INTERNAL"), std::string::npos) << text;
            // The rest of the step is still possible.
            const auto numbers = r.optimizer->micro_batches();
            if (r.optimizer->group().rank() != late) {
              for (const int64_t number : numbers) {
                if (number != *numbers.begin()) r.pass(6, number);
              }
            }
            r.optimizer->grad_norm();
            r.optimizer->zero_grad();
          },
          2, with_ema);
    }
  }
  EXPECT_FALSE(std::filesystem::exists(folder));
}

TEST(SameBitsCallsTest, AllPassesOfSomeRanksBesideNoneOfOthersAreRefused) {
  for (const int64_t micro_batches : {5, 2}) {
    for (const int rank : {0, 1}) {
      expect_survives(
          [&](SameBitsRun& r) {
            if (r.optimizer->group().rank() == rank) r.passes(5);
            for (const auto& call : std::vector<std::function<void()>>{
                     [&] { r.optimizer->step(); }, [&] { r.optimizer->grad_norm(); }}) {
              expect_words(error_of(call),
                           {"backward() of all micro-batches", "backward() of no micro-batch"});
            }
            r.optimizer->zero_grad();
          },
          2, small_case(micro_batches));
    }
  }
}

// As between two micro-batches of one rank.
TEST(SameBitsCallsTest, ASaveWhoseFinishIsRefusedIsCompletedByTheNext) {
  const std::string folder = ::testing::TempDir() + "same_bits_finish";
  const SameBitsCase c = small_case(6);
  // Three steps, and the last two again from the checkpoint.
  Record expected = steps_of_one_rank(c, 3);
  for (const NamedValue& value : Record(expected)) {
    if (!value.name.starts_with("step 0")) expected.push_back(value);
  }
  for (const int world_size : {1, 2, 3}) {
    std::filesystem::remove_all(folder);
    const Record run = record_of(world_size, c, [&](SameBitsRun& r) {
      ZeroOptimizer& optimizer = *r.optimizer;
      r.step(0);
      const auto pending = optimizer.save_checkpoint_async(folder);
      if (optimizer.group().rank() == 0) r.pass(1, *optimizer.micro_batches().begin());
      for (int n = 0; n < 2; ++n) {
        expect_words(error_of([&] { pending->finish(); }), {"save_checkpoint()", "got 1 of"});
      }
      EXPECT_FALSE(std::filesystem::exists(folder));
      for (const int64_t number : optimizer.micro_batches()) {
        if (optimizer.group().rank() > 0 || number > 0) r.pass(1, number);
      }
      r.finish(1);
      r.step(2);
      pending->finish();
      expect_words(error_of([&] { pending->finish(); }), {"one call for each save"});
      optimizer.load_checkpoint(folder);
      r.step(1);
      r.step(2);
    });
    EXPECT_EQ(first_difference(expected, run), "") << world_size << " ranks";
  }
  std::filesystem::remove_all(folder);
}

// One rank has sent its gradients by then, and the other has not.
TEST(SameBitsCallsTest, TheModulesZeroGradBehindAllPassesOfSomeRanksIsRefused) {
  expect_survives(
      [](SameBitsRun& r) {
        r.pass(4, *r.optimizer->micro_batches().begin());
        r.model.zero_grad();
        r.passes(4);
        expect_words(error_of([&] { r.optimizer->grad_norm(); }),
                     {"expected the same call", "reductions dropped",
                      "call zero_grad() of the ZeroOptimizer on all ranks instead"});
        r.optimizer->zero_grad();
      },
      2, small_case(3));
}

TEST(SameBitsCallsTest, NormsOfOtherTypesAreRefused) {
  expect_survives([](SameBitsRun& r) {
    r.passes(5);
    for (const double type : {1.0, 3.0}) {
      expect_words(error_of([&] { r.optimizer->clip_grad_norm_(1.0, type); }),
                   {"norm_type", "micro_batches"});
    }
    r.optimizer->grad_norm(std::numeric_limits<double>::infinity());
    r.optimizer->zero_grad();
  });
}

// Of a parameter that the micro-batches use, and of one that they do not.
TEST(SameBitsCallsTest, AGradientPutByHandIsRefused) {
  for (const size_t parameter : {size_t{0}, kUnusedValue}) {
    expect_survives([&](SameBitsRun& r) {
      const at::Tensor& value = r.model.values[parameter];
      value.mutable_grad() = at::ones_like(value);
      expect_words(error_of([&] { r.passes(4); }), {"belongs to no micro-batch"});
      r.optimizer->zero_grad();
    });
  }
}

TEST(SameBitsCallsTest, AGradientPutByHandOnOneRankIsRefusedOnAll) {
  expect_survives([](SameBitsRun& r) {
    if (r.optimizer->group().rank() == 0) {
      r.model.values[0].mutable_grad() = at::ones_like(r.model.values[0]);
    }
    EXPECT_NE(error_of([&] { r.optimizer->grad_norm(); }).find("belongs to no micro-batch"),
              std::string::npos);
    r.optimizer->zero_grad();
  });
}

}  // namespace
}  // namespace zero
