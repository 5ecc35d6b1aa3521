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

#include "tests/training/promised_gradients.h"
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
  using Holds = PromisedGradients::Holds;
  using Slot = PromisedGradients::Slot;
  // What users have done to the parameters of a net.
  struct Edits {
    bool in_place = false;
    bool tied = false;
    bool reshaped = false;
    std::array<bool, kUserParameters> moved{};
    std::array<bool, kUserParameters> stale{};  // unnoticed: undone by a step that uses it

    bool is_moved() const;
    bool is_stale() const;
    bool are_noticed() const { return in_place || tied || reshaped || is_moved(); }
    void refresh();
  };
  struct Net {
    std::vector<at::Tensor> masters;  // double
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    std::vector<std::unique_ptr<torch::optim::Optimizer>> foreign;  // by rank
    std::vector<PromisedGradients> gradients;                       // by rank
    std::vector<UserEvent> clips;
    int64_t gathered = 0;
    bool averages = false;  // those of now are in p.grad()
    Edits edits;
    bool broken = false;   // a pass was refused
    bool unknown = false;  // gradients may be of a part of a pass
    bool refused = false;  // the last collective call

    bool is_ambiguous() const;
    int64_t most_dropped() const;
  };
  // By net and parameter: what a pass gives gradients.
  using Hits = std::vector<std::vector<bool>>;

  bool is_zero(int net) const { return nets_[net].optimizer != nullptr; }
  bool has_own_masters() const;
  const UserModelImpl::Managed& parameter(int rank, int net, int index) const {
    return replicas_[rank][net]->managed()[index];
  }

  void choose();
  std::vector<Expectation> expect(const UserEvent& event);
  Expectation expect_collective(const UserEvent& event);
  Expectation expect_zero_grad(const UserEvent& event);
  Expectation expect_closure_step(const UserEvent& event) const;
  Expectation expect_on(const UserEvent& event, int rank) const;
  Expectation expect_pass(const UserEvent& event, int rank) const;
  Expectation expect_gradient_edit(const UserEvent& event, int rank) const;
  bool is_refused_for_gradients(int net) const;
  bool is_refused_for_parameters(int net) const;
  bool has_thawed_gradient(int net) const;
  bool has_frozen(int net) const;
  Hits hits_of(const UserEvent& event, int rank) const;

  void run_pass(const UserEvent& event, int rank);
  void edit_gradients(const UserEvent& event, int rank);
  void edit_parameters(const UserEvent& event, int rank);
  void complete(int net, bool gathers);
  void clear_gradients(int net);
  void collective(const UserEvent& event, const std::vector<UserOutcome>& outcomes);
  void step(const UserEvent& event, const std::vector<UserOutcome>& outcomes);
  void edit_all(const UserEvent& event);
  void refresh_masters(const UserEvent& event);
  void check_outcomes(const std::vector<UserOutcome>& outcomes) const;
  void follow_refusal(const UserEvent& event);
  void remedy_pass(const UserEvent& event);
  void remedy(const UserEvent& event);

  at::Tensor mean_of(int net, int index) const;
  double norm(int net, double type) const;
  double coefficient(int net) const;

  const UserProgram& program_;
  std::vector<std::vector<UserModel>> replicas_;  // by rank and net
  std::vector<Net> nets_;
  std::deque<UserEvent> queue_;
  UserTask task_;
  bool over_ = false;
  std::string log_;
};

}  // namespace zero
