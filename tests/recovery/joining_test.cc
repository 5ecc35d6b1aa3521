// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A process that joins a job: what it takes over, and what the others do with one that does not
// fit. Its bits are compared in recovery_test.
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/lr_schedule.h"
#include "zero/rendezvous/bounded_store.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr int kRanks = 2;
constexpr int kNewcomer = 2;

// Of a job of two ranks, and of the processes that join it. `name` keeps its keys from others'.
Group group_in_job(const Group& threads, std::chrono::milliseconds timeout,
                   BackendFactory factory = gloo_factory(/*shared_memory=*/false),
                   const std::string& name = "job") {
  const bool joins = threads.rank() >= kNewcomer;
  Joining joining{joins};
  joining.find_topology = [](const auto&, int, int world_size) {
    return Topology::of_equal_machines(world_size, 1);
  };
  return Group(BoundedStore::of(threads.store(), timeout)->under(name), threads.rank(),
               joins ? threads.rank() + 1 : kRanks, name, std::move(factory), at::kCPU, timeout,
               std::nullopt, joining);
}

struct Member {
  Member(const Group& group, uint64_t seed, const ZeroOptions& options, Inner inner = Inner::kAdamW,
         int64_t width = 0)
      : model(width == 0 ? OddModel(seed) : OddModel(seed, width)),
        optimizer(*model, make_inner(inner, *model), group, options) {}

  int64_t steps() const { return optimizer.stats().steps; }

  void pass(int64_t number) {
    const auto seed = static_cast<uint64_t>(steps() * 10 + number);
    optimizer.backward(model->loss(random_tensor({3, 17}, seed), random_tensor({3, 11}, seed + 5),
                                   OddModelImpl::kAll));
  }
  void step() {
    if (optimizer.options().micro_batches() > 0) {
      for (const int64_t number : optimizer.micro_batches()) pass(number);
    } else {
      pass(optimizer.group().rank());
    }
    optimizer.step();
    if (schedule != nullptr) schedule->step();
  }
  // Trains until a process waits to join, and returns that error.
  std::string train_until_one_waits() {
    for (int i = 0; i < 4000; ++i) {
      const std::string text = error_of([&] { step(); });
      if (!text.empty()) return text;
    }
    return "none waited";
  }
  // Makes a step, which `trained` counts, and others until process 2 waits to join.
  void train_until_joined(std::latch& trained) {
    step();
    trained.count_down();
    expect_words(train_until_one_waits(), {"process 2 waits to join"});
  }

  OddModel model;
  ZeroOptimizer optimizer;
  LrSchedule* schedule = nullptr;
};

void run_job(const std::function<void(const Group& job)>& body,
             std::chrono::milliseconds timeout = std::chrono::seconds(30), int processes = 3) {
  run_ranks(processes, [&](const Group& threads) { body(group_in_job(threads, timeout)); },
            {.transport = Transport::kGloo});
}

TEST(JoiningTest, TheNewRankHasWhatTheOthersHave) {
  std::latch trained(2);
  run_job([&](const Group& job) {
    if (job.joins()) trained.wait();
    EXPECT_EQ(job.joins(), job.rank() == kNewcomer);
    // Other initial values on each rank, so that nothing is right by chance.
    const auto seed = static_cast<uint64_t>(job.rank() + 1);
    std::optional<Member> m;
    const auto rule = std::make_shared<OutlierRule>(/*sigmas=*/1e6);
    m.emplace(job, seed, ZeroOptions().bucket_bytes(900).protect(1).skip_if(rule));
    // As a program without ranks that join has it: base rates are those of construction.
    LrSchedule schedule(m->optimizer, linear_warmup(1000, cosine_decay(9000)));
    if (job.joins()) schedule.set_step(m->steps());
    m->schedule = &schedule;
    if (!job.joins()) {
      for (int i = 0; i < 3; ++i) m->step();
      trained.count_down();
      expect_words(m->train_until_one_waits(), {"process 2 waits to join", "call recover()"});
      const int64_t before = m->steps();
      const RecoveryReport report = m->optimizer.recover();
      EXPECT_EQ(report.members, (std::vector<int>{0, 1, 2}));
      // The last one if its copies have arrived, or else the one before.
      EXPECT_GE(report.steps, before - 1);
      EXPECT_EQ(report.steps, m->steps());
      schedule.set_step(report.steps);
    }
    const Group& now = m->optimizer.group();
    EXPECT_FALSE(now.joins());
    EXPECT_EQ(now.world_size(), 3);
    EXPECT_EQ(now.global_ranks(), (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(now.topology().machines(), 3) << "found anew";
    EXPECT_GE(m->steps(), 2);
    const double lr = m->optimizer.param_groups()[0].options().get_lr();
    const auto all =
        now.make_communicator("steps", Purpose::kControl)
            ->all_gather_text(std::to_string(m->steps()) + " " + std::to_string(lr * 1e6), "steps");
    EXPECT_EQ(all, std::vector<std::string>(3, all[0]));
    m->optimizer.check_replicas();
    for (int i = 0; i < 3; ++i) m->step();
    m->optimizer.check_replicas();
    const auto states =
        now.make_communicator("rules", Purpose::kControl)->all_gather_text(rule->state(), "rules");
    EXPECT_EQ(states, std::vector<std::string>(3, states[0]));
    EXPECT_EQ(std::count(states[0].begin(), states[0].end(), ','),
              std::min<int64_t>(m->steps(), 128));
  });
}

// Whether call() throws a CommunicationError. Expects that it throws, and says `words`.
bool throws_of_communication(const std::function<void()>& call,
                             const std::vector<std::string>& words) {
  bool of_communication = false;
  expect_words(error_of([&] {
                 try {
                   call();
                 } catch (const CommunicationError&) {
                   of_communication = true;
                   throw;
                 }
               }),
               words);
  return of_communication;
}

TEST(JoiningTest, AProcessThatDoesNotFitIsRefusedAndTheOthersGoOn) {
  const auto options = ZeroOptions().bucket_bytes(900).protect(1);
  struct Case {
    ZeroOptions options;  // of all
    Inner inner;          // of the process that joins
    std::vector<std::string> words;
  };
  // The last one is one too many.
  for (const Case& c :
       {Case{options, Inner::kSgd, {"inner optimizer", "AdamW", "SGD"}},
        Case{ZeroOptions(options).micro_batches(2), Inner::kAdamW, {"micro_batches", "3 ranks"}}}) {
    std::latch trained(2);
    run_job([&](const Group& job) {
      if (job.joins()) {
        trained.wait();
        EXPECT_FALSE(throws_of_communication([&] { Member(job, 1, c.options, c.inner); }, c.words))
            << "it is this program's own";
        return;
      }
      Member m(job, 1, c.options);
      m.train_until_joined(trained);
      const int64_t before = m.steps();
      // A loop that recovers from communication errors does so from this one.
      EXPECT_TRUE(throws_of_communication([&] { m.optimizer.recover(); }, c.words));
      // Until the next one there is no optimizer to use.
      for (const auto& call : std::vector<std::function<void()>>{
               [&] { m.pass(0); }, [&] { m.optimizer.step(); }, [&] { m.optimizer.zero_grad(); },
               [&] { m.optimizer.check_replicas(); }}) {
        EXPECT_TRUE(throws_of_communication(call, {"expected a working optimizer", "recover()"}));
      }
      const RecoveryReport report = m.optimizer.recover();
      EXPECT_EQ(report.members, (std::vector<int>{0, 1}));
      EXPECT_GE(report.steps, before - 1);
      for (int i = 0; i < 3; ++i) m.step();
      m.optimizer.check_replicas();
    });
  }
}

TEST(JoiningTest, WithMicroBatchesBitsDoNotDependOnWhoJoins) {
  const auto options = ZeroOptions().bucket_bytes(900).micro_batches(4);
  const auto values_of = [](const Member& m) {
    std::vector<at::Tensor> values;
    for (const at::Tensor& p : m.model->parameters()) values.push_back(p.detach().clone());
    return values;
  };
  std::latch trained(2);
  int64_t steps = 0;
  std::vector<at::Tensor> values;
  run_job([&](const Group& job) {
    if (job.joins()) trained.wait();
    std::optional<Member> m;
    m.emplace(job, 1, ZeroOptions(options).protect(1));
    if (!job.joins()) {
      m->train_until_joined(trained);
      m->optimizer.recover();
    }
    EXPECT_EQ(m->optimizer.group().world_size(), kRanks + 1);
    for (int i = 0; i < 3; ++i) m->step();
    m->optimizer.check_replicas();
    if (job.rank() != 0) return;
    steps = m->steps();
    values = values_of(*m);
  });
  run_ranks(1, [&](const Group& group) {
    Member m(group, 1, options);
    while (m.steps() < steps) m.step();
    const std::vector<at::Tensor> expected = values_of(m);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(values[i], expected[i])) << i;
    }
  });
}

// What they do at a step is refused after they have joined.
TEST(JoiningTest, AMisuseOfTheNewRankAloneIsCommunicationErrorOnTheOthersWhoGoOn) {
  const auto set_lr = [](Member& m) { m.optimizer.param_groups()[0].options().set_lr(0.3); };
  const auto clip = [](Member& m) { m.optimizer.clip_grad_norm_(-1.0); };
  for (int which = 0; which < 3; ++which) {
    SCOPED_TRACE(which);
    const bool of_new_rank = which < 2;
    std::latch trained(2), ended(1);
    run_job([&](const Group& job) {
      if (job.joins()) trained.wait();
      std::optional<Member> m;
      m.emplace(job, 1, ZeroOptions().bucket_bytes(900).protect(1));
      if (!job.joins()) {
        m->train_until_joined(trained);
        m->optimizer.recover();
      }
      m->step();
      // Of an old rank it is one on all.
      const bool here = of_new_rank ? job.joins() : job.rank() == 1;
      const auto call = [&] {
        if (here) (which % 2 == 0 ? set_lr(*m) : clip(*m));
        m->step();
      };
      const bool of_communication = throws_of_communication(
          call, which % 2 == 0 ? std::vector<std::string>{"lr", "0.3"}
                               : std::vector<std::string>{"max_norm", "-1"});
      EXPECT_EQ(of_communication, of_new_rank && !job.joins());
      if (!of_new_rank) return;
      if (job.joins()) {
        m.reset();
        ended.count_down();
        return;
      }
      ended.wait();
      EXPECT_EQ(m->optimizer.recover().members, (std::vector<int>{0, 1}));
      for (int i = 0; i < 3; ++i) m->step();
    });
  }
}

TEST(JoiningTest, AStepThatWorksAgainEndsTheReasonToRecover) {
  std::latch trained(2);
  run_job([&](const Group& job) {
    if (job.joins()) trained.wait();
    Member m(job, 1, ZeroOptions().bucket_bytes(900).protect(1));
    if (!job.joins()) {
      m.train_until_joined(trained);
      m.optimizer.recover();
    }
    auto& options = m.optimizer.param_groups()[0].options();
    const double lr = options.get_lr();
    if (job.joins()) options.set_lr(0.3);
    EXPECT_EQ(throws_of_communication([&] { m.step(); }, {"lr", "0.3"}), !job.joins());
    options.set_lr(lr);
    m.optimizer.step();
    expect_words(error_of([&] { m.optimizer.recover(); }), {"got none of them"});
    m.step();
    m.optimizer.check_replicas();
  });
}

// The new rank does not know which group freeze() took it from.
TEST(JoiningTest, UnfreezeNamesTheGroupsThatRanksMean) {
  std::latch trained(2);
  run_job([&](const Group& job) {
    if (job.joins()) trained.wait();
    OddModel model(1);
    const at::Tensor bias = model->trunk->bias;
    if (job.joins()) bias.requires_grad_(false);
    std::vector<at::Tensor> others;
    for (const at::Tensor& p : model->parameters()) {
      if (p.requires_grad() && !p.is_same(bias)) others.push_back(p);
    }
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(others);
    groups.emplace_back(job.joins() ? std::vector<at::Tensor>() : std::vector<at::Tensor>{bias});
    ZeroOptimizer optimizer(*model, std::make_unique<torch::optim::AdamW>(groups), job,
                            ZeroOptions().protect(1));
    const auto step = [&] {
      optimizer.backward(
          model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
      optimizer.step();
    };
    if (!job.joins()) {
      optimizer.freeze({bias});
      trained.count_down();
      std::string text;
      while (text.empty()) text = error_of(step);
      expect_words(text, {"process 2 waits to join"});
      optimizer.recover();
    }
    const std::string text = error_of([&] { optimizer.unfreeze({bias}); });
    expect_words(text, {"unfreeze() with", "trunk.bias 1", "trunk.bias 0"});
    optimizer.unfreeze({bias}, 1);
    step();
    optimizer.check_replicas();
  });
}

TEST(JoiningTest, ANewRankRegistersFirstWhatTheOthersHaveRegisteredSince) {
  for (const bool registers : {false, true}) {
    std::latch trained(2);
    run_job([&](const Group& job) {
      OddModel model(1);
      const auto add_late = [&](double value) {
        model->register_buffer("late", at::full({3}, value));
      };
      const auto make = [&] {
        return std::make_unique<ZeroOptimizer>(*model, make_inner(Inner::kAdamW, *model), job,
                                               ZeroOptions().protect(1));
      };
      if (job.joins()) {
        trained.wait();
        if (registers) add_late(0);
        std::unique_ptr<ZeroOptimizer> optimizer;
        const std::string text = error_of([&] { optimizer = make(); });
        if (!registers) {
          expect_words(text, {"buffer late", "a process that joins registers"});
          return;
        }
        EXPECT_EQ(text, "");
        EXPECT_EQ(model->named_buffers()["late"][0].item<double>(), 7);
        return;
      }
      const auto optimizer = make();
      add_late(7);
      const auto step = [&] {
        optimizer->backward(
            model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
        optimizer->step();
      };
      step();
      trained.count_down();
      std::string text;
      while (text.empty()) text = error_of(step);
      expect_words(text, {"process 2 waits to join"});
      if (registers) {
        optimizer->recover();
      } else {
        EXPECT_TRUE(throws_of_communication([&] { optimizer->recover(); }, {"buffer late"}));
      }
    });
  }
}

TEST(JoiningTest, ARankThatHasJoinedBeforeGoesOnWithoutOneThatDoesNotFit) {
  std::latch trained(2), joined(3);
  run_job(
      [&](const Group& job) {
        const auto options = ZeroOptions().bucket_bytes(900).protect(1);
        if (job.rank() == kNewcomer) trained.wait();
        if (job.rank() > kNewcomer) {
          joined.wait();
          EXPECT_FALSE(throws_of_communication([&] { Member(job, 1, options, Inner::kSgd); },
                                               {"inner optimizer", "AdamW", "SGD"}));
          return;
        }
        Member m(job, 1, options);
        if (!job.joins()) {
          m.train_until_joined(trained);
          m.optimizer.recover();
        }
        m.step();
        joined.count_down();
        expect_words(m.train_until_one_waits(), {"process 3 waits to join"});
        EXPECT_TRUE(throws_of_communication([&] { m.optimizer.recover(); },
                                            {"inner optimizer", "AdamW", "SGD"}));
        EXPECT_EQ(m.optimizer.recover().members, (std::vector<int>{0, 1, 2}));
        for (int i = 0; i < 3; ++i) m.step();
        m.optimizer.check_replicas();
      },
      std::chrono::seconds(30), /*processes=*/4);
}

// It would come again after going back, unlike what a process that does not fit does.
TEST(JoiningTest, ARankThatLacksMemoryToTakeOneInIsItsOwnReason) {
  std::latch trained(2);
  std::atomic<bool> one_joins = false;
  run_ranks(3, [&](const Group& threads) {
    const BackendFactory gloo = gloo_factory(/*shared_memory=*/false);
    const bool lacks = threads.rank() == 1;
    const Group job =
        group_in_job(threads, std::chrono::seconds(30),
                     [&, gloo, lacks](const auto& store, int rank, int world_size, Purpose purpose,
                                      std::chrono::milliseconds timeout) {
                       if (lacks && one_joins) throw std::bad_alloc();
                       return gloo(store, rank, world_size, purpose, timeout);
                     });
    if (job.joins()) {
      trained.wait();
      one_joins = true;
      EXPECT_TRUE(throws_of_communication([&] { Member(job, 1, ZeroOptions().protect(1)); },
                                          {"Rank 1 gave up: out of memory"}));
      return;
    }
    Member m(job, 1, ZeroOptions().protect(1));
    m.train_until_joined(trained);
    EXPECT_EQ(throws_of_communication([&] { m.optimizer.recover(); }, {"out of memory"}), !lacks);
  });
}

// As of a GAN. The others come to the second recover() while the new process is yet on its way to
// the second constructor.
TEST(JoiningTest, OneThatHasJoinedTheFirstOptimizerIsWaitedForByTheSecond) {
  for (const bool one_group : {true, false}) {
    SCOPED_TRACE(one_group);
    std::latch trained(2);
    run_job([&](const Group& job) {
      const auto options = ZeroOptions().bucket_bytes(900).protect(1);
      // As the group of a second init_process_group().
      const Group second =
          one_group ? job : group_in_job(job, job.timeout(), gloo_factory(false), "second");
      if (job.joins()) trained.wait();
      Member generator(job, 1, options);
      if (job.joins()) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      Member discriminator(second, 2, options);
      if (!job.joins()) {
        discriminator.step();
        generator.train_until_joined(trained);
        EXPECT_EQ(generator.optimizer.recover().members, (std::vector<int>{0, 1, 2}));
        EXPECT_EQ(discriminator.optimizer.recover().members, (std::vector<int>{0, 1, 2}));
      }
      for (int i = 0; i < 2; ++i) {
        discriminator.step();
        generator.step();
      }
      discriminator.optimizer.check_replicas();
    });
  }
}

// In bytes per parameter, of which masters and the state of AdamW take 12.
TEST(JoiningTest, EachPieceOfAShardIsSentOnceToTheRankThatNeedsIt) {
  const auto network = std::make_shared<MemoryNetwork>();
  std::latch trained(2), old_ranks_here(2), counted(2), done(3);
  run_ranks(3, [&](const Group& threads) {
    const Group job =
        group_in_job(threads, std::chrono::seconds(30), network->factory(threads.rank()));
    const auto sent_by_all = [&] {
      int64_t sent = 0;
      for (int rank = 0; rank < 3; ++rank) sent += network->counts(rank).bytes_of(MemoryOp::kSend);
      return sent;
    };
    if (job.joins()) trained.wait();
    Member m(job, 1, ZeroOptions().protect(1), Inner::kAdamW, /*width=*/20000);
    int64_t sent_before = 0;
    if (!job.joins()) {
      for (int i = 0; i < 2; ++i) m.step();
      trained.count_down();
      expect_words(m.train_until_one_waits(), {"process 2 waits to join"});
      old_ranks_here.arrive_and_wait();
      sent_before = sent_by_all();
      counted.arrive_and_wait();
      m.optimizer.recover();
    }
    done.arrive_and_wait();
    int64_t parameters = 0;
    for (const at::Tensor& p : m.model->parameters()) parameters += p.numel();
    const double sent = static_cast<double>(sent_by_all() - sent_before) / parameters;
    // The constructor and the gather from the masters send 8 each, the new copies 12. For pieces 6
    // are left: a sixth for rank 1 and a third for the new rank.
    if (job.joins()) return;
    EXPECT_LT(sent, 8 + 8 + 12 + 6);
  });
}

TEST(JoiningTest, WithoutProtectedStepsNoneJoins) {
  run_job(
      [](const Group& job) {
        if (!job.joins()) return;
        expect_words(error_of([&] { Member(job, 1, ZeroOptions()); }),
                     {"process 2", "protect(n), got 0"});
        expect_words(error_of([&] { Member(job, 1, ZeroOptions().protect(1)); }),
                     {"process 2 cannot join", "waited 500 ms", "protect()"});
        expect_words(error_of([&] { job.make_communicator("own", Purpose::kControl); }),
                     {"job/own", "process 2", "ZeroOptimizer::group()"});
      },
      std::chrono::milliseconds(500));
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
