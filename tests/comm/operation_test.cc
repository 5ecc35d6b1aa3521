// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The order in which an Operation waits and acts, and whom it names, without any transport.

#include "zero/comm/exchange/operation.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

class FakeWork : public c10d::Work {
 public:
  explicit FakeWork(std::function<void(milliseconds limit)> on_wait)
      : on_wait_(std::move(on_wait)) {}
  bool wait(milliseconds limit) override {
    on_wait_(limit);
    return true;
  }

 private:
  const std::function<void(milliseconds)> on_wait_;
};

class OperationTest : public ::testing::Test {
 protected:
  c10::intrusive_ptr<c10d::Work> done(const std::string& name) {
    return c10::make_intrusive<FakeWork>([this, name](milliseconds) { say(name); });
  }
  // Never there within the limit.
  c10::intrusive_ptr<c10d::Work> missing() {
    return c10::make_intrusive<FakeWork>([](milliseconds limit) {
      std::this_thread::sleep_for(limit);
      TORCH_CHECK(false, "timed out");
    });
  }
  void say(const std::string& text) { said += (said.empty() ? "" : ", ") + text; }

  std::shared_ptr<GroupHealth> health =
      std::make_shared<GroupHealth>(0, 4, "test", milliseconds(50));
  std::string said;
};

TEST_F(OperationTest, WaitsForSendsAfterTheUseOfWhatWasReceived) {
  Operation operation(health, "move");
  operation.at_end([&] { say("success"); });
  operation.after_receiving([&] { say("received"); });
  operation.before_receiving([&] {
    say("wait");
    operation.add_receive(2, done("from 2"));
  });
  operation.add_send(1, done("to 1"));
  operation.add_receive(1, done("from 1"));
  EXPECT_EQ(said, "");
  operation.wait();
  EXPECT_EQ(said, "wait, from 1, from 2, received, to 1, success");
  operation.wait();  // There is nothing more to wait for.
  EXPECT_EQ(said, "wait, from 1, from 2, received, to 1, success");
}

// As an exchange needs that first adds up within a machine and then between machines.
TEST_F(OperationTest, GoesOnWithWhatIsAddedWhenRowsAreReceived) {
  Operation operation(health, "move");
  operation.add_send(1, done("to 1"));
  operation.add_receive(1, done("from 1"));
  operation.after_receiving([&] {
    say("first");
    operation.add_send(2, done("to 2"));
    operation.add_receive(2, done("from 2"));
    operation.after_receiving([&] { say("second"); });
  });
  operation.at_end([&] { say("success"); });
  operation.wait();
  EXPECT_EQ(said, "from 1, first, from 2, second, to 1, to 2, success");
  EXPECT_EQ(health->first_failure(), "");
}

TEST_F(OperationTest, NamesWhoIsMissingInALaterStage) {
  Operation operation(health, "move");
  operation.add_receive(1, done("from 1"));
  operation.after_receiving([&] {
    operation.add_send(1, done("to 1"));
    operation.add_receive(2, missing());
    operation.add_receive(3, missing());
    operation.after_receiving([&] { say("second"); });
  });
  operation.at_end([&] { say("success"); });
  const std::string text = error_of([&] { operation.wait(); });
  expect_words(text, {"move: ranks 2, 3 did not send within 50 ms", "this is rank 0 of 4"});
  EXPECT_EQ(health->first_failure(), text);
  EXPECT_EQ(said, "from 1");
}

TEST_F(OperationTest, AStageThatThrowsIsALoss) {
  Operation operation(health, "move");
  operation.add_receive(1, done("from 1"));
  operation.after_receiving([&] {
    operation.add_receive(2, missing());
    TORCH_CHECK(false, "out of paper");
  });
  operation.at_end([&] { say("success"); });
  // It says who else is missing.
  expect_words(error_of([&] { operation.wait(); }),
               {"move: out of paper (after ", "rank 2 did not send so far"});
  EXPECT_EQ(said, "from 1");
}

TEST_F(OperationTest, ReceiveLeavesTheSendsToWait) {
  Operation operation(health, "move");
  operation.add_send(1, done("to 1"));
  operation.add_receive(1, done("from 1"));
  operation.after_receiving([&] { say("received"); });
  operation.at_end([&] { say("success"); });
  operation.receive();
  EXPECT_EQ(said, "from 1, received");
  operation.wait();
  EXPECT_EQ(said, "from 1, received, to 1, success");
}

TEST_F(OperationTest, ActionsOfOneKindRunInTheirOrder) {
  Operation operation(health, "move");
  for (const char* text : {"a", "b"}) {
    operation.before_receiving([&, text] { say(std::string("wait ") + text); });
    operation.after_receiving([&, text] { say(std::string("received ") + text); });
    operation.at_end([&, text] { say(std::string("success ") + text); });
  }
  operation.wait();
  EXPECT_EQ(said, "wait a, wait b, received a, received b, success a, success b");
}

TEST_F(OperationTest, PartsHaveTheTimeAndTheNameOfTheWhole) {
  Operation operation(health, "move", 7);
  const std::shared_ptr<Operation> one = operation.part(), two = operation.part();
  one->add_receive(1, done("from 1"));
  two->add_receive(2, missing());
  operation.wait_by([&](Operation::Clock::time_point start) {
    std::this_thread::sleep_for(milliseconds(30));
    one->wait(start);
    two->wait(start);
  });
  const auto start = std::chrono::steady_clock::now();
  expect_words(error_of([&] { operation.wait(); }), {"move: rank 2 did not send within 50 ms"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(75));
}

// Below 2^30, and the same for the same operation of another rank.
TEST_F(OperationTest, TagsOfOperationsUnderWayDiffer) {
  std::set<int> tags;
  for (int number = 0; number < 100; ++number) {
    Operation operation(health, "move", number), elsewhere(health, "move", number);
    const std::shared_ptr<Operation> parts[] = {operation.part(), operation.part()};
    EXPECT_EQ(operation.take_tags(2), elsewhere.take_tags(2));
    const int first = operation.take_tags(3);
    for (const int tag : {first, first + 1, first + 2, operation.take_tags(), parts[0]->take_tags(),
                          parts[1]->take_tags()}) {
      EXPECT_GE(tag, 0);
      EXPECT_LT(tag, 1 << 30);
      EXPECT_TRUE(tags.insert(tag).second);
    }
  }
  Operation last(health, "move", (int64_t{1} << 40) - 1);
  EXPECT_LT(last.part()->take_tags(8192), 1 << 30);
}

TEST_F(OperationTest, RunsActionsWithoutAnythingToWaitFor) {
  Operation operation(health, "move");
  operation.after_receiving([&] { say("received"); });
  operation.wait();
  EXPECT_EQ(said, "received");
}

TEST_F(OperationTest, DroppedIsAFailure) {
  { Operation(health, "nothing to wait for"); }
  EXPECT_EQ(health->first_failure(), "");
  {
    Operation operation(health, "move");
    operation.add_send(1, done("to 1"));
  }
  expect_words(health->first_failure(), {"move: dropped without being waited for"});
}

}  // namespace
}  // namespace zero
