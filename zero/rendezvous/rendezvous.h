// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A meeting of ranks in their store that ends in time and names the ranks that did not take part.
//
// Each rank marks in the store that it has arrived, and later that it is connected or why it gave
// up. A rank that gives up makes the others give up within a second, and reads their marks: a rank
// that has arrived and marks nothing more has ended, is stopped or cannot be reached.
#pragma once

#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "zero/base/error_text.h"
#include "zero/rendezvous/bounded_store.h"

namespace zero {

// Sets `key` to `text` if the store has no such key. Returns what the key holds then, on all ranks
// the same.
std::string claim(c10d::Store& store, const std::string& key, const std::string& text);

// Returns call(), which asks a store before any meeting. Its CommunicationError begins with `who`
// then, and says what to do.
template <typename Call>
auto asking_as(const std::string& who, Call call) {
  try {
    return call();
  } catch (const CommunicationError& error) {
    throw_communication_error(
        c10::str(who, ": ", error_line(error),
                 ". See the output of the process that serves the store, and start the job again"));
  }
}

// "rank 3", "ranks 0, 2", of more than 8 "ranks 0, 1, ... and 5 more".
std::string ranks_text(const std::vector<int>& ranks);

// Used once, by one thread.
class Rendezvous {
 public:
  // Connects the ranks, or does what else they meet for. Everything it uses must be its own: it
  // runs on a thread that may be left behind. `store` bounds all its calls.
  using Work = std::function<void(const c10::intrusive_ptr<c10d::Store>& store)>;

  // `store` is this meeting's alone. The timeout counts from `since`. `failed` begins the error and
  // `purpose` ends the line about a long wait: "rank 0 of 2 waits for rank 1 <purpose> (up to 10
  // min)". `watched` are numbers in the job: those of these ranks, and of others without which
  // these cannot meet. The wait ends with an error as soon as the launcher has seen one of them
  // end.
  Rendezvous(c10::intrusive_ptr<BoundedStore> store, int rank, int world_size,
             std::chrono::milliseconds timeout, std::chrono::steady_clock::time_point since,
             std::string failed, std::string purpose, std::vector<int> watched = {});

  // Collective. Throws CommunicationError within the timeout and a second when a rank does not take
  // part or gives up. Where `work` throws c10::ValueError on some rank, for a misuse, all that are
  // there throw another c10::Error. A rank that lacks memory throws c10::OutOfMemoryError.
  void run(const Work& work);
  // Asks the store whether all ranks have come. Throws CommunicationError within half a second.
  bool all_have_come() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Marks;

  // Returns when the work is done. Throws what it throws, and when another rank gives up.
  void await(std::future<void> done, BoundedStore& store) const;
  // Throws when one of those watched has ended.
  void check_ended(const BoundedStore& store) const;
  void print_whom(BoundedStore& store) const;
  Marks read_marks(c10d::Store& store) const;
  // Makes the others give up too, and returns the ranks that are missing as far as the store shows.
  std::string give_up(const std::string& reason, bool misuse) const;

  const c10::intrusive_ptr<BoundedStore> store_;
  const int rank_;
  const int world_size_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point since_;
  const std::string failed_;
  const std::string purpose_;
  const std::vector<int> watched_;
};

// A meeting of all ranks that can be tried again. Rank 0 begins each try; one that a rank gave up
// is over for all, so that no rank meets the marks of an earlier one.
class Tries {
 public:
  // `store` is that of all tries.
  explicit Tries(c10::intrusive_ptr<BoundedStore> store) : store_(std::move(store)) {}
  // Returns the store of the try that is under way, or the first one. Another rank than 0 waits for
  // rank 0 to begin the next where the last was given up, until `deadline`. One that `joins` throws
  // c10::Error where the launcher has seen all before it end.
  c10::intrusive_ptr<BoundedStore> enter(int rank, std::chrono::steady_clock::time_point deadline,
                                         bool joins = false);
  // Returns whether a rank has come to `store`, which is that of tries.
  static bool begun(BoundedStore& store);
  // The try that this rank entered is over. Never throws.
  void give_up() noexcept;
  // For a rank of a later round: those that wait in the try under way, or come to it yet, give up.
  void call_off();

  // The stores of a try's meetings: of all ranks, and of those that find their machines.
  static constexpr const char* kMeeting = "meeting";
  static constexpr const char* kTopology = "topology/meeting";

 private:
  const c10::intrusive_ptr<BoundedStore> store_;
  int64_t number_ = 0;
};

}  // namespace zero
