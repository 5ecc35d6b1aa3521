// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Groups, and groups of groups.

#include "zero/process_group.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/free_port.h"
#include "tests/support/frozen_store.h"
#include "tests/support/in_memory_backend.h"
#include "tests/support/run_ranks.h"
#include "zero/comm/backends/gloo.h"
#include "zero/rendezvous/bounded_store.h"
#include "zero/rendezvous/ended_ranks.h"
#include "zero/rendezvous/tcp_store.h"

namespace {

constexpr const char* kServedName = "rank.example";
std::atomic<bool> name_server_is_away{false};

}  // namespace

// In place of the C library's, with a name server that knows kServedName.
extern "C" int getaddrinfo(const char* name, const char* service, const addrinfo* hints,
                           addrinfo** result) {
  static const auto of_library =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  const bool served = name != nullptr && std::string_view(name) == kServedName;
  if (served && name_server_is_away) return EAI_AGAIN;
  return of_library(served ? "127.0.0.1" : name, service, hints, result);
}

namespace zero {
namespace {

TEST(GroupTest, OneProcessAloneNeedsNothing) {
  const Group group = init_process_group();
  EXPECT_EQ(group.world_size(), 1);
  EXPECT_EQ(group.global_rank(), 0);
  const auto communicator = group.make_communicator("data", Purpose::kData);
  EXPECT_EQ(communicator->all_gather_text("me", "x"), std::vector<std::string>{"me"});
}

TEST(GroupTest, MeansOverRanksKeepTheirShapeAndDtype) {
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(
        world_size,
        [&](const Group& group) {
          const double mean = 0.5 * (world_size - 1) + 1;
          const at::Tensor loss = at::full({}, group.rank() + 1.0, at::kFloat).requires_grad_();
          const at::Tensor shown = mean_over_ranks(loss, group);
          EXPECT_EQ(shown.item<double>(), mean);
          EXPECT_EQ(shown.dim(), 0);
          EXPECT_EQ(shown.scalar_type(), at::kFloat);
          EXPECT_FALSE(shown.requires_grad());
          EXPECT_EQ(loss.item<double>(), group.rank() + 1.0);
          for (const auto dtype : {at::kDouble, at::kBFloat16, at::kHalf}) {
            const at::Tensor numbers = at::arange(6, dtype).view({2, 3}).t();
            const at::Tensor values = numbers + (group.rank() + 1.0);
            ASSERT_FALSE(values.is_contiguous());
            const at::Tensor means = mean_over_ranks(values, group);
            EXPECT_EQ(means.sizes(), at::IntArrayRef({3, 2}));
            EXPECT_EQ(means.scalar_type(), dtype);
            EXPECT_TRUE(means.eq(numbers + mean).all().item<bool>()) << means;
            EXPECT_TRUE(values.eq(numbers + (group.rank() + 1.0)).all().item<bool>()) << values;
          }
          expect_words(error_of([&] { mean_over_ranks(at::ones({2}, at::kLong), group); }),
                       {"mean_over_ranks()", "floating-point", "Long"});
        },
        {.transport = kRealTransport});
  }
}

// On several machines a thread of the library adds up, and it is in no mode.
TEST(GroupTest, AMeanUnderInferenceModeCanBeUsedOutsideOfIt) {
  for (const int ranks_per_machine : {2, 4}) {
    run_ranks(4,
              [](const Group& group) {
                at::Tensor mean;
                {
                  const c10::InferenceMode mode;
                  mean = mean_over_ranks(at::full({2}, group.rank(), at::kDouble), group);
                }
                EXPECT_EQ(mean.add_(1)[0].item<double>(), 2.5);
              },
              {.ranks_per_machine = ranks_per_machine});
  }
}

TEST(GroupTest, ATensorOfInferenceModeIsAddedUpOutsideOfIt) {
  for (const int ranks : {4, 5}) {
    for (const int ranks_per_machine : {2, ranks}) {
      if (ranks % ranks_per_machine != 0) continue;
      run_ranks(ranks,
                [&](const Group& group) {
                  const auto all = group.make_communicator("sums", Purpose::kControl);
                  at::Tensor values;
                  {
                    const c10::InferenceMode mode;
                    values = at::full({2}, 1.0, at::kDouble);
                  }
                  all->all_reduce_sum(values, "values").wait();
                  EXPECT_EQ(values[1].item<double>(), ranks);
                },
                {.ranks_per_machine = ranks_per_machine});
    }
  }
}

TEST(GroupTest, MeansOfDifferentShapesAreAnErrorOnEveryRank) {
  run_ranks(3, [](const Group& group) {
    const bool other = group.rank() == 2;
    const auto mean_of = [&](const std::vector<int64_t>& shape) {
      return error_of([&] { mean_over_ranks(at::ones(shape), group); });
    };
    expect_words(mean_of({other ? 4 : 3}), {"mean_over_ranks()", "the same shape on every rank",
                                            "[3] on rank 0 and [4] on rank 2"});
    expect_words(mean_of(other ? std::vector<int64_t>{3, 2} : std::vector<int64_t>{2, 3}),
                 {"[2, 3] on rank 0 and [3, 2] on rank 2"});
    EXPECT_EQ(mean_of({3}), "");
  });
}

TEST(GroupTest, AMeanOfWhatOneRankCannotGiveIsAnErrorOnEveryRank) {
  const std::vector<std::pair<at::Tensor, std::string>> cases{
      {at::ones({3}, at::kLong), "got Long"}, {at::Tensor(), "an undefined one"}};
  run_ranks(3,
            [&](const Group& group) {
              const at::Tensor good = at::full({3}, group.rank() + 1.0);
              for (const auto& [bad, word] : cases) {
                const bool here = group.rank() == 2;
                expect_words(
                    error_of([&] { mean_over_ranks(here ? bad : good, group); }),
                    {"mean_over_ranks(): ", "rank 2", "expected a floating-point tensor", word});
                EXPECT_TRUE(mean_over_ranks(good, group).eq(2.0).all().item<bool>());
              }
            },
            {.timeout = std::chrono::seconds(10)});
}

TEST(GroupTest, TheTimeoutIsTheOptionsThenTheEnvironments) {
  EXPECT_EQ(init_process_group().timeout(), std::chrono::minutes(10));
  setenv("ZERO_TIMEOUT", "7s", 1);
  EXPECT_EQ(init_process_group().timeout(), std::chrono::seconds(7));
  InitOptions options;
  options.timeout = std::chrono::seconds(3);
  EXPECT_EQ(init_process_group(options).timeout(), std::chrono::seconds(3));
  setenv("ZERO_TIMEOUT", "soon", 1);
  EXPECT_THROW(init_process_group(options), c10::Error);
  unsetenv("ZERO_TIMEOUT");
  for (const std::chrono::milliseconds wrong :
       {std::chrono::milliseconds(0), std::chrono::milliseconds::max()}) {
    options.timeout = wrong;
    expect_words(error_of([&] { init_process_group(options); }),
                 {"InitOptions::timeout", "more than 0 ms and at most a year"});
    expect_words(error_of([&] {
                   const auto store = c10::make_intrusive<c10d::HashStore>();
                   Group(store, 0, 1, "g", nullptr, at::kCPU, wrong);
                 }),
                 {"Group \"g\"", "more than 0 ms and at most a year"});
  }
}

// Of a rank of two.
void set_environment(const char* rank, const char* address, uint16_t port) {
  setenv("RANK", rank, 1);
  setenv("WORLD_SIZE", "2", 1);
  setenv("MASTER_ADDR", address, 1);
  setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
}

// As with `mpirun -x MASTER_ADDR`, where the other machine is named.
TEST(GroupTest, ARank0ThatMasterAddrDoesNotLeadToIsToldSoInTime) {
  set_environment("0", "192.0.2.1", free_port());  // nobody's: RFC 5737
  InitOptions options;
  options.timeout = std::chrono::seconds(3);
  const std::string error = error_within(*options.timeout + std::chrono::seconds(1),
                                         [&] { init_process_group(options); });
  expect_words(error, {"rank 0 of 2 cannot serve the store of rank 0 at 192.0.2.1", "process ",
                       "set MASTER_ADDR", "of the machine of rank 0"});
  EXPECT_EQ(error.find("Choose another"), std::string::npos) << error;
}

// Rank 0 serves the store late, and says nothing about its job: it was stopped then.
TEST(GroupTest, ARank0ThatIsLateAndThenSilentIsAnErrorInTime) {
  using Clock = std::chrono::steady_clock;
  const uint16_t port = free_port();
  set_environment("1", "127.0.0.1", port);
  InitOptions options;
  options.timeout = std::chrono::milliseconds(2500);
  std::atomic<bool> over = false;
  const auto begin = Clock::now();
  std::thread rank0([&] {
    std::this_thread::sleep_until(begin + std::chrono::seconds(1));
    c10d::TCPStoreOptions served;
    served.port = port;
    served.isServer = true;
    served.waitWorkers = false;
    const auto store = open_tcp_store("127.0.0.1", served);
    over.wait(false);
  });
  EXPECT_THROW(
      {
        try {
          init_process_group(options);
        } catch (const c10::Error& error) {
          expect_words(error.what_without_backtrace(),
                       {"init_process_group: rank 1 of 2", "the store of rank 0", "start the job"});
          throw;
        }
      },
      CommunicationError);
  EXPECT_LT(Clock::now() - begin, *options.timeout + std::chrono::seconds(1));
  over = true;
  over.notify_all();
  rank0.join();
}

TEST(GroupTest, AStoreThatIsSilentIsAnErrorOfACommunicatorThatNamesTheRank) {
  const auto store = c10::make_intrusive<FrozenStore>();
  const Group group(store, 1, 4, "g", default_backend_factory(at::kCPU, ""), at::kCPU,
                    std::chrono::milliseconds(300));
  store->freeze(true);
  expect_words(error_of([&] { group.make_communicator("data", Purpose::kData); }),
               {"communicator \"g/data\": rank 1 of 4: the store did not answer", "start the job"});
  store->freeze(false);
}

// They have connected, late, when the process that serves the store is stopped.
TEST(GroupTest, AStoreThatIsSilentOnceRanksAreConnectedIsAnErrorInTimeThatNamesTheRank) {
  using Clock = std::chrono::steady_clock;
  const auto store = c10::make_intrusive<FrozenStore>();
  const std::chrono::milliseconds timeout(3000);
  MemoryNetwork network;
  const auto late = [&](const c10::intrusive_ptr<c10d::Store>& own, int rank, int world_size,
                        Purpose purpose, std::chrono::milliseconds limit) {
    const NewBackend made = network.factory(1)(own, rank, world_size, purpose, limit);
    std::this_thread::sleep_for(timeout - std::chrono::milliseconds(300));
    store->freeze(true);
    return made;
  };
  const Group group(store, 1, 2, "g", late, at::kCPU, timeout);
  const auto begin = Clock::now();
  expect_words(
      error_of([&] { group.make_communicator("data", Purpose::kData); }),
      {"communicator \"g/data\": cannot connect its 2 ranks within 3000 ms (this is rank 1)",
       "the store did not answer"});
  EXPECT_LT(Clock::now() - begin, timeout + std::chrono::milliseconds(2200));
  store->freeze(false);
}

// The others have other numbers, and would never come.
TEST(GroupTest, ASubgroupOfAProcessThatJoinsMakesNoCommunicatorAtOnce) {
  const Group world(c10::make_intrusive<c10d::HashStore>(), 2, 3, "g",
                    default_backend_factory(at::kCPU, "127.0.0.1"), at::kCPU,
                    std::chrono::seconds(10), std::nullopt, {.joins = true});
  const Group train = world.subgroup({0, 1, 2}, "train");
  const auto begin = std::chrono::steady_clock::now();
  for (const Group& group : {world, train, train.subgroup({2, 1}, "part")}) {
    expect_words(error_of([&] { group.make_communicator("data", Purpose::kData); }),
                 {"process 2, which joins the job", "ZeroOptimizer::group()"});
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  world.subgroup({2}, "alone").make_communicator("data", Purpose::kData);
}

// After a recovery the others may have to recover again, in which all of them take part.
TEST(GroupTest, TheEndOfARankCallsOffWhatSubgroupsOfARecoveredGroupBegin) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const Group world(store, 0, 3, "g", default_backend_factory(at::kCPU, "127.0.0.1"), at::kCPU,
                    std::chrono::seconds(20));
  const Group recovered = world.with_members({0, 1, 2}, "recovered");
  add_ended_rank(*BoundedStore::of(store, std::chrono::seconds(20)), 2);
  expect_words(error_of([&] {
                 recovered.subgroup({0, 1}, "dp").make_communicator("data", Purpose::kData);
               }),
               {"\"g/recovered/dp/data\"", "The process with RANK 2 has ended, says the launcher"});
}

TEST(GroupTest, RefusesWhatCannotBe) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto make = [&](int rank, int world_size) {
    return Group(store, rank, world_size, "g", default_backend_factory(at::kCPU, ""), at::kCPU,
                 std::chrono::seconds(1));
  };
  EXPECT_THROW(make(2, 2), c10::Error);
  EXPECT_THROW(make(-1, 2), c10::Error);
  EXPECT_THROW(make(0, 0), c10::Error);
  const Group group = make(1, 4);
  EXPECT_THROW(group.subgroup({0, 2}, "without me"), c10::Error);
  EXPECT_THROW(group.subgroup({1, 1}, "twice"), c10::Error);
  EXPECT_THROW(group.subgroup({1, 4}, "beyond"), c10::Error);
  InitOptions options;
  options.topology = Topology::of_equal_machines(4, 2);
  expect_words(error_of([&] { init_process_group(options); }), {"one of 1 ranks, got one of 4"});
}

TEST(GroupTest, AGpuWhereNoneIsSeenIsRefusedWithTheWayToBuild) {
  InitOptions options;
  options.device = at::Device(at::kCUDA, 63);
  if (at::hasCUDA()) GTEST_SKIP() << "there is a GPU here";
  const std::string error = error_of([&] { init_process_group(options); });
  EXPECT_NE(error.find("--config=cuda"), std::string::npos) << error;
  EXPECT_NE(error.find("-DZERO_CUDA=ON"), std::string::npos) << error;
}

// A 2 x 2 mesh: rows and columns carry the same names on different ranks.
TEST(GroupTest, SubgroupsOfAMesh) {
  for (const Transport transport : {Transport::kGloo, Transport::kMemory}) {
    run_ranks(
        4,
        [](const Group& world) {
          const int row = world.rank() / 2;
          const int column = world.rank() % 2;
          const Group dp = world.subgroup({column, column + 2}, "dp");
          const Group tp = world.subgroup({2 * row + 1, 2 * row}, "tp");  // Reversed on purpose.
          EXPECT_EQ(dp.rank(), row);
          EXPECT_EQ(tp.rank(), 1 - column);
          EXPECT_EQ(tp.global_rank(), world.rank());
          EXPECT_EQ(tp.global_ranks(), (std::vector<int>{2 * row + 1, 2 * row}));
          const auto along_dp = dp.make_communicator("data", Purpose::kData);
          const auto along_tp = tp.make_communicator("data", Purpose::kData);
          const std::string me = std::to_string(world.rank());
          EXPECT_EQ(along_dp->all_gather_text(me, "dp"),
                    (std::vector<std::string>{std::to_string(column), std::to_string(column + 2)}));
          EXPECT_EQ(
              along_tp->all_gather_text(me, "tp"),
              (std::vector<std::string>{std::to_string(2 * row + 1), std::to_string(2 * row)}));
        },
        {.transport = transport});
  }
}

TEST(GroupTest, EqualNamesNeverShareAConnection) {
  run_ranks(2,
            [](const Group& group) {
              const auto first = group.make_communicator("data", Purpose::kData);
              const auto second = Group(group).make_communicator("data", Purpose::kData);
              const auto of_first =
                  group.subgroup({0, 1}, "sub").make_communicator("data", Purpose::kData);
              const auto of_second =
                  group.subgroup({0, 1}, "sub").make_communicator("data", Purpose::kData);
              // Crossed on the two ranks: with a connection in common the texts would be swapped.
              std::vector<Communicator*> order{first.get(), second.get(), of_first.get(),
                                               of_second.get()};
              std::vector<at::Tensor> rows;
              std::vector<Pending> pending;
              for (size_t i = 0; i < order.size(); ++i) rows.push_back(at::full({2, 4}, double(i)));
              for (size_t i = 0; i < order.size(); ++i) {
                const size_t which = group.rank() == 0 ? i : order.size() - 1 - i;
                pending.push_back(order[which]->gather_rows(rows[which], "order"));
              }
              for (Pending& one : pending) one.wait();
              for (size_t i = 0; i < order.size(); ++i) {
                EXPECT_EQ(rows[i].min().item<double>(), double(i));
                EXPECT_EQ(rows[i].max().item<double>(), double(i));
              }
            },
            {.transport = kRealTransport});
}

// Returns how many connections of this process bound what a writer may leave in them unsent.
int bounded_connections() {
  int count = 0;
  for (int descriptor = 0; descriptor < 1024; ++descriptor) {
    sockaddr_storage peer{};
    socklen_t size = sizeof(peer);
    if (getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    int unsent = -1;
    size = sizeof(unsent);
    if (getsockopt(descriptor, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, &size) != 0) continue;
    if (unsent > 0 && unsent <= 1 << 20) ++count;
  }
  return count;
}

// A thread that writes a whole row at once keeps the others from the connection meanwhile.
TEST(GroupTest, AConnectionToAnotherMachineTakesFromAWriterOnlyWhatItSendsSoon) {
  constexpr int kWorld = 3;
  for (const bool one_machine : {false, true}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<c10::intrusive_ptr<c10d::Backend>> backends(kWorld);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kWorld; ++rank) {
      ranks.emplace_back([&, rank] {
        const std::string address = one_machine ? "127.0.0.1" : c10::str("127.0.0.", 2 + rank);
        backends[rank] = make_gloo_backend(store, rank, kWorld, std::chrono::seconds(30), address);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(bounded_connections(), one_machine ? 0 : kWorld * (kWorld - 1));
  }
}

// What each rank of `groups` gets that makes a communicator, with a timeout of ten minutes.
std::vector<std::string> errors_of(
    int ranks, const std::function<Group(const c10::intrusive_ptr<c10d::Store>&, int)>& group) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      errors[rank] =
          error_of([&] { group(store, rank).make_communicator("data", Purpose::kData); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(GroupTest, ASecondThreadThatConnectsACommunicatorOfTheSameNameIsRefusedAtOnce) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto make = [&](const Group& group) { group.make_communicator("data", Purpose::kData); };
  const auto group_of = [&](int rank) {
    return Group(store, rank, 2, "test", default_backend_factory(at::kCPU, "127.0.0.1"), at::kCPU,
                 std::chrono::seconds(20));
  };
  const Group group = group_of(0);
  std::thread first([&] { make(group); });
  while (store->getNumKeys() == 0) std::this_thread::yield();
  expect_words(
      error_of([&] { make(group); }),
      {"communicator \"test/data\" (this is rank 0)", "expected one of this name at a time",
       "construct optimizers, in one thread, in one order on all ranks"});
  std::thread other([&] {
    const Group second = group_of(1);
    make(second);
    make(second);
  });
  first.join();
  make(group);  // as if nothing had happened
  other.join();
}

TEST(GroupTest, OtherLevelsOnOneRankAreAnErrorOnAll) {
  const auto errors = errors_of(4, [](const auto& store, int rank) {
    return Group(store, rank, 4, "levels", default_backend_factory(at::kCPU, "127.0.0.1"), at::kCPU,
                 std::chrono::minutes(10),
                 rank == 3 ? Topology::of_one_machine(4) : Topology::of_equal_machines(4, 2));
  });
  for (const std::string& error : errors) {
    expect_words(error, {"expected the same levels on every rank", "one level", "two levels of 2 ",
                         "the same topology on all ranks"});
  }
}

TEST(GroupTest, AnotherTransportOnOneRankIsAnErrorOnAll) {
  const auto errors = errors_of(3, [](const auto& store, int rank) {
    const c10::Device device = rank == 1 ? c10::Device(at::kCUDA, 0) : c10::Device(at::kCPU);
    return Group(store, rank, 3, "transports", default_backend_factory(device, "127.0.0.1"), device,
                 std::chrono::minutes(10));
  });
  for (const std::string& error : errors) {
    expect_words(error, {"expected the same transport on every rank", "NCCL", "Gloo",
                         "InitOptions::nccl the same value"});
  }
}

// Which needs no GPU: it is asked for none.
TEST(GroupTest, AnEnvironmentThatBreaksPromisesOverNcclIsRefusedOnEveryRank) {
  for (const char* name : {"NCCL_BLOCKING_WAIT", "TORCH_NCCL_NAN_CHECK"}) {
    setenv(name, "1", 1);
    const auto errors = errors_of(2, [](const auto& store, int rank) {
      const c10::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
      return Group(store, rank, 2, "environment", default_backend_factory(device, "127.0.0.1"),
                   device, std::chrono::minutes(10));
    });
    unsetenv(name);
    for (const std::string& error : errors) expect_words(error, {name, "unset it on all ranks"});
  }
}

// Each of two ranks throws an error with `words` that would come again.
void expect_misuse(const std::vector<std::string>& hostnames,
                   const std::vector<std::string>& words) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      const Group group(store, rank, 2, "test",
                        default_backend_factory(at::kCPU, hostnames[rank], false, false), at::kCPU,
                        std::chrono::seconds(60));
      try {
        group.make_communicator("data", Purpose::kData);
        ADD_FAILURE() << "expected an error";
      } catch (const c10::Error& error) {
        EXPECT_EQ(dynamic_cast<const CommunicationError*>(&error), nullptr);
        expect_words(error.what_without_backtrace(), words);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Gloo would send all data over the first, and abort() would not end the connections of others.
TEST(GroupTest, InterfacesThatGlooCannotUseAreRefusedOnEveryRank) {
  setenv("GLOO_SOCKET_IFNAME", "lo,lo", 1);
  expect_misuse({"", ""}, {"GLOO_SOCKET_IFNAME", "expected one network interface, got 2: lo,lo"});
  setenv("GLOO_SOCKET_IFNAME", "^docker0", 1);
  expect_misuse({"", ""}, {"GLOO_SOCKET_IFNAME", "got ^docker0; name one of ", "lo", "in full"});
  unsetenv("GLOO_SOCKET_IFNAME");
}

TEST(GroupTest, TheHostNameOfAnotherMachineIsRefusedOnEveryRank) {
  expect_misuse({"127.0.0.1", "192.0.2.1"},  // nobody's: RFC 5737
                {"InitOptions::hostname: expected a name or address of this machine", "192.0.2.1"});
}

// As in recover(), which a program then calls again.
TEST(GroupTest, AHostNameThatWasRightBeforeIsACommunicationErrorWhereItIsAway) {
  for (const bool away : {false, true}) {
    name_server_is_away = away;
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const Group group(store, 0, 2, "test",
                      default_backend_factory(at::kCPU, kServedName, false, false), at::kCPU,
                      std::chrono::seconds(60));
    std::thread other([&] {
      const Group second(store, 1, 2, "test",
                         default_backend_factory(at::kCPU, kServedName, false, false), at::kCPU,
                         std::chrono::seconds(60));
      error_of([&] { second.make_communicator("data", Purpose::kData); });
    });
    if (away) {
      EXPECT_THROW(group.make_communicator("data", Purpose::kData), CommunicationError);
    } else {
      group.make_communicator("data", Purpose::kData);
    }
    other.join();
  }
  name_server_is_away = false;
}

TEST(GroupTest, ARankThatMakesNoCommunicatorIsNamed) {
  RunOptions options{.transport = kRealTransport};
  options.timeout = std::chrono::milliseconds(1500);
  run_ranks(
      3,
      [](const Group& group) {
        if (group.rank() == 1) {
          std::this_thread::sleep_for(std::chrono::seconds(3));
          return;
        }
        expect_words(error_of([&] { group.make_communicator("data", Purpose::kData); }),
                     {"missing: rank 1", "test/data"});
      },
      options);
}

// The store is silent for most of the time, and then a rank does not come.
TEST(GroupTest, TheTimeToConnectBeginsWithTheCall) {
  using Clock = std::chrono::steady_clock;
  const auto store = c10::make_intrusive<FrozenStore>();
  const std::chrono::milliseconds timeout(2000);
  const Group group(store, 0, 2, "g", default_backend_factory(at::kCPU, "127.0.0.1"), at::kCPU,
                    timeout);
  store->freeze(true);
  const auto begin = Clock::now();
  std::thread thaws([&] {
    std::this_thread::sleep_until(begin + timeout * 3 / 4);
    store->freeze(false);
  });
  expect_words(error_of([&] { group.make_communicator("data", Purpose::kData); }),
               {"missing: rank 1"});
  EXPECT_LT(Clock::now() - begin, timeout + std::chrono::seconds(1));
  thaws.join();
}

// The first call of rank 1, and the second one of rank 0.
TEST(GroupTest, RanksMeetAgainAfterACallOfOneRankAlone) {
  RunOptions options{.transport = kRealTransport};
  options.timeout = std::chrono::seconds(4);
  run_ranks(
      2,
      [](const Group& group) {
        if (group.rank() == 0) {
          expect_words(error_of([&] { group.make_communicator("data", Purpose::kData); }),
                       {"missing: rank 1"});
        } else {
          while (!group.store()->check({"communicator/test/data/1/levels"})) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
          }
        }
        const auto data = group.make_communicator("data", Purpose::kData);
        EXPECT_EQ(data->all_gather_text("me", "x"), std::vector<std::string>(2, "me"));
        EXPECT_EQ(group.make_communicator("data", Purpose::kData)->all_gather_text("me", "x"),
                  std::vector<std::string>(2, "me"));
      },
      options);
}

// As where a rank catches an error of its own between two calls, and begins again.
TEST(GroupTest, ASubgroupThatOneRankMadeTwiceIsTheSame) {
  run_ranks(2,
            [](const Group& group) {
              if (group.rank() == 1) group.subgroup({1, 0}, "dp");
              const Group again = group.subgroup({1, 0}, "dp");
              EXPECT_EQ(again.make_communicator("data", Purpose::kData)->all_gather_text("me", "x"),
                        std::vector<std::string>(2, "me"));
            },
            {.transport = kRealTransport});
}

TEST(GroupTest, StoresThatOneRankAloneHasMadeAreCountedByAll) {
  for (const int ahead : {0, 1, 2}) {
    run_ranks(3,
              [&](const Group& group) {
                group.make_store("board");
                if (group.rank() == ahead) {
                  group.make_store("board");
                  group.make_store("of one rank");
                }
                group.make_communicator("data", Purpose::kData);
                for (const char* name : {"board", "of one rank"}) {
                  const auto store = group.make_store(name);
                  store->set(std::to_string(group.rank()), "here");
                  store->wait({"0", "1", "2"});
                }
              },
              {.transport = kRealTransport});
  }
}

// Each of two changes of parameters or recoveries makes communicators anew, and so do pairs of
// ranks.
TEST(GroupTest, KeysOfCommunicatorsThatAreGoneAreRemoved) {
  for (const int ranks_per_machine : {0, 2}) {
    run_ranks(4,
              [&](const Group& world) {
                const auto barrier = world.make_communicator("barrier", Purpose::kControl);
                // The keys after the first calls, and after many more.
                const auto expect_no_growth = [&](const std::function<void(int)>& call) {
                  int64_t keys = 0;
                  for (int i = 0; i < 8; ++i) {
                    call(i);
                    barrier->all_gather_text("", "done");
                    if (i == 1) keys = world.store()->getNumKeys();
                    if (i > 1) {
                      EXPECT_LE(world.store()->getNumKeys(), keys);
                    }
                    barrier->all_gather_text("", "counted");
                  }
                };
                const auto make = [](const Group& group, const char* name) {
                  EXPECT_EQ(
                      group.make_communicator(name, Purpose::kData)->all_gather_text("", "").size(),
                      static_cast<size_t>(group.world_size()));
                };
                const auto pair_of = [&](const Group& group) {
                  const int first = group.rank() / 2 * 2;
                  return group.subgroup({first, first + 1}, "pair");
                };
                expect_no_growth([&](int) {
                  make(world, "data");
                  make(pair_of(world), "files");
                });
                expect_no_growth([&](int i) {
                  const Group now = world.with_members({0, 1, 2, 3}, c10::str("recovery ", i));
                  make(now, "control");
                  make(pair_of(now), "files");
                });
              },
              {.transport = kRealTransport, .ranks_per_machine = ranks_per_machine});
  }
}

// A transport may ask its store for keys whenever it is used.
TEST(GroupTest, KeysOfCommunicatorsThatAreThereStay) {
  run_ranks(
      2,
      [](const Group& group) {
        const auto has = [&](int number) {
          return group.store()->check({c10::str("communicator/test/data/", number, "/rank/0"),
                                       c10::str("communicator/test/data/", number, "/rank/1")});
        };
        auto first = group.make_communicator("data", Purpose::kData);
        group.make_communicator("data", Purpose::kData);
        const auto third = group.make_communicator("data", Purpose::kData);
        third->all_gather_text("", "no rank removes keys now");
        EXPECT_TRUE(has(0));
        EXPECT_FALSE(has(1));
        first.reset();
        const auto fourth = group.make_communicator("data", Purpose::kData);
        fourth->all_gather_text("", "no rank removes keys now");
        EXPECT_FALSE(has(0));
        EXPECT_TRUE(has(2));
        EXPECT_TRUE(has(3));
      },
      {.transport = kRealTransport});
}

// Of the call that failed the others may yet read why, and those that were not there its number.
TEST(GroupTest, KeysOfACallThatFailedStay) {
  RunOptions options{.transport = kRealTransport};
  options.timeout = std::chrono::seconds(2);
  run_ranks(
      2,
      [](const Group& group) {
        const auto key = [](int number) {
          return c10::str("communicator/test/data/", number, "/levels");
        };
        if (group.rank() == 0) {
          expect_words(error_of([&] { group.make_communicator("data", Purpose::kData); }),
                       {"missing: rank 1"});
        } else {
          while (!group.store()->check({key(1)})) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
          }
        }
        for (int i = 0; i < 3; ++i) group.make_communicator("data", Purpose::kData);
        EXPECT_TRUE(group.store()->check({key(0)}));
      },
      options);
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
