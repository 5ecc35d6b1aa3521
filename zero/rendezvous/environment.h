// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reads from environment variables how the launcher of this process describes the job. Uses no
// network, no files and no c10d.
//
// Launchers, in this order; the first one that names a rank counts:
//   torchrun, zero/launch.h   RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
//                             MASTER_ADDR MASTER_PORT TORCHELASTIC_*
//   mpirun of OpenMPI         OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}
//   Hydra, which is mpirun    PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
//     of MPICH and Intel MPI
//   srun                      SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID
//                             SLURM_STEP_NUM_NODES SLURM_STEP_NODELIST
//   none                      one process alone
//
// An mpirun within a job of SLURM may start one helper a machine by srun, whose variables its ranks
// inherit, so srun comes last.
// A batch script of SLURM that does not use srun is one process alone, although
// SLURM_PROCID and SLURM_NTASKS are set in it: its tasks do not exist.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

namespace zero {

// Of a job: longer ones would overflow somewhere.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(365 * 24);

struct Environment {
  enum class Source { kAlone, kTorchrun, kOpenMpi, kHydra, kSlurm };

  Source source = Source::kAlone;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        // Among the ranks of this machine; counts its GPUs.
  int local_world_size = 1;  // 0 if the launcher does not say.

  // The address of the job's key-value store: MASTER_ADDR and MASTER_PORT if set. Otherwise:
  //   address  loopback when all ranks are on this machine; with srun the first host of the
  //            step, which is where rank 0 runs, or SLURM_LAUNCH_NODE_IPADDR without a host list
  //   port     10000..29999, derived from the number of the SLURM step or the OpenMPI job; Hydra
  //            names no job, so that all its jobs have the same
  // Unused (empty and 0) with one rank.
  std::string master_addr;
  int master_port = 0;

  // Tells this job from others, with the same text on all ranks: TORCHELASTIC_RUN_ID if set, else
  // the number of the SLURM step or the name of the OpenMPI job; empty if nothing says.
  std::string job;
  // True when the launcher serves the store itself (torchrun's agent): then no rank may.
  bool agent_serves_store = false;

  // ZERO_JOIN=1: the job runs already, and this process joins it. Its rank is a number that no rank
  // of the job has had, and WORLD_SIZE is more.
  bool joins = false;

  // ZERO_TIMEOUT: a whole number above 0 of ms, s, min or h, of seconds without a unit.
  std::optional<std::chrono::milliseconds> timeout;
};

// Like getenv: null when the variable is not set.
using Getenv = std::function<const char*(const char* name)>;

// Throws c10::Error naming the variables, what they hold and what is expected, when one is
// missing, is not a number or a duration, or contradicts another.
Environment read_environment(const Getenv& getenv);

// The environment of this process.
Environment read_environment();

// The first host of a SLURM host list: "gpu[03-05,9],login1" -> "gpu03".
std::string first_host(const std::string& host_list);

}  // namespace zero
