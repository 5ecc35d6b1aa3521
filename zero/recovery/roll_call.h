// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Finds out which ranks are still there after a failure, and which ones join, over the store of
// their group.
//
// Each rank that calls writes its name into the store. A thread on every rank answers for one that
// has not noticed the failure yet, for example because it computes: the others wait for it. A store
// that answers late for a while does not end that thread. A rank that is killed, stopped or out of
// reach answers nothing. The first rank that sees everyone present who answers writes down the
// list, once and for all: it counts for every rank, also for one that wakes up later and is not on
// it.
//
// A process that joins is called as well. It writes its number down and counts up a beat while it
// waits, so that the threads of the others see it: waiting() says so, and the roll is called at a
// time that suits them. One that is killed while it waits is on no list.
//
// A program may have several rolls, one for each optimizer. A process that has joined one of them
// is on its way to the others: the next call of each waits for it, up to the timeout.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "zero/rendezvous/bounded_store.h"

namespace zero {

class RollCall {
 public:
  // Starts the thread. `store` is this object's alone on each rank. Ranks are 0 to world_size - 1;
  // one that `joins` has a number from world_size on of its own, and must call join() first.
  // `job_ranks` are their numbers in the job, if they are others: those of processes that have
  // ended are not waited for.
  RollCall(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
           std::chrono::milliseconds timeout, bool joins = false, std::vector<int> job_ranks = {});
  // Unless an exception destroys the lowest rank's, the job has ended: none joins it any more.
  ~RollCall();
  RollCall(const RollCall&) = delete;
  RollCall& operator=(const RollCall&) = delete;

  struct Present {
    std::vector<int> ranks;          // in ascending order
    std::vector<std::string> texts;  // of each of them
  };
  // Collective over the ranks that are left. Ranks that were absent once are not waited for again.
  // A call that failed on this rank may be made again: it is the same call for the others. Throws
  // c10::Error on a rank that the others went on without, from then on in each call, and if the
  // store is gone. Takes the answering time of a second if ranks are missing that have not ended,
  // and the timeout and 5 s if one that answers does not arrive, or if `enough`, called with the
  // texts of those present, is false: one that is missing may only be slow.
  using Enough = std::function<bool(const std::vector<std::string>& texts)>;
  Present call(const std::string& text, const Enough& enough = {});
  // Whether one of `numbers` has ended. Waits a second for its launcher to say so. Never throws: a
  // store that is late does not know.
  bool lost_one_of(const std::vector<int>& numbers) const noexcept;

  // Waits until the others call the roll, and returns as call() does for them. Throws c10::Error
  // when the job has ended, no rank of it protects steps, another process has the same number, or
  // the others do not call within the timeout.
  Present join(const std::string& text);
  // The numbers of the processes that wait to join, in ascending order.
  std::vector<int> waiting() const;
  // Whether a process has joined another roll that this one has not called yet. Never throws: a
  // store that is late knows of none.
  bool expects_newcomers() const noexcept;

  // Calls that this rank has completed.
  int64_t calls() const;
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Answers;  // The thread's, which may outlive this object in a call of the store.

  void start();
  Present wait_to_join(const std::string& text);
  Present present_at(const std::string& prefix, const std::set<int>& numbers);
  // The list, written down by this rank or another one.
  std::string close(const std::string& prefix, const std::set<int>& expected, const Enough& enough);
  std::vector<std::string> texts_at(const std::string& prefix, const std::set<int>& numbers);
  // Of any that take part.
  std::set<int> ended(const BoundedStore& store) const;
  // The processes that have joined another roll, without those that this one has waited for.
  std::set<int> newcomers() const;

  const c10::intrusive_ptr<BoundedStore> store_;
  const int rank_;
  const std::chrono::milliseconds timeout_;
  const std::vector<int> job_ranks_;
  std::vector<int> ranks_;  // the present ones of the last call
  std::set<int> called_;    // not to be waited for: on earlier lists, given up, or older than this
  std::string left_behind_;
  const int exceptions_;  // under way at construction
  const std::shared_ptr<Answers> answers_;
  std::future<bool> lost_;  // of the thread, at its end: whether it has lost the store
};

}  // namespace zero
