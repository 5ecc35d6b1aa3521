// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/rendezvous/environment.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace zero {
namespace {

// Below the range from which the kernel hands out ports to clients.
constexpr uint32_t kFirstDerivedPort = 10000;
constexpr uint32_t kDerivedPorts = 20000;

// Variables with their values, so that every error can name both.
class Variables {
 public:
  explicit Variables(const Getenv& getenv) : getenv_(getenv) {}

  // An empty value counts as not set, as for most programs.
  std::optional<std::string> text(const char* name) const {
    const char* value = getenv_(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
  }

  bool has(const char* name) const { return text(name).has_value(); }

  std::optional<int> number(const char* name, int lowest) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    int parsed = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), parsed);
    TORCH_CHECK(error == std::errc() && end == value->data() + value->size() && parsed >= lowest,
                "environment variable ", name, "=\"", *value,
                "\": expected a whole number >= ", lowest);
    return parsed;
  }

  int required(const char* name, int lowest, const char* because) const {
    const auto value = number(name, lowest);
    TORCH_CHECK(value.has_value(), "environment variable ", name, " is not set, although ", because,
                " is: expected both or neither. Start the program with torchrun, mpirun, srun or "
                "its own launcher, or unset ",
                because, " to run one process alone");
    return *value;
  }

 private:
  const Getenv& getenv_;
};

std::optional<std::chrono::milliseconds> read_timeout(const Variables& variables) {
  const auto text = variables.text("ZERO_TIMEOUT");
  if (!text) return std::nullopt;
  int64_t count = 0;
  const char* const end = text->data() + text->size();
  const auto [number_end, error] = std::from_chars(text->data(), end, count);
  const std::string unit(number_end, end);
  int64_t factor = 0;
  if (unit == "ms") factor = 1;
  if (unit.empty() || unit == "s") factor = 1000;
  if (unit == "min") factor = 60 * 1000;
  if (unit == "h") factor = 60 * 60 * 1000;
  TORCH_CHECK(
      error == std::errc() && factor > 0 && count > 0 && count <= kLongestTimeout.count() / factor,
      "environment variable ZERO_TIMEOUT=\"", *text,
      "\": expected a whole number above 0 of seconds or with a unit, of at most a year: "
      "90, 90s, 500ms, 10min or 2h");
  return std::chrono::milliseconds(count * factor);
}

bool read_join(const Variables& variables, const Environment& env) {
  const auto text = variables.text("ZERO_JOIN");
  if (!text || *text == "0") return false;
  TORCH_CHECK(*text == "1", "environment variable ZERO_JOIN=\"", *text, "\": expected 0 or 1");
  TORCH_CHECK(
      env.source == Environment::Source::kTorchrun && env.agent_serves_store,
      "environment variable ZERO_JOIN=1: expected RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT "
      "and TORCHELASTIC_USE_AGENT_STORE=True, for a store that a process of no rank serves, as "
      "launch_local() does; got a job whose store ends with rank 0, or none");
  TORCH_CHECK(env.rank > 0,
              "environment variable ZERO_JOIN=1: expected a RANK that no rank of the job has had, "
              "and WORLD_SIZE one above it, got RANK=",
              env.rank, " and WORLD_SIZE=", env.world_size);
  return true;
}

// FNV-1a: the same on every machine, unlike std::hash.
uint32_t hash(std::string_view text) {
  uint32_t value = 2166136261u;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 16777619u;
  return value;
}

void read_torchrun(const Variables& variables, Environment& env) {
  env.source = Environment::Source::kTorchrun;
  env.rank = variables.required("RANK", 0, "WORLD_SIZE");
  env.world_size = variables.required("WORLD_SIZE", 1, "RANK");
  env.local_world_size = variables.number("LOCAL_WORLD_SIZE", 1).value_or(0);
  // Hand-made launchers often leave it out, which can only mean one rank per machine.
  env.local_rank = variables.number("LOCAL_RANK", 0).value_or(0);
  env.agent_serves_store = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
}

// The names of an mpirun's variables.
struct MpiNames {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};
constexpr MpiNames kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr MpiNames kHydra{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};

void read_mpi(const Variables& variables, const MpiNames& names, Environment& env) {
  env.rank = variables.required(names.rank, 0, names.size);
  env.world_size = variables.required(names.size, 1, names.rank);
  env.local_rank = variables.required(names.local_rank, 0, names.rank);
  env.local_world_size = variables.number(names.local_size, 1).value_or(0);
}

void read_slurm(const Variables& variables, Environment& env) {
  env.source = Environment::Source::kSlurm;
  env.rank = variables.required("SLURM_PROCID", 0, "SLURM_STEP_NUM_TASKS");
  env.world_size = variables.required("SLURM_STEP_NUM_TASKS", 1, "SLURM_PROCID");
  env.local_rank = variables.required("SLURM_LOCALID", 0, "SLURM_PROCID");
  // The tasks per node come as a list per node, "4(x2),3": only one node is of interest here.
  const bool one_node = variables.number("SLURM_STEP_NUM_NODES", 1) == 1;
  env.local_world_size = one_node ? env.world_size : 0;
}

// Returns a text that differs between jobs on the same machines and is equal on all ranks of one;
// empty if the launcher gives none.
std::string job_identity(const Variables& variables, Environment::Source source) {
  std::string identity;
  bool known = false;
  const auto append = [&](const char* name) {
    known = known || variables.has(name);
    identity += variables.text(name).value_or("") + ".";
  };
  if (source == Environment::Source::kSlurm) {
    append("SLURM_JOB_ID");
    append("SLURM_STEP_ID");
  } else if (source == Environment::Source::kOpenMpi) {
    append("PMIX_NAMESPACE");
    append("OMPI_MCA_orte_hnp_uri");
  }
  return known ? identity : std::string();
}

const char* rank_variable(Environment::Source source) {
  if (source == Environment::Source::kOpenMpi) return kOpenMpi.rank;
  if (source == Environment::Source::kHydra) return kHydra.rank;
  return source == Environment::Source::kSlurm ? "SLURM_PROCID" : "RANK";
}

void read_rendezvous(const Variables& variables, Environment& env) {
  const bool derivable = env.source != Environment::Source::kTorchrun;
  const auto address = variables.text("MASTER_ADDR");
  if (address) {
    env.master_addr = *address;
  } else if (derivable && env.local_world_size == env.world_size) {
    env.master_addr = "127.0.0.1";
  } else if (env.source == Environment::Source::kSlurm) {
    auto hosts = variables.text("SLURM_STEP_NODELIST");
    if (!hosts) hosts = variables.text("SLURM_JOB_NODELIST");
    env.master_addr =
        hosts ? first_host(*hosts) : variables.text("SLURM_LAUNCH_NODE_IPADDR").value_or("");
  }
  TORCH_CHECK(!env.master_addr.empty(), "environment variable MASTER_ADDR is not set, although ",
              rank_variable(env.source), "=", env.rank, " of ", env.world_size,
              " ranks: expected the name or address of the machine of rank 0, the same on every "
              "rank (with mpirun: -x MASTER_ADDR=host)");
  const auto port = variables.number("MASTER_PORT", 1);
  TORCH_CHECK(port.has_value() || derivable,
              "environment variable MASTER_PORT is not set, although RANK=", env.rank, " of ",
              env.world_size,
              " ranks: expected a free port of MASTER_ADDR, the same on every rank");
  TORCH_CHECK(!port || *port <= 65535, "environment variable MASTER_PORT=", port.value_or(0),
              ": expected a port in [1, 65535]");
  const std::string identity = job_identity(variables, env.source);
  env.master_port = port.value_or(kFirstDerivedPort + hash(identity) % kDerivedPorts);
  env.job = variables.text("TORCHELASTIC_RUN_ID").value_or(identity);
}

void check_consistent(const Variables& variables, const Environment& env) {
  const char* rank_name = rank_variable(env.source);
  TORCH_CHECK(env.rank < env.world_size, "environment variable ", rank_name, "=", env.rank,
              " contradicts the number of ranks, ", env.world_size, ": expected less");
  TORCH_CHECK(env.local_world_size <= env.world_size, "environment: ", env.local_world_size,
              " ranks on this machine contradict ", env.world_size, " ranks in all (", rank_name,
              "=", env.rank, "): expected at most as many; check LOCAL_WORLD_SIZE and WORLD_SIZE");
  TORCH_CHECK(env.local_world_size == 0 || env.local_rank < env.local_world_size,
              "environment: local rank ", env.local_rank, " contradicts ", env.local_world_size,
              " ranks on this machine (", rank_name, "=", env.rank,
              "): expected less; check LOCAL_RANK and LOCAL_WORLD_SIZE");
  // Scripts for srun often export it beside SLURM's own variables.
  const auto world_size = variables.number("WORLD_SIZE", 1);
  TORCH_CHECK(!world_size || *world_size == env.world_size,
              "environment variable WORLD_SIZE=", world_size.value_or(0),
              " contradicts the launcher's ", env.world_size, " ranks (", rank_name, "=", env.rank,
              "): unset WORLD_SIZE or start as many ranks");
}

// Each rank of a launcher that is not known would else be a job of its own, in silence. Of some of
// them the number of ranks is not to be had, but a rank above 0 is not alone.
void check_alone(const Variables& variables) {
  const auto check = [&](const char* name, int lone) {
    const int value = variables.number(name, lone).value_or(lone);
    TORCH_CHECK(value == lone, "environment variable ", name, "=", value,
                ": a launcher that is not known has started several ranks; expected torchrun, "
                "mpirun of OpenMPI, MPICH or Intel MPI, srun, or RANK, WORLD_SIZE, LOCAL_RANK, "
                "MASTER_ADDR and MASTER_PORT in the environment of each");
  };
  for (const char* name : {"PMI_SIZE", "PALS_LOCAL_SIZE", "MV2_COMM_WORLD_SIZE"}) check(name, 1);
  for (const char* name : {"PMI_RANK", "PMIX_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK"}) {
    check(name, 0);
  }
}

}  // namespace

Environment read_environment(const Getenv& getenv) {
  const Variables variables(getenv);
  Environment env;
  if (variables.has("RANK")) {
    read_torchrun(variables, env);
  } else if (variables.has(kOpenMpi.rank) || variables.has(kOpenMpi.size)) {
    env.source = Environment::Source::kOpenMpi;
    read_mpi(variables, kOpenMpi, env);
  } else if (variables.has(kHydra.rank) && variables.has(kHydra.local_rank)) {
    env.source = Environment::Source::kHydra;
    read_mpi(variables, kHydra, env);
  } else if (variables.has("SLURM_PROCID") && variables.has("SLURM_STEP_NUM_TASKS")) {
    read_slurm(variables, env);
  } else if (variables.has("WORLD_SIZE")) {
    read_torchrun(variables, env);  // Throws: RANK is missing.
  } else {
    check_alone(variables);
  }
  check_consistent(variables, env);
  env.timeout = read_timeout(variables);
  env.joins = read_join(variables, env);
  if (env.world_size > 1) read_rendezvous(variables, env);
  return env;
}

Environment read_environment() {
  return read_environment([](const char* name) -> const char* { return std::getenv(name); });
}

std::string first_host(const std::string& host_list) {
  std::string host;
  size_t i = 0;
  while (i < host_list.size() && host_list[i] != ',') {
    if (host_list[i] != '[') {
      host += host_list[i++];
      continue;
    }
    const size_t close = host_list.find(']', i);
    TORCH_CHECK(close != std::string::npos, "SLURM host list \"", host_list,
                "\": expected a ] for every [");
    const size_t end = host_list.find_first_of(",-]", i);
    host += host_list.substr(i + 1, end - i - 1);
    i = close + 1;
  }
  return host;
}

}  // namespace zero
