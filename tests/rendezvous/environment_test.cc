// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// read_environment() on the variables of each launcher.
#include "zero/rendezvous/environment.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

using Variables = std::map<std::string, std::string>;

Environment read(const Variables& variables) {
  return read_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

// The error of reading, empty if there is none.
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

Variables hydra() {  // mpirun of MPICH and Intel MPI
  return {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
}

TEST(EnvironmentTest, Hydra) {
  const Environment env = read(with(hydra(), "MASTER_ADDR", "host"));
  EXPECT_EQ(env.source, Environment::Source::kHydra);
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 4);
  EXPECT_EQ(env.master_addr, "host");
  EXPECT_NE(refusal(hydra()).find("MASTER_ADDR is not set, although PMI_RANK=5 of 8"),
            std::string::npos);
  EXPECT_EQ(read(with(hydra(), "MPI_LOCALNRANKS", "8")).master_addr, "127.0.0.1");
  // Those of the srun that has started Hydra's helpers.
  Variables in_slurm = srun();
  in_slurm.merge(with(hydra(), "MASTER_ADDR", "host"));
  EXPECT_EQ(read(in_slurm).source, Environment::Source::kHydra);
}

TEST(EnvironmentTest, ALauncherThatIsNotKnownIsRefused) {
  EXPECT_NE(refusal(without(hydra(), "MPI_LOCALRANKID")).find("PMI_SIZE=8"), std::string::npos);
  EXPECT_EQ(read({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).source, Environment::Source::kAlone);
  // prterun says no number of ranks, and PALS that of a machine.
  EXPECT_NE(refusal({{"PMIX_RANK", "1"}}).find("PMIX_RANK=1"), std::string::npos);
  EXPECT_EQ(read({{"PMIX_RANK", "0"}}).source, Environment::Source::kAlone);
  EXPECT_NE(refusal({{"PALS_RANKID", "0"}, {"PALS_LOCAL_SIZE", "4"}}).find("PALS_LOCAL_SIZE=4"),
            std::string::npos);
  EXPECT_NE(refusal({{"PALS_RANKID", "3"}, {"PALS_LOCAL_SIZE", "1"}}).find("PALS_RANKID=3"),
            std::string::npos);
  Variables in_slurm = srun();  // srun --mpi=pmi2
  in_slurm.merge(without(hydra(), "MPI_LOCALRANKID"));
  in_slurm["PMIX_RANK"] = "5";  // and --mpi=pmix
  EXPECT_EQ(read(in_slurm).source, Environment::Source::kSlurm);
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
  const Variables of_job = with(srun(), "SLURM_JOB_NODELIST", "gpu[07-08]");
  EXPECT_EQ(read(of_job).master_addr, "gpu03") << "the step's come first";
  EXPECT_EQ(read(without(of_job, "SLURM_STEP_NODELIST")).master_addr, "gpu07");
  EXPECT_EQ(read(with(srun(), "SLURM_STEP_NUM_NODES", "1")).master_addr, "127.0.0.1");
  EXPECT_EQ(read(with(srun(), "MASTER_ADDR", "other")).master_addr, "other");
}

TEST(EnvironmentTest, AJobIsCalledAsItsLauncherSays) {
  EXPECT_EQ(read(torchrun()).job, "");
  EXPECT_EQ(read(with(torchrun(), "TORCHELASTIC_RUN_ID", "run 7")).job, "run 7");
  const std::string job = read(srun()).job;
  EXPECT_NE(job, "");
  EXPECT_EQ(read(with(srun(), "SLURM_PROCID", "0")).job, job);
  EXPECT_NE(read(with(srun(), "SLURM_STEP_ID", "1")).job, job);
  EXPECT_NE(read(with(srun(), "SLURM_JOB_ID", "4712")).job, job);
  EXPECT_EQ(read(with(srun(), "TORCHELASTIC_RUN_ID", "mine")).job, "mine");
  const Variables mpirun{{"OMPI_COMM_WORLD_RANK", "0"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_EQ(read(mpirun).job, "");
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"}) {  // of versions 5 and 4
    const Variables named = with(mpirun, name, "a");
    EXPECT_NE(read(named).job, read(with(mpirun, name, "b")).job) << name;
    EXPECT_EQ(read(named).job, read(with(named, "OMPI_COMM_WORLD_RANK", "1")).job) << name;
  }
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

TEST(EnvironmentTest, AProcessThatJoinsNeedsAStoreThatNoRankServes) {
  EXPECT_FALSE(read(torchrun()).joins);
  EXPECT_FALSE(read(with(torchrun(), "ZERO_JOIN", "0")).joins);
  EXPECT_TRUE(read(with(torchrun(), "ZERO_JOIN", "1")).joins);
  expect_words(refusal(with(torchrun(), "ZERO_JOIN", "yes")), {"ZERO_JOIN", "yes", "0 or 1"});
  const Variables joins = with(torchrun(), "ZERO_JOIN", "1");
  for (const Variables& v :
       {without(joins, "TORCHELASTIC_USE_AGENT_STORE"), Variables{{"ZERO_JOIN", "1"}},
        Variables{{"ZERO_JOIN", "1"}, {"SLURM_PROCID", "1"}}}) {
    expect_words(refusal(v), {"ZERO_JOIN=1", "RANK", "TORCHELASTIC_USE_AGENT_STORE"});
  }
  // Each job has had a rank 0; a single rank would look at no store.
  for (const char* size : {"1", "2"}) {
    const Variables first = with(with(joins, "RANK", "0"), "WORLD_SIZE", size);
    expect_words(refusal(with(with(first, "LOCAL_RANK", "0"), "LOCAL_WORLD_SIZE", "1")),
                 {"ZERO_JOIN=1", "no rank of the job has had", "RANK=0", size});
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

}  // namespace
}  // namespace zero
