// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// No wait for a store or for the other ranks lasts longer than the group's timeout and a second,
// before and while ranks connect. The error names who did not take part, and a long wait says on
// stderr for whom.
#include <ATen/ops/full.h>
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <latch>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/stopping_store.h"
#include "zero/agreement/problem_board.h"
#include "zero/base/slow_wait.h"
#include "zero/rendezvous/bounded_store.h"
#include "zero/rendezvous/meeting.h"
#include "zero/rendezvous/tcp_store.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Other programs use the cores too.
constexpr milliseconds kLoad{500};

// What `action` throws, which may take `limit`.
std::string error_within(milliseconds limit, const std::function<void()>& action) {
  const auto start = Clock::now();
  const std::string text = error_of(action);
  const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
  EXPECT_LE(took.count(), (limit + kLoad).count()) << text;
  return text;
}

// ---- The store ----

// Its calls hang while it is frozen.
class FrozenStore : public c10d::HashStore {
 public:
  void freeze(bool frozen) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      frozen_ = frozen;
    }
    changed_.notify_all();
  }
  using HashStore::compareSet;
  using HashStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    gate();
    HashStore::set(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    gate();
    return HashStore::compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    gate();
    return HashStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    gate();
    return HashStore::add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    gate();
    return HashStore::deleteKey(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    gate();
    return HashStore::check(keys);
  }
  int64_t getNumKeys() override {
    gate();
    return HashStore::getNumKeys();
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    gate();
    HashStore::append(key, value);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    gate();
    return HashStore::multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override {
    gate();
    HashStore::multiSet(keys, values);
  }

 private:
  void gate() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !frozen_; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool frozen_ = false;
};

TEST(BoundedStoreTest, EveryCallOfAFrozenStoreEnds) {
  const std::vector<uint8_t> value{1, 2};
  const std::vector<std::function<void(c10d::Store&)>> calls{
      [&](c10d::Store& s) { s.set("a", value); },
      [&](c10d::Store& s) { s.compareSet("a", {}, value); },
      [&](c10d::Store& s) { s.get("a"); },
      [&](c10d::Store& s) { s.add("n", 1); },
      [&](c10d::Store& s) { s.deleteKey("b"); },
      [&](c10d::Store& s) { s.check({"a"}); },
      [&](c10d::Store& s) { s.getNumKeys(); },
      [&](c10d::Store& s) { s.wait({"a"}); },
      [&](c10d::Store& s) { s.wait({"a"}, std::chrono::hours(1)); },
      [&](c10d::Store& s) { s.append("a", value); },
      [&](c10d::Store& s) { s.multiGet({"a"}); },
      [&](c10d::Store& s) { s.multiSet({"a"}, {value}); },
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE("call " + std::to_string(i));
    const auto frozen = c10::make_intrusive<FrozenStore>();
    frozen->set("a", value);
    frozen->freeze(true);
    const auto store =
        c10::make_intrusive<BoundedStore>(frozen, milliseconds(200), "the store of rank 7");
    const bool an_hour = i == 8;
    const auto asked = an_hour ? store->within(milliseconds(200)) : store;
    expect_words(error_within(milliseconds(300), [&] { calls[i](*asked); }),
                 {"the store of rank 7 did not answer within 200 ms", "stopped", "silent"});
    // The next one does not wait for what hangs, whichever prefix it has.
    const auto other = store->under("prefix");
    expect_words(error_within(milliseconds(0), [&] { calls[i](*other); }),
                 {"the store of rank 7 did not answer to an earlier call"});
    frozen->freeze(false);
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_EQ(error_of([&] { calls[i](*store); }), "");
  }
}

TEST(BoundedStoreTest, ValuesAndPrefixesAreThoseOfTheStore) {
  const auto plain = c10::make_intrusive<c10d::HashStore>();
  const auto store = c10::make_intrusive<BoundedStore>(plain, milliseconds(5000));
  const auto under = store->under("p")->under("q");
  under->set("key", std::string("value"));
  EXPECT_EQ(plain->get_to_str("p/q/key"), "value");
  EXPECT_EQ(under->get_to_str("key"), "value");
  EXPECT_EQ(under->add("n", 2), 2);
  EXPECT_EQ(under->within(milliseconds(1000))->add("n", 3), 5);
  EXPECT_TRUE(under->check({"key", "n"}));
  EXPECT_FALSE(store->check({"key"}));
  under->multiSet({"a", "b"}, {{1}, {2}});
  EXPECT_EQ(under->multiGet({"b", "a"}), (std::vector<std::vector<uint8_t>>{{2}, {1}}));
  EXPECT_TRUE(under->deleteKey("a"));
  EXPECT_EQ(BoundedStore::of(store, milliseconds(1)), store);
  EXPECT_FALSE(store->served_here());
}

TEST(BoundedStoreTest, ALimitForAllCallsRunsOut) {
  const auto store =
      c10::make_intrusive<BoundedStore>(c10::make_intrusive<c10d::HashStore>(), milliseconds(5000));
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(600));
    store->set("a", std::string("here"));
  });
  const auto limited = store->within(milliseconds(200));
  error_within(milliseconds(200), [&] { limited->get("b"); });
  EXPECT_NE(error_within(milliseconds(0), [&] { limited->get("a"); }), "");
  EXPECT_EQ(limited->each_within(milliseconds(5000))->get_to_str("a"), "here");
  late.join();
}

TEST(BoundedStoreTest, WaitsForAKeyUntilTheTimeIsUp) {
  const auto store =
      c10::make_intrusive<BoundedStore>(c10::make_intrusive<c10d::HashStore>(), milliseconds(5000));
  expect_words(error_within(milliseconds(300),
                            [&] {
                              store->wait({"a", "b"}, milliseconds(300));
                            }),
               {"for \"a\" and 1 more keys"});
  expect_words(error_within(milliseconds(300), [&] { store->within(milliseconds(300))->get("a"); }),
               {"for \"a\""});
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(300));
    store->set("a", std::string("here"));
  });
  EXPECT_EQ(store->get_to_str("a"), "here");
  late.join();
}

// ---- Texts between ranks ----

TEST(ProblemBoardTest, AFrozenStoreCostsHalfASecond) {
  const auto frozen = c10::make_intrusive<FrozenStore>();
  ProblemBoard board(frozen, 0, 3, milliseconds(5000));
  frozen->freeze(true);
  EXPECT_EQ(error_within(milliseconds(500),
                         [&] {
                           board.announce("no more sugar");
                           expect_words(board.announced_after_failure(),
                                        {"what other ranks reported is not known"});
                         }),
            "");
  frozen->freeze(false);
}

TEST(ProblemBoardTest, NamesWhoReportedAndWhoDidNot) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProblemBoard first(store, 0, 3, milliseconds(5000));
  ProblemBoard second(store, 1, 3, milliseconds(5000));
  second.announce("rank 1: no more sugar");
  const std::string text = first.announced_after_failure();
  EXPECT_EQ(text, "\nrank 1 had reported: no more sugar\nrank 2 has reported nothing");
  EXPECT_EQ(first.announced(), "\nrank 1 had reported: no more sugar");
  second.announce("");
  EXPECT_EQ(first.announced(), "");
}

TEST(ProblemBoardTest, TextsOfATopic) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProblemBoard first(store, 0, 2, milliseconds(300));
  ProblemBoard second(store, 1, 2, milliseconds(300));
  first.leave("topic", "one");
  EXPECT_EQ(second.text_of("topic", 0), "one");
  const auto texts = first.texts_of("topic");
  ASSERT_EQ(texts.size(), 2u);
  EXPECT_EQ(texts[0], "one");
  expect_words(texts[1], {"its text is not here", "topic/1"});
}

// ---- Ranks that connect ----

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

TEST(RendezvousTest, WhoGivesUpEndsTheWaitOfTheOthers) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::array<std::string, 3> errors;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const BackendFactory factory = [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int,
                                        Purpose,
                                        milliseconds) -> c10::intrusive_ptr<c10d::Backend> {
        TORCH_CHECK(rank != 1, "no more sugar");
        store->wait({"never"});
        return nullptr;
      };
      const Group group(shared, rank, 3, "test", factory, at::kCPU, std::chrono::seconds(60));
      errors[rank] = error_within(milliseconds(2000),
                                  [&] { group.make_communicator("data", Purpose::kData); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect_words(errors[1], {"all ranks have arrived", ". no more sugar"});
  for (int rank : {0, 2}) expect_words(errors[rank], {"Rank 1 gave up: no more sugar"});
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
      rendezvous.run([](const auto&) -> c10::intrusive_ptr<c10d::Backend> {
        TORCH_CHECK(false, "no more sugar");
      });
    });
    expect_words(error, {"cannot meet within 5000 ms (this is rank 1); ", "no more sugar"});
    const bool known = reads > 0;
    EXPECT_EQ(error.find("rank 2 has arrived and did not connect") != std::string::npos, known)
        << error;
    EXPECT_EQ(error.find("is gone") == std::string::npos, known) << error;
  }
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

// ---- TCP ----

// A port of 127.0.0.1 that accepts connections, as the kernel does, and never answers.
class SilentServer {
 public:
  SilentServer() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address_);
    auto* const generic = reinterpret_cast<sockaddr*>(&address_);
    EXPECT_EQ(bind(socket_, generic, size), 0);
    EXPECT_EQ(getsockname(socket_, generic, &size), 0);
  }
  ~SilentServer() { close(socket_); }
  void start() { EXPECT_EQ(listen(socket_, 8), 0); }
  uint16_t port() const { return ntohs(address_.sin_port); }

 private:
  const int socket_;
  sockaddr_in address_ = {};
};

c10d::TCPStoreOptions client_of(const SilentServer& server, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = server.port();
  options.timeout = timeout;
  options.waitWorkers = false;
  return options;
}

TEST(TcpStoreTest, AServerThatSaysNothingIsAnErrorInTime) {
  SilentServer server;
  server.start();
  expect_words(
      error_within(milliseconds(2000),
                   [&] { open_tcp_store("127.0.0.1", client_of(server, milliseconds(1000))); }),
      {"what listens at 127.0.0.1:" + std::to_string(server.port()), "does not answer as a store",
       "stopped", "another program has the port"});
}

TEST(TcpStoreTest, NoServerIsAnErrorAfterTheTimeoutAndNotTwice) {
  const SilentServer server;  // Holds the port and does not listen.
  const auto start = Clock::now();
  const std::string text = error_within(milliseconds(4000), [&] {
    open_tcp_store("127.0.0.1", client_of(server, milliseconds(3000)));
  });
  expect_words(text, {"The client socket has timed out"});
  EXPECT_GE(Clock::now() - start, milliseconds(2500)) << text;
}

// ---- Long waits ----

class SlowWaitTest : public testing::Test {
 protected:
  SlowWaitTest() : before_(slow_wait_after()) { set_slow_wait_after(milliseconds(300)); }
  ~SlowWaitTest() override { set_slow_wait_after(before_); }
  const milliseconds before_;
};

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++found;
  return found;
}

TEST_F(SlowWaitTest, SaysOnceForWhom) {
  testing::internal::CaptureStderr();
  run_ranks(3, [](const Group& group) {
    if (group.rank() == 1) std::this_thread::sleep_for(milliseconds(1200));
    const auto communicator = group.make_communicator("data", Purpose::kData);
    if (group.rank() == 2) std::this_thread::sleep_for(milliseconds(1200));
    communicator->gather_rows(at::full({3, 1}, 1.0), "rows").wait();
    communicator->gather_rows(at::full({3, 1}, 1.0), "more rows").wait();
  });
  const std::string text = testing::internal::GetCapturedStderr();
  for (int rank : {0, 2}) {
    EXPECT_EQ(count(text, "zero: rank " + std::to_string(rank) +
                              " of 3 waits for rank 1 to connect communicator \"test/data\" (up to "
                              "30 s)\n"),
              1)
        << text;
  }
  for (int rank : {0, 1}) {
    EXPECT_EQ(count(text, "zero: rank " + std::to_string(rank) +
                              " of 3 waits for rank 2: gather_rows of rows in group \"test/data\" "
                              "(up to 30 s)\n"),
              1)
        << text;
  }
  EXPECT_EQ(count(text, "more rows"), 0) << text;
}

TEST_F(SlowWaitTest, ShortWaitsSayNothing) {
  testing::internal::CaptureStderr();
  {
    const SlowWait wait([] { return std::string("unexpected"); });
    std::this_thread::sleep_for(milliseconds(100));
  }
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(DurationTest, Texts) {
  EXPECT_EQ(duration_text(milliseconds(1500)), "1500 ms");
  EXPECT_EQ(duration_text(milliseconds(90000)), "90 s");
  EXPECT_EQ(duration_text(milliseconds(600000)), "10 min");
}

}  // namespace
}  // namespace zero
