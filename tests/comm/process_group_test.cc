// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What launchers say, groups of groups, and real processes.

#include "zero/process_group.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/rendezvous/environment.h"

namespace zero {
namespace {

using Variables = std::map<std::string, std::string>;

Environment read(const Variables& variables) {
  return read_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

// What reading throws; empty when it does not.
std::string refusal(const Variables& variables) {
  return error_of([&] { read(variables); });
}

Variables torchrun() {
  return {{"RANK", "3"},
          {"WORLD_SIZE", "8"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "host"},
          {"MASTER_PORT", "1234"},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
          {"TORCHELASTIC_RESTART_COUNT", "2"}};
}

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

TEST(EnvironmentTest, NothingIsOneProcessAlone) {
  const Environment env = read({});
  EXPECT_EQ(env.source, Environment::Source::kAlone);
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.local_world_size, 1);
}

TEST(EnvironmentTest, Torchrun) {
  const Environment env = read(torchrun());
  EXPECT_EQ(env.source, Environment::Source::kTorchrun);
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.master_addr, "host");
  EXPECT_EQ(env.master_port, 1234);
  EXPECT_TRUE(env.agent_serves_store);
  EXPECT_EQ(env.restart_count, 2);
}

TEST(EnvironmentTest, OnlyTrueMeansThatTheAgentServes) {
  EXPECT_FALSE(read(with(torchrun(), "TORCHELASTIC_USE_AGENT_STORE", "False")).agent_serves_store);
  EXPECT_FALSE(read(without(torchrun(), "TORCHELASTIC_USE_AGENT_STORE")).agent_serves_store);
}

TEST(EnvironmentTest, ContradictionsNameTheVariables) {
  const auto expect = [](const Variables& variables, const std::vector<std::string>& parts) {
    const std::string text = refusal(variables);
    for (const std::string& part : parts) {
      EXPECT_NE(text.find(part), std::string::npos) << "\"" << part << "\" is not in: " << text;
    }
  };
  expect(with(torchrun(), "RANK", "8"), {"RANK=8", "8"});
  expect(with(torchrun(), "RANK", "two"), {"RANK=\"two\""});
  expect(with(torchrun(), "RANK", "-1"), {"RANK=\"-1\""});
  expect(with(torchrun(), "RANK", "3x"), {"RANK=\"3x\""});
  expect(with(torchrun(), "WORLD_SIZE", "0"), {"WORLD_SIZE=\"0\""});
  expect(without(torchrun(), "WORLD_SIZE"), {"WORLD_SIZE", "RANK"});
  expect(without(torchrun(), "RANK"), {"WORLD_SIZE", "RANK"});
  expect(without(torchrun(), "MASTER_ADDR"), {"MASTER_ADDR", "RANK=3"});
  expect(without(torchrun(), "MASTER_PORT"), {"MASTER_PORT", "RANK=3"});
  expect(with(torchrun(), "MASTER_PORT", "70000"), {"MASTER_PORT=70000"});
  expect(with(torchrun(), "LOCAL_RANK", "2"), {"LOCAL_RANK", "LOCAL_WORLD_SIZE"});
  expect(with(torchrun(), "LOCAL_WORLD_SIZE", "9"), {"LOCAL_WORLD_SIZE", "WORLD_SIZE"});
}

TEST(EnvironmentTest, OpenMpiOnOneMachineNeedsNoAddress) {
  const Variables variables{{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"PMIX_NAMESPACE", "prterun-host-77@1"}};
  const Environment env = read(variables);
  EXPECT_EQ(env.source, Environment::Source::kOpenMpi);
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_GE(env.master_port, 10000);
  EXPECT_LT(env.master_port, 30000);
  EXPECT_FALSE(env.agent_serves_store);
  EXPECT_EQ(read(with(variables, "OMPI_COMM_WORLD_RANK", "2")).master_port, env.master_port);
  EXPECT_NE(read(with(variables, "PMIX_NAMESPACE", "prterun-host-78@1")).master_port,
            env.master_port);
  EXPECT_EQ(read(with(variables, "MASTER_PORT", "4000")).master_port, 4000);
  EXPECT_NE(refusal(with(variables, "OMPI_COMM_WORLD_LOCAL_SIZE", "2")).find("MASTER_ADDR"),
            std::string::npos);
}

Variables srun() {
  return {{"SLURM_PROCID", "5"},
          {"SLURM_STEP_NUM_TASKS", "8"},
          {"SLURM_LOCALID", "1"},
          {"SLURM_STEP_NUM_NODES", "2"},
          {"SLURM_JOB_ID", "4711"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_STEP_NODELIST", "gpu[03-04]"},
          {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"}};
}

TEST(EnvironmentTest, Slurm) {
  const Environment env = read(srun());
  EXPECT_EQ(env.source, Environment::Source::kSlurm);
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.master_addr, "gpu03");
  EXPECT_GE(env.master_port, 10000);
  EXPECT_LT(env.master_port, 30000);
  EXPECT_EQ(read(with(srun(), "SLURM_PROCID", "0")).master_port, env.master_port);
  EXPECT_NE(read(with(srun(), "SLURM_STEP_ID", "1")).master_port, env.master_port);
  EXPECT_EQ(read(without(srun(), "SLURM_STEP_NODELIST")).master_addr, "10.0.0.1");
  EXPECT_EQ(read(with(srun(), "SLURM_STEP_NUM_NODES", "1")).master_addr, "127.0.0.1");
  EXPECT_EQ(read(with(srun(), "MASTER_ADDR", "other")).master_addr, "other");
}

TEST(EnvironmentTest, ABatchScriptWithoutSrunIsAlone) {
  const Variables batch{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "1"}};
  EXPECT_EQ(read(batch).source, Environment::Source::kAlone);
}

TEST(EnvironmentTest, AnExportedWorldSizeMustAgreeWithTheLauncher) {
  EXPECT_EQ(read(with(srun(), "WORLD_SIZE", "8")).world_size, 8);
  EXPECT_NE(refusal(with(srun(), "WORLD_SIZE", "4")).find("WORLD_SIZE=4"), std::string::npos);
}

TEST(EnvironmentTest, TorchrunWinsOverTheLauncherOfTorchrun) {
  EXPECT_EQ(read(with(with(torchrun(), "SLURM_PROCID", "0"), "SLURM_STEP_NUM_TASKS", "4")).source,
            Environment::Source::kTorchrun);
}

TEST(EnvironmentTest, ZeroTimeoutHasAUnit) {
  EXPECT_FALSE(read({}).timeout.has_value());
  EXPECT_FALSE(read({{"ZERO_TIMEOUT", ""}}).timeout.has_value());
  const std::map<std::string, std::chrono::milliseconds> good{
      {"90", std::chrono::seconds(90)},
      {"90s", std::chrono::seconds(90)},
      {"500ms", std::chrono::milliseconds(500)},
      {"10min", std::chrono::minutes(10)},
      {"2h", std::chrono::hours(2)},
      {"8760h", std::chrono::hours(8760)}};
  for (const auto& [text, expected] : good) {
    EXPECT_EQ(read({{"ZERO_TIMEOUT", text}}).timeout, expected) << text;
    EXPECT_EQ(read(with(torchrun(), "ZERO_TIMEOUT", text)).timeout, expected) << text;
  }
  for (const char* bad : {"0", "-1", "0s", "1.5", "10 s", "s", "10m", "10x", "ten", "8761h",
                          "99999999999999999999", "9223372036854775807h"}) {
    expect_words(refusal({{"ZERO_TIMEOUT", bad}}),
                 {std::string("ZERO_TIMEOUT=\"") + bad + "\"", "90, 90s, 500ms, 10min or 2h"});
  }
}

TEST(EnvironmentTest, FirstHost) {
  EXPECT_EQ(first_host("n1"), "n1");
  EXPECT_EQ(first_host("n1,n2"), "n1");
  EXPECT_EQ(first_host("gpu[03-05,9],login1"), "gpu03");
  EXPECT_EQ(first_host("gpu[7,9]"), "gpu7");
  EXPECT_EQ(first_host("rack[1-2]node[004-8]-ib"), "rack1node004-ib");
  EXPECT_THROW(first_host("gpu[1"), c10::Error);
}

TEST(GroupTest, OneProcessAloneNeedsNothing) {
  const Group group = init_process_group();
  EXPECT_EQ(group.world_size(), 1);
  EXPECT_EQ(group.global_rank(), 0);
  const auto communicator = group.make_communicator("data", Purpose::kData);
  EXPECT_EQ(communicator->all_gather_text("me", "x"), std::vector<std::string>{"me"});
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
  options.timeout = std::chrono::seconds(0);
  EXPECT_THROW(init_process_group(options), c10::Error);
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
  run_ranks(2, [](const Group& group) {
    const auto first = group.make_communicator("data", Purpose::kData);
    const auto second = Group(group).make_communicator("data", Purpose::kData);
    const auto of_first = group.subgroup({0, 1}, "sub").make_communicator("data", Purpose::kData);
    const auto of_second = group.subgroup({0, 1}, "sub").make_communicator("data", Purpose::kData);
    // Crossed on the two ranks: with a connection in common the texts would be swapped.
    std::vector<Communicator*> order{first.get(), second.get(), of_first.get(), of_second.get()};
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
  });
}

TEST(GroupTest, ARankThatMakesNoCommunicatorIsNamed) {
  RunOptions options;
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

// ---- Processes ----

struct Outcome {
  int code = -1;  // As a shell would show it.
  std::string output;
  std::chrono::milliseconds duration{};
  bool has(const std::string& text) const { return output.find(text) != std::string::npos; }
};

std::string program() {
  const char* path = std::getenv("LAUNCH_PROGRAM");
  return path == nullptr ? "tests/rendezvous/launch_program" : path;
}

Outcome launch(const std::string& arguments) {
  const auto start = std::chrono::steady_clock::now();
  Outcome outcome;
  FILE* pipe = popen(("exec " + program() + " " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> buffer;
  while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
    outcome.output.append(buffer.data(), count);
  }
  const int status = pclose(pipe);
  outcome.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  outcome.duration = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start);
  return outcome;
}

TEST(LaunchTest, RanksMeetAndTalk) {
  const Outcome outcome = launch("3 ok prefix");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  for (const char* line : {"[0] round 0 of rank 0: 0 1 4 \n", "[2] round 1 of rank 2: 0 1 4 \n"}) {
    EXPECT_TRUE(outcome.has(line)) << outcome.output;
  }
  std::istringstream lines(outcome.output);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_EQ(line.substr(0, 1), "[") << "a line without its rank: " << line;
  }
  EXPECT_FALSE(outcome.has("threads unset"));
}

TEST(LaunchTest, WithoutLibuv) {
  setenv("USE_LIBUV", "0", 1);
  const Outcome outcome = launch("2 ok prefix");
  unsetenv("USE_LIBUV");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
}

TEST(LaunchTest, OneRankIsThisProcess) {
  const Outcome outcome = launch("1 ok prefix");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_TRUE(outcome.has("round 0 of rank 0: 0 \n")) << outcome.output;
  EXPECT_FALSE(outcome.has("[0]"));
}

TEST(LaunchTest, TheFirstFailureDecidesAndEndsTheOthers) {
  const Outcome outcome = launch("3 code");
  EXPECT_EQ(outcome.code, 7);
  EXPECT_TRUE(outcome.has("rank 1 of 3 failed with exit code 7")) << outcome.output;
  EXPECT_LT(outcome.duration, std::chrono::seconds(30));
}

TEST(LaunchTest, ASignalIsAFailure) {
  const Outcome outcome = launch("2 signal");
  EXPECT_EQ(outcome.code, 128 + SIGKILL);
  EXPECT_TRUE(outcome.has("rank 1 of 2 ended by signal 9")) << outcome.output;
}

TEST(LaunchTest, AnExceptionIsAFailure) {
  const Outcome outcome = launch("2 throw prefix");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(outcome.has("[1] error: this is what rank 1 throws\n")) << outcome.output;
}

TEST(LaunchTest, ARankThatIgnoresSigtermIsKilled) {
  const Outcome outcome = launch("3 stubborn");
  EXPECT_EQ(outcome.code, 9) << outcome.output;
  EXPECT_LT(outcome.duration, std::chrono::seconds(30));
}

TEST(LaunchTest, ALateRankIsNamed) {
  const Outcome outcome = launch("3 late prefix");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(outcome.has("missing: rank 1")) << outcome.output;
}

// Starts a job of two sleeping ranks and returns the pids that they print; `parent` gets its own.
std::set<int> start_sleepers(FILE*& pipe, int& parent) {
  pipe = popen(("echo $$; exec " + program() + " 2 sleep 2>&1").c_str(), "r");
  std::set<int> pids;
  char line[256];
  if (pipe == nullptr || std::fgets(line, sizeof(line), pipe) == nullptr) return pids;
  parent = std::atoi(line);
  while (pids.size() < 2 && std::fgets(line, sizeof(line), pipe) != nullptr) {
    int pid = 0;
    if (std::sscanf(line, "pid %d", &pid) == 1) pids.insert(pid);
  }
  return pids;
}

// The local addresses, as /proc/net shows them, at which process `pid` listens.
std::set<std::string> listening(int pid) {
  std::set<std::string> inodes;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (target.rfind("socket:[", 0) == 0) inodes.insert(target.substr(8, target.size() - 9));
  }
  std::set<std::string> addresses;
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string line;
    while (std::getline(file, line)) {
      std::istringstream words(line);
      std::string word, local, remote, state, inode;
      words >> word >> local >> remote >> state >> word >> word >> word >> word >> word >> inode;
      if (state == "0A" && inodes.count(inode) > 0) {
        addresses.insert(local.substr(0, local.find(':')));
      }
    }
  }
  return addresses;
}

bool all_gone(const std::set<int>& pids) {
  for (int tries = 0; tries < 500; ++tries) {
    bool gone = true;
    for (const int pid : pids) gone = gone && kill(pid, 0) != 0;
    if (gone) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

TEST(LaunchTest, TheStoreIsOutOfReachOfOtherMachines) {
  for (const char* libuv : {"1", "0"}) {
    setenv("USE_LIBUV", libuv, 1);
    FILE* pipe = nullptr;
    int parent = 0;
    const std::set<int> pids = start_sleepers(pipe, parent);
    unsetenv("USE_LIBUV");
    ASSERT_EQ(pids.size(), 2u);
    EXPECT_EQ(listening(parent), std::set<std::string>{"0100007F"});
    kill(parent, SIGKILL);
    pclose(pipe);
    EXPECT_TRUE(all_gone(pids));
  }
}

TEST(LaunchTest, AProgressBarIsSeenWhileItRuns) {
  FILE* pipe = popen(("echo $$; exec " + program() + " 2 bar prefix 2>&1").c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  char line[256];
  ASSERT_NE(std::fgets(line, sizeof(line), pipe), nullptr);
  const int parent = std::atoi(line);
  std::map<std::string, std::string> seen;  // by rank
  for (int ends = 0; ends < 2 && std::fgets(line, sizeof(line), pipe) != nullptr;) {
    const std::string text = line;
    if (text.size() > 3) seen[text.substr(0, 4)] += text.substr(4);
    ends += text.find("half") != std::string::npos;
  }
  kill(parent, SIGTERM);
  while (std::fgetc(pipe) != EOF) {  // What it says at the end must have a reader.
  }
  pclose(pipe);
  const std::string expected = "10%\n20%\ndone\nnext\n\nlast\nhalf\n";
  EXPECT_EQ(seen, (std::map<std::string, std::string>{{"[0] ", expected}, {"[1] ", expected}}));
}

TEST(LaunchTest, ALineWithoutEndIsPassedOnInParts) {
  const Outcome outcome = launch("2 long prefix");
  EXPECT_EQ(outcome.code, 0);
  std::map<char, size_t> bytes;
  size_t longest = 0;
  std::istringstream lines(outcome.output);
  for (std::string line; std::getline(lines, line);) {
    ASSERT_GT(line.size(), 4u);
    const char rank = line[1];
    const char letter = rank == '0' ? 'a' : 'b';
    EXPECT_EQ(line.substr(4).find_first_not_of(std::string{letter, 'e'}), std::string::npos)
        << "two ranks share a line";
    bytes[rank] += line.size() - 4;
    longest = std::max(longest, line.size() - 4);
  }
  EXPECT_EQ(bytes, (std::map<char, size_t>{{'0', 300001}, {'1', 300001}}));
  EXPECT_EQ(longest, size_t{64 << 10});
}

TEST(LaunchTest, SigtermReachesTheRanks) {
  FILE* pipe = nullptr;
  int parent = 0;
  const std::set<int> pids = start_sleepers(pipe, parent);
  ASSERT_EQ(pids.size(), 2u);
  kill(parent, SIGTERM);
  std::string output;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
  const int status = pclose(pipe);
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGTERM);
  EXPECT_NE(output.find("ended by signal 15"), std::string::npos) << output;
  EXPECT_EQ(output.find("stopping the others"), std::string::npos) << "all were told: " << output;
  EXPECT_TRUE(all_gone(pids));
}

TEST(LaunchTest, RanksDieWithTheirParent) {
  FILE* pipe = nullptr;
  int parent = 0;
  const std::set<int> pids = start_sleepers(pipe, parent);
  ASSERT_EQ(pids.size(), 2u);
  kill(parent, SIGKILL);
  pclose(pipe);
  EXPECT_TRUE(all_gone(pids));
}

}  // namespace
}  // namespace zero
