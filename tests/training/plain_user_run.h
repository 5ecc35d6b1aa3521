// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A UserProgram in plain torch: a replica of the models for each rank, in one thread, whose
// gradients are averaged where the ranks of a ZeroOptimizer step. It also knows what the
// documents promise: which call must work, and which must be refused on all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tests/training/user_sequence.h"

namespace zero {

enum class Expectation {
  kNotCalled,
  kWorks,
  kRefused,
  kEither,  // right or refused
};

// What a rank does next.
struct UserTask {
  UserEvent event;
  std::vector<Expectation> by_rank;
};

struct UserOutcome {
  std::string error;  // empty: it worked
  at::Tensor value;   // what the call returned
};

class PlainUserRun {
 public:
  explicit PlainUserRun(const UserProgram& program);

  // The task of all ranks, or null at the end.
  const UserTask* task() const { return over_ ? nullptr : &task_; }
  // Follows what the ranks did with the task, and chooses the next. Throws c10::Error where that
  // was not as promised.
  void follow(const std::vector<UserOutcome>& outcomes);
  // Throws c10::Error unless the models of a rank are as the calls so far make them.
  void compare(int rank, const std::vector<UserModel>& models) const;
  // The tasks so far, a line each.
  const std::string& log() const { return log_; }

 private:
  // What p.grad() of a ZeroOptimizer's parameter is promised to hold.
  enum class Holds { kNothing, kGradient, kMarker, kAverage };
  struct Slot {
    Holds holds = Holds::kNothing;  // a gradient by hand is kNothing too
    bool present = true;            // of what it holds: p.grad() was not reset
    bool altered = false;           // replaced or changed since
    bool sent = false;
    bool kept_apart = false;  // with no_sync_fp32, a part was not sent
    bool packed = false;      // in the open round
  };
  struct OfRank {
    std::array<Slot, kUserParameters> slots;
    int64_t rounds = 0;
    int64_t dropped = 0;
    bool used = false;
    // Which round a gradient is in depends on the order in which a graph gave them.
    bool ambiguous = false;
  };
  struct Net {
    std::vector<at::Tensor> masters;  // double
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    std::vector<std::unique_ptr<torch::optim::Optimizer>> foreign;  // by rank
    std::vector<OfRank> ranks;
    std::vector<UserEvent> clips;
    int64_t gathered = 0;
    bool averages = false;  // those of now are in p.grad()
    bool edited = false;    // noticed
    bool tied = false;
    bool reshaped = false;
    std::array<bool, kUserParameters> moved{};
    std::array<bool, kUserParameters> stale{};  // edited unnoticed: undone by a step that uses it
    bool broken = false;                        // a pass was refused
    bool unknown = false;                       // gradients may be of a part of a pass
    bool refused = false;                       // the last collective call

    bool is_moved() const;
  };

  bool is_zero(int net) const { return nets_[net].optimizer != nullptr; }
  bool has_own_masters() const;
  const UserModelImpl::Managed& parameter(int rank, int net, int index) const {
    return replicas_[rank][net]->managed()[index];
  }
  bool does(const UserEvent& event, int rank) const { return (event.ranks >> rank & 1) != 0; }

  void choose();
  bool plan(const UserEvent& event);
  bool plan_collective(const UserEvent& event);
  Expectation expect_pass(const UserEvent& event, int rank) const;
  Expectation expect_gradient_edit(const UserEvent& event, int rank) const;
  bool is_refused_for_gradients(int net) const;
  bool is_refused_for_parameters(int net) const;
  bool has_thawed_gradient(int net) const;
  bool has_frozen(int net) const;

  // By rank, net and parameter: what a pass gives gradients.
  std::vector<std::vector<bool>> touched(const UserEvent& event, int rank) const;
  bool is_partial(int net, int rank) const;
  bool is_dropped(int net, int rank) const;
  bool has(int net, int rank, int index) const;
  bool is_open(int net, int rank) const;
  bool is_ambiguous(int net) const;
  bool needs(int net, int rank) const;
  int64_t rounds_dropped(int net, int rank) const;

  void drop(int net, int rank);
  void close_round(int net, int rank);
  void run_pass(const UserEvent& event, int rank);
  void user_edit(const UserEvent& event, int rank);
  void reset_grad(int net, int rank, int index);
  void complete(int net, bool gathers);
  void forget(int net);
  void collective(const UserEvent& event, const std::vector<UserOutcome>& outcomes);
  void step(const UserEvent& event, const std::vector<UserOutcome>& outcomes);
  void edit_all(const UserEvent& event);
  void refresh_masters(const UserEvent& event);
  void remedy(const UserEvent& event);

  at::Tensor mean_of(int net, int index) const;
  double norm(int net, double type) const;
  double coefficient(int net) const;

  const UserProgram& p_;
  std::vector<std::vector<UserModel>> replicas_;  // by rank and net
  std::vector<Net> nets_;
  std::deque<UserEvent> queue_;
  UserTask task_;
  bool over_ = false;
  std::string log_;
};

}  // namespace zero
