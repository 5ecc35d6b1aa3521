// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Ranks that meet and connect do so within the group's timeout and a second, or each gets an error
// that names who did not take part.
#include "zero/rendezvous/rendezvous.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <latch>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/stopping_store.h"
#include "zero/rendezvous/bounded_store.h"
#include "zero/rendezvous/ended_ranks.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

TEST(TriesTest, ARankThatGaveUpAloneMeetsTheOthersAtItsNextTry) {
  const auto store =
      c10::make_intrusive<BoundedStore>(c10::make_intrusive<c10d::HashStore>(), milliseconds(5000));
  const auto soon = [] { return Clock::now() + milliseconds(100); };
  // Rank 1 comes before rank 0 does, and gives up.
  Tries early(store);
  early.enter(1, soon())->set("mark", std::string("old"));
  early.give_up();
  Tries first(store);
  const auto of_first = first.enter(0, soon());
  EXPECT_FALSE(of_first->check({"mark"}));
  of_first->set("mark", std::string("new"));
  Tries again(store);
  EXPECT_EQ(again.enter(1, soon())->get_to_str("mark"), "new");
  // Then rank 0 gives up: rank 1 waits for its next try, and no longer than it may.
  first.give_up();
  again.give_up();
  Tries alone(store);
  EXPECT_EQ(alone.enter(1, soon())->get_to_str("mark"), "new");
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(200));
    Tries(store).enter(0, soon());
  });
  EXPECT_FALSE(Tries(store).enter(1, Clock::now() + std::chrono::seconds(30))->check({"mark"}));
  later.join();
}

// Rank 2 of 3 hangs after its `calls`th access to the store. Returns the errors of all ranks.
std::array<std::string, 3> connect_with_a_hanging_rank(int calls, milliseconds timeout) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  auto released = std::make_shared<std::latch>(1);
  std::array<std::string, 3> errors;
  std::vector<std::thread> threads;
  std::latch done(3);
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      c10::intrusive_ptr<c10d::Store> store = shared;
      if (rank == 2) {
        store = c10::make_intrusive<StoppingStore>(shared, calls, [released] { released->wait(); });
      }
      const Group group(store, rank, 3, "test",
                        default_backend_factory(at::kCPU, "127.0.0.1", false, false), at::kCPU,
                        timeout);
      std::unique_ptr<Communicator> made;
      errors[rank] = error_within(timeout + milliseconds(1000),
                                  [&] { made = group.make_communicator("data", Purpose::kData); });
      done.arrive_and_wait();  // An end would be noticed sooner.
    });
  }
  for (std::thread& thread : threads) thread.join();
  released->count_down();
  return errors;
}

TEST(RendezvousTest, ARankThatHangsAnywhereIsNamedInTime) {
  constexpr milliseconds kTimeout{2000};
  std::vector<std::future<std::array<std::string, 3>>> runs;
  for (int calls = 1; calls <= 8; ++calls) {
    runs.push_back(std::async(std::launch::async, connect_with_a_hanging_rank, calls, kTimeout));
  }
  int refused = 0;
  for (auto& run : runs) {
    const auto errors = run.get();
    for (int rank : {0, 1}) {
      if (errors[rank].empty()) continue;  // Connected before the other hung.
      ++refused;
      expect_words(
          errors[rank],
          {"communicator \"test/data\": cannot connect its 3 ranks within 2000 ms",
           "this is rank " + std::to_string(rank), "; rank 2 has arrived and did not connect"});
    }
  }
  EXPECT_GE(refused, 6);
}

// What rank 0 of 2 gets from Gloo alone when the other has agreed and published its address, and
// then hangs; empty where rank 0 is the one that calls the other, which it needs no answer for.
std::string connect_to_a_hanging_rank(milliseconds timeout) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  auto released = std::make_shared<std::latch>(1);
  const auto connect = [&](const c10::intrusive_ptr<c10d::Store>& store, int rank) {
    default_backend_factory(at::kCPU, "127.0.0.1", false, false)(store, rank, 2, Purpose::kControl,
                                                                 timeout);
  };
  std::thread hanging([&] {
    const auto store = c10::make_intrusive<StoppingStore>(shared, 5, [&] { released->wait(); });
    error_of([&] { connect(store, 1); });
  });
  // It agrees first, so that its calls are counted alike in every run.
  while (!shared->check({"agreed"})) std::this_thread::sleep_for(milliseconds(1));
  const std::string error = error_within(timeout + milliseconds(500), [&] { connect(shared, 0); });
  released->count_down();
  hanging.join();
  return error;
}

// Its thread would be left behind otherwise, for five timeouts.
TEST(RendezvousTest, GlooItselfGivesUpInTime) {
  std::string error;
  // Their ports decide which of the two calls.
  for (int tries = 0; tries < 30 && error.empty(); ++tries) {
    error = connect_to_a_hanging_rank(milliseconds(1500));
  }
  EXPECT_NE(error, "");
}

// Rank 1 of 3 throws when it is to connect. Returns the errors of all ranks, and says in
// `of_communication` which of them going back may help against.
std::array<std::string, 3> give_up_on_rank_1(const std::function<void()>& throws,
                                             std::array<bool, 3>& of_communication) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::array<std::string, 3> errors;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const BackendFactory factory = [&](const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int, Purpose,
                                         milliseconds) -> c10::intrusive_ptr<c10d::Backend> {
        if (rank == 1) throws();
        store->wait({"never"});
        return nullptr;
      };
      const Group group(shared, rank, 3, "test", factory, at::kCPU, std::chrono::seconds(60));
      errors[rank] = error_within(milliseconds(2000), [&] {
        try {
          group.make_communicator("data", Purpose::kData);
        } catch (const CommunicationError&) {
          of_communication[rank] = true;
          throw;
        }
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(RendezvousTest, WhoGivesUpEndsTheWaitOfTheOthers) {
  std::array<bool, 3> of_communication{};
  const auto errors =
      give_up_on_rank_1([] { TORCH_CHECK(false, "no more sugar"); }, of_communication);
  expect_words(errors[1], {"all ranks have arrived", ". no more sugar"});
  for (int rank : {0, 2}) expect_words(errors[rank], {"Rank 1 gave up: no more sugar"});
  EXPECT_EQ(of_communication, (std::array<bool, 3>{true, true, true}));
}

// It would come again after going back.
TEST(RendezvousTest, AMisuseOnOneRankIsOneOnAll) {
  std::array<bool, 3> of_communication{};
  const auto errors =
      give_up_on_rank_1([] { TORCH_CHECK_VALUE(false, "no such device"); }, of_communication);
  expect_words(errors[1], {". no such device"});
  for (int rank : {0, 2}) expect_words(errors[rank], {"Rank 1 gave up: no such device"});
  EXPECT_EQ(of_communication, (std::array<bool, 3>{}));
}

TEST(RendezvousTest, ARankThatLacksMemoryIsTheOthersReasonToGoBack) {
  std::array<bool, 3> of_communication{};
  const auto errors = give_up_on_rank_1([] { throw std::bad_alloc(); }, of_communication);
  for (int rank : {0, 2}) expect_words(errors[rank], {"Rank 1 gave up: out of memory"});
  EXPECT_EQ(of_communication, (std::array<bool, 3>{true, false, true}));
}

TEST(RendezvousTest, ARankThatItsLauncherHasSeenEndIsNotWaitedFor) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto bounded = c10::make_intrusive<BoundedStore>(store, std::chrono::minutes(10));
  add_ended_rank(*bounded->under("of the launcher"), 7);
  std::vector<std::thread> threads;
  for (int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      Rendezvous rendezvous(bounded->under("meeting"), rank, 3, std::chrono::minutes(10),
                            Clock::now(), "cannot meet", "here", {0, 3, 7});
      const std::string error =
          error_of([&] { rendezvous.run([](const auto& own) { own->wait({"rank 2"}); }); });
      expect_words(error, {"cannot meet (after ", "of at most 600000 ms)", "missing: rank 2",
                           "The process with RANK 7 has ended"});
    });
  }
  for (std::thread& thread : threads) thread.join();
  bounded->set("meeting/rank 2", std::string("ends the threads that were left behind"));
}

// The server of a store that ends after some of the marks were read.
class VanishingStore : public c10d::PrefixStore {
 public:
  explicit VanishingStore(const c10::intrusive_ptr<c10d::Store>& store, int reads)
      : PrefixStore("", store), left_(reads) {}
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    if (left_-- <= 0) C10_THROW_ERROR(DistNetworkError, "Connection was likely closed");
    return PrefixStore::multiGet(keys);
  }

 private:
  std::atomic<int> left_;
};

// As when rank 0, which serves the store, gave up a little earlier than rank 1.
TEST(RendezvousTest, ASilentRankIsNamedThoughTheStoreEndsMeanwhile) {
  for (const int reads : {0, 1, 3}) {
    const auto shared = c10::make_intrusive<c10d::HashStore>();
    const auto prefixed = c10::make_intrusive<c10d::PrefixStore>("", shared);
    prefixed->set("meeting/rank/2", std::string("arrived"));
    const auto store = c10::make_intrusive<VanishingStore>(shared, reads);
    const auto bounded = c10::make_intrusive<BoundedStore>(store, milliseconds(5000));
    Rendezvous rendezvous(bounded->under("meeting"), 1, 3, milliseconds(5000), Clock::now(),
                          "cannot meet", "here");
    const std::string error = error_within(milliseconds(1000), [&] {
      rendezvous.run([](const auto&) { TORCH_CHECK(false, "no more sugar"); });
    });
    expect_words(error, {"cannot meet (after ", " ms of at most 5000 ms) (this is rank 1); ",
                         "no more sugar"});
    const bool known = reads > 0;
    EXPECT_EQ(error.find("rank 2 has arrived and did not connect") != std::string::npos, known)
        << error;
    EXPECT_EQ(error.find("is gone") == std::string::npos, known) << error;
  }
}

// What rank 0 of 2 does when it gives up after rank 1, which has not read the reasons yet.
void give_up_after_rank_1(const c10::intrusive_ptr<c10d::Store>& shared, bool served_here) {
  const auto store =
      c10::make_intrusive<BoundedStore>(shared, milliseconds(5000), "the store", served_here);
  store->set("meeting/rank/1", std::string("given up"));
  Rendezvous rendezvous(store->under("meeting"), 0, 2, milliseconds(5000), Clock::now(),
                        "cannot meet", "here");
  expect_words(
      error_of([&] { rendezvous.run([](const auto&) { TORCH_CHECK(false, "no more sugar"); }); }),
      {"no more sugar", "all ranks have arrived"});
}

void read_reasons(const c10::intrusive_ptr<c10d::Store>& shared) {
  shared->add("meeting/reasons read", 1);
}

TEST(RendezvousTest, ARankThatServesTheStoreWaitsUntilTheOthersHaveReadTheReasons) {
  // Whether the others, who read a little later, had read when the rank had given up.
  const auto had_read = [](bool served_here) {
    const auto shared = c10::make_intrusive<c10d::HashStore>();
    std::atomic<bool> has_read = false;
    std::thread reader([&] {
      std::this_thread::sleep_for(milliseconds(100));
      has_read = true;
      read_reasons(shared);
    });
    give_up_after_rank_1(shared, served_here);
    const bool result = has_read;
    reader.join();
    return result;
  };
  // On a busy machine either may come too late.
  bool waited = false, went_on = false;
  for (int turn = 0; turn < 20 && !waited; ++turn) waited = had_read(/*served_here=*/true);
  for (int turn = 0; turn < 20 && !went_on; ++turn) went_on = !had_read(/*served_here=*/false);
  EXPECT_TRUE(waited);
  EXPECT_TRUE(went_on);
}

TEST(RendezvousTest, ARankThatServesTheStoreWaitsForNoReaderForEver) {
  const auto start = Clock::now();
  give_up_after_rank_1(c10::make_intrusive<c10d::HashStore>(), /*served_here=*/true);
  EXPECT_GE(Clock::now() - start, milliseconds(700));
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
}

// Its end is the end of the store.
TEST(RendezvousDeathTest, AProcessThatServesTheStoreEndsAfterALateReader) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  static std::atomic<bool> has_read = false;
  const auto end = [] {
    std::atexit([] { _exit(has_read ? 7 : 3); });  // behind those that are registered later
    const auto shared = c10::make_intrusive<c10d::HashStore>();
    give_up_after_rank_1(shared, /*served_here=*/true);
    std::thread([shared] {
      std::this_thread::sleep_for(milliseconds(100));
      has_read = true;
      read_reasons(shared);
    }).detach();
    std::exit(0);
  };
  // On a busy machine a reader may come too late.
  bool waited = false;
  for (int turn = 0; turn < 20 && !waited; ++turn) {
    const auto ended = [&](int status) {
      waited = WIFEXITED(status) && WEXITSTATUS(status) == 7;
      return WIFEXITED(status);
    };
    EXPECT_EXIT(end(), ended, "");
  }
  EXPECT_TRUE(waited);
}

// Gloo connects with a fraction of the timeout, which must not bound what follows.
TEST(RendezvousTest, LaterOperationsHaveTheWholeTimeout) {
  RunOptions options;
  options.transport = Transport::kGloo;
  options.timeout = milliseconds(3000);
  run_ranks(
      2,
      [](const Group& group) {
        const auto communicator = group.make_communicator("data", Purpose::kData);
        for (int late : {0, 1}) {
          if (group.rank() == late) std::this_thread::sleep_for(milliseconds(1500));
          at::Tensor values = at::full({4}, double(group.rank()));
          communicator->broadcast(values, late, "values").wait();
          EXPECT_EQ(values.sum().item<double>(), 4 * late);
        }
        if (group.rank() == 0) std::this_thread::sleep_for(milliseconds(1500));
        at::Tensor rows = at::full({2, 4}, double(group.rank()));
        communicator->gather_rows(rows, "rows").wait();
        EXPECT_EQ(rows.sum().item<double>(), 4);
      },
      options);
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 4); }
