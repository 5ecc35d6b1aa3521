// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Each rule of collective_rules.h finds a fault that breaks it, and nothing in a program without
// faults.
#include "tests/support/device/collective_rules.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/device/emulated_device.h"
#include "tests/support/device/emulated_network.h"
#include "zero/base/streams.h"
#include "zero/comm/row_communicator.h"
#include "zero/communicator.h"

namespace zero {
namespace {

// A rank of two, with what the faults below need.
struct Rank {
  explicit Rank(const Group& group)
      : device(group.device()),
        here(device),
        number(group.rank()),
        first(group.make_communicator("first", Purpose::kData)),
        second(group.make_communicator("second", Purpose::kData)),
        other(new_stream(device)) {}

  at::Tensor values() const { return at::ones({64}, at::TensorOptions(at::kLong).device(device)); }
  at::Tensor rows() const { return at::ones({2, 64}, at::TensorOptions().device(device)); }
  // On the other stream, as autograd may bring work there.
  void there(const std::function<void()>& work) const {
    const c10::StreamGuard guard(other);
    work();
  }

  const c10::Device device;
  const c10::DeviceGuard here;
  const int number;
  mutable std::unique_ptr<Communicator> first;
  mutable std::unique_ptr<Communicator> second;
  const c10::Stream other;
};

std::string text_of(const std::vector<std::string>& violations) {
  std::string text;
  for (const std::string& violation : violations) text += "\n  " + violation;
  return text;
}

bool finds(const std::vector<std::string>& violations, const std::string& rule) {
  return std::ranges::any_of(violations,
                             [&](const std::string& v) { return v.starts_with(rule + ":"); });
}

struct Fault {
  std::string name;
  std::string rule;  // that it breaks
  // With the fault or without it.
  std::function<void(const Rank&, bool fault)> program;
};

// A fault may be a deadlock, which is waited for.
std::vector<std::string> violations_of(const Fault& fault, bool planted) {
  std::vector<std::string> violations;
  if (planted) EmulatedDevice::set_patience(std::chrono::milliseconds(500));
  run_device_ranks(2, [&](const Group& group) { fault.program(Rank(group), planted); },
                   {.violations = &violations});
  EmulatedDevice::set_patience(std::chrono::seconds(20));
  return violations;
}

std::ostream& operator<<(std::ostream& stream, const Fault& fault) { return stream << fault.name; }

// Calls work() in a hook of autograd.
void in_a_pass(const Rank& rank, const std::function<void()>& work) {
  const at::Tensor leaf = at::ones({1}, rank.device).requires_grad_();
  const at::Tensor loss = leaf * 2;
  loss.register_hook([&](const at::Tensor& gradient) {
    work();
    return gradient;
  });
  loss.backward();
}

std::vector<Fault> faults() {
  return {
      {"MissingRecordStream", "lifetime",
       [](const Rank& rank, bool fault) {
         at::Tensor values = rank.values();
         make_wait(rank.other, current_torch_stream(rank.device));
         rank.there([&] { rank.first->all_reduce_max(values, "m").wait(); });
         if (!fault) values.record_stream(rank.other);
       }},
      {"WaitOnAnotherStream", "streams",
       [](const Rank& rank, bool fault) {
         const at::Tensor values = rank.values();
         Pending pending = rank.first->all_reduce_max(values, "m");
         fault ? rank.there([&] { pending.wait(); }) : pending.wait();
         values.add_(1);
         make_wait(current_torch_stream(rank.device), rank.other);
       }},
      {"ReadBeforeTheWait", "streams",
       [](const Rank& rank, bool fault) {
         const at::Tensor rows = rank.rows(), received = at::zeros_like(rows);
         Pending pending = rank.first->exchange_rows(rows, received, "r");
         if (!fault) pending.wait();
         const at::Tensor read = received + 1;
         if (fault) pending.wait();
       }},
      {"StartBeforeTheValuesAreThere", "streams",
       [](const Rank& rank, bool fault) {
         const at::Tensor values = rank.values();
         make_wait(rank.other, current_torch_stream(rank.device));
         rank.there([&] { values.add_(1); });
         if (!fault) make_wait(current_torch_stream(rank.device), rank.other);
         rank.first->all_reduce_max(values, "m").wait();
         make_wait(current_torch_stream(rank.device), rank.other);
       }},
      {"BufferReusedEarly", "streams",
       [](const Rank& rank, bool fault) {
         const at::Tensor rows = rank.rows(), received = at::zeros_like(rows);
         Pending pending = rank.first->exchange_rows(rows, received, "r");
         if (!fault) pending.wait();
         rows.zero_();
         if (fault) pending.wait();
       }},
      {"BufferOfTwoCollectives", "streams",
       [](const Rank& rank, bool fault) {
         RowCommunicator::put_in_one_order({rank.first.get()});
         RowCommunicator::put_in_one_order({rank.second.get()});
         const at::Tensor rows = rank.rows(), received = at::zeros_like(rows);
         Pending pending = rank.first->exchange_rows(rows, received, "r");
         if (!fault) pending.wait();
         rank.second->gather_rows(received, "g").wait();
         if (fault) pending.wait();
       }},
      {"NoOrderOfTwoCommunicators", "one order",
       [](const Rank& rank, bool fault) {
         if (!fault) RowCommunicator::put_in_one_order({rank.first.get(), rank.second.get()});
         const at::Tensor a = rank.values(), b = rank.values();
         Pending one = rank.first->all_reduce_max(a, "a");
         Pending two = rank.second->all_reduce_max(b, "b");
         one.wait();
         two.wait();
       }},
      {"AnotherOrderOnOneRank", "same calls",
       [](const Rank& rank, bool fault) {
         const at::Tensor sums = rank.values().to(at::kDouble), maxima = rank.values();
         for (const bool swapped : {false, fault && rank.number == 1}) {
           if (!swapped) rank.first->all_reduce_sum(sums, "s").wait();
           rank.first->all_reduce_max(maxima, "m").wait();
           if (swapped) rank.first->all_reduce_sum(sums, "s").wait();
         }
       }},
      {"TheModelWaitsForAPeerInAPass", "passes",
       [](const Rank& rank, bool fault) {
         const at::Tensor maxima = rank.values();
         rank.first->all_reduce_max(maxima, "connects").wait();
         Pending pending;
         in_a_pass(rank, [&] {
           rank.there([&] { pending = rank.first->all_reduce_max(maxima, "m"); });
           if (fault) pending.wait();
         });
         if (!fault) pending.wait();
       }},
      {"TheHostWaitsForAPeerInAPass", "passes",
       [](const Rank& rank, bool fault) {
         const at::Tensor maxima = rank.values();
         rank.first->all_reduce_max(maxima, "connects").wait();
         Pending pending;
         in_a_pass(rank, [&] {
           rank.there([&] {
             pending = rank.first->all_reduce_max(maxima, "m");
             pending.wait();
             if (fault) rank.other.synchronize();
           });
         });
         make_wait(current_torch_stream(rank.device), rank.other);
       }},
      {"TheHostConnectsInAPass", "passes",
       [](const Rank& rank, bool fault) {
         const at::Tensor maxima = rank.values();
         if (!fault) rank.first->all_reduce_max(maxima, "connects").wait();
         in_a_pass(rank,
                   [&] { rank.there([&] { rank.first->all_reduce_max(maxima, "m").wait(); }); });
         make_wait(current_torch_stream(rank.device), rank.other);
       }},
      {"EndsInAnotherOrder", "ends",
       [](const Rank& rank, bool fault) {
         (fault && rank.number == 1 ? rank.second : rank.first).reset();
       }},
      {"NoWait", "waits",
       [](const Rank& rank, bool fault) {
         Pending pending = rank.first->all_reduce_max(rank.values(), "m");
         if (!fault) pending.wait();
       }},
  };
}

class CollectiveRulesTest : public ::testing::TestWithParam<Fault> {};

INSTANTIATE_TEST_SUITE_P(Faults, CollectiveRulesTest, ::testing::ValuesIn(faults()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CollectiveRulesTest, AreBrokenByThisFaultAndNotWithoutIt) {
  const Fault& fault = GetParam();
  const auto with = violations_of(fault, true);
  EXPECT_TRUE(finds(with, fault.rule)) << text_of(with);
  const auto without = violations_of(fault, false);
  EXPECT_TRUE(without.empty()) << text_of(without);
}

// Of rank 1 of 2, with 16 bytes from each rank.
CollectiveCall call_of(CollectiveCall::Kind kind, int64_t input, int64_t output) {
  static char memory[256];
  const bool gathers = kind == CollectiveCall::Kind::kAllGather;
  const bool scatters = kind == CollectiveCall::Kind::kReduceScatter;
  CollectiveCall call;
  call.kind = kind;
  call.rank = 1;
  call.ranks = 2;
  call.dtype = at::kFloat;
  call.operation = c10d::ReduceOp::SUM;
  call.input = {memory + input, gathers ? 16 : 32};
  call.output = {memory + output, scatters ? 16 : 32};
  return call;
}

std::vector<std::string> problems_of(const CollectiveCall& call) {
  DeviceCall recorded;
  recorded.kind = DeviceCall::Kind::kCollective;
  recorded.collective = std::make_shared<CollectiveCall>(call);
  return broken_rules({recorded}, {.finished = false});
}

TEST(CollectiveRulesOfMemoryTest, InPlaceIsWhatNcclSays) {
  using Kind = CollectiveCall::Kind;
  struct Case {
    Kind kind;
    int64_t input, output;
    bool valid;
  };
  for (const Case& c : std::vector<Case>{{Kind::kAllGather, 16, 0, true},
                                         {Kind::kAllGather, 64, 0, true},
                                         {Kind::kAllGather, 0, 0, false},
                                         {Kind::kReduceScatter, 0, 16, true},
                                         {Kind::kReduceScatter, 0, 0, false},
                                         {Kind::kAllReduce, 0, 0, true},
                                         {Kind::kAllReduce, 0, 16, false},
                                         {Kind::kBroadcast, 0, 0, true},
                                         {Kind::kBroadcast, 16, 0, false},
                                         {Kind::kAllToAll, 0, 64, true},
                                         {Kind::kAllToAll, 0, 0, false},
                                         {Kind::kAllToAll, 2, 64, false}}) {
    const auto problems = problems_of(call_of(c.kind, c.input, c.output));
    EXPECT_EQ(!finds(problems, "memory"), c.valid)
        << static_cast<int>(c.kind) << " from " << c.input << " to " << c.output
        << text_of(problems);
  }
}

TEST(CollectiveRulesOfDtypesTest, AreThoseOfNccl) {
  CollectiveCall call = call_of(CollectiveCall::Kind::kAllReduce, 0, 0);
  EXPECT_TRUE(problems_of(call).empty());
  call.operation = c10d::ReduceOp::MAX;
  EXPECT_TRUE(finds(problems_of(call), "dtypes"));
  call.dtype = at::kInt;
  EXPECT_TRUE(problems_of(call).empty());
  call.operation = c10d::ReduceOp::BOR;
  EXPECT_TRUE(finds(problems_of(call), "dtypes"));
  call.operation = c10d::ReduceOp::SUM;
  call.dtype = at::kShort;
  EXPECT_TRUE(finds(problems_of(call), "dtypes"));
}

}  // namespace
}  // namespace zero
