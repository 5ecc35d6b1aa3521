// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/rendezvous/rendezvous.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "zero/base/detached_call.h"
#include "zero/base/slow_wait.h"
#include "zero/rendezvous/ended_ranks.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// The interval at which a waiting rank checks whether another gave up.
constexpr milliseconds kAskInterval{200};
// How long a rank that gives up waits for the marks of the others.
constexpr milliseconds kMarksLimit{500};
// How long a rank that serves the store waits for the others to have read them.
constexpr milliseconds kReadersLimit{200};
// And at the end of its process, when they are late.
constexpr milliseconds kLateReadersLimit{1500};
constexpr milliseconds kPollInterval{20};
// Work has its own limit, and its error says more than ours.
constexpr milliseconds kWorkSlack{100};
constexpr milliseconds kLateStart{1000};
constexpr size_t kRanksNamed = 8;

constexpr const char* kArrived = "arrived";
constexpr const char* kConnected = "connected";
constexpr const char* kGivenUp = "given up";
// The first letter of a reason.
constexpr char kMisuse = '-';
constexpr char kNoMisuse = '?';
constexpr const char* kReasons = "reasons read";
constexpr const char* kTries = "tries";

std::string mark_key(int rank) { return "rank/" + std::to_string(rank); }

// Of the ranks in [begin, end).
std::vector<std::string> mark_keys(int begin, int end) {
  std::vector<std::string> keys;
  for (int rank = begin; rank < end; ++rank) keys.push_back(mark_key(rank));
  return keys;
}

// The ranks in [begin, end) that have a mark. Asks about all at once, and about halves only where
// some are missing.
void find_marked(c10d::Store& store, int begin, int end, std::vector<int>& marked) {
  if (store.check(mark_keys(begin, end))) {
    for (int rank = begin; rank < end; ++rank) marked.push_back(rank);
  } else if (end - begin > 1) {
    const int middle = begin + (end - begin) / 2;
    find_marked(store, begin, middle, marked);
    find_marked(store, middle, end, marked);
  }
}

// The reasons of the last meeting that failed in the store of this process. Never destroyed.
struct Host {
  std::mutex mutex;
  c10::intrusive_ptr<BoundedStore> store;
  int64_t readers = 0;
};

Host& host() {
  static Host& only = *new Host;
  return only;
}

// The store ends with this process: at its end it waits for ranks that have yet to read.
void serve_readers() {
  const std::lock_guard<std::mutex> lock(host().mutex);
  const auto deadline = Clock::now() + kLateReadersLimit;
  try {
    while (host().store->add(kReasons, 0) < host().readers && Clock::now() < deadline) {
      std::this_thread::sleep_for(kPollInterval);
    }
  } catch (const std::exception&) {  // There is nothing to read.
  }
}

void serve_at_exit(c10::intrusive_ptr<BoundedStore> store, int64_t readers) {
  const std::lock_guard<std::mutex> lock(host().mutex);
  host().store = std::move(store);
  host().readers = readers;
  static const int registered = std::atexit(serve_readers);
  (void)registered;
}

}  // namespace

// The marks of the other ranks.
struct Rendezvous::Marks {
  std::vector<int> missing;  // Never arrived.
  std::vector<int> silent;   // Arrived, neither connected nor given up.
  int given_up = 0;

  std::string text() const {
    std::string text;
    if (!missing.empty()) text += "; missing: " + ranks_text(missing);
    if (!silent.empty()) {
      text += "; " + ranks_text(silent) + (silent.size() == 1 ? " has" : " have") +
              " arrived and did not connect: ended, stopped or out of reach";
    }
    return text.empty() ? "; all ranks have arrived" : text;
  }
};

std::string ranks_text(const std::vector<int>& ranks) {
  const c10::ArrayRef<int> named(ranks.data(), std::min(ranks.size(), kRanksNamed));
  std::string text = (ranks.size() == 1 ? "rank " : "ranks ") + c10::Join(", ", named);
  if (named.size() < ranks.size()) text += c10::str(" and ", ranks.size() - named.size(), " more");
  return text;
}

std::string claim(c10d::Store& store, const std::string& key, const std::string& text) {
  return store.compareSet(key, std::string(), text);
}

c10::intrusive_ptr<BoundedStore> Tries::enter(int rank, Clock::time_point deadline, bool joins) {
  const auto given_up = [&] { return store_->check({std::to_string(number_) + "/" + kGivenUp}); };
  while (true) {
    number_ = std::max<int64_t>(store_->add(kTries, rank == 0 ? 1 : 0), 1);
    if (!given_up() || (rank != 0 && Clock::now() >= deadline)) break;
    TORCH_CHECK(!joins || !all_below_have_ended(*store_, rank), "init_process_group: rank ", rank,
                " cannot join the job: all its ranks have ended");
    std::this_thread::sleep_for(rank == 0 ? milliseconds(0) : kPollInterval);
  }
  return store_->under(std::to_string(number_));
}

bool Tries::begun(BoundedStore& store) { return store.check({kTries}); }

void Tries::give_up() noexcept {
  try {
    if (number_ > 0)
      store_->within(kMarksLimit)->set(std::to_string(number_) + "/" + kGivenUp, kGivenUp);
  } catch (const std::exception&) {  // The store is gone: another try has another one.
  }
}

void Tries::call_off() {
  const int64_t next = std::max<int64_t>(store_->add(kTries, 0), 1) + 1;
  for (const int64_t number : {next - 1, next}) {
    for (const char* meeting : {kMeeting, kTopology}) {
      store_->set(std::to_string(number) + "/" + meeting + "/" + kGivenUp,
                  c10::str(kNoMisuse, "Rank 0 has been started again"));
    }
  }
  while (store_->add(kTries, 1) < next) {
  }
}

Rendezvous::Rendezvous(c10::intrusive_ptr<BoundedStore> store, int rank, int world_size,
                       milliseconds timeout, Clock::time_point since, std::string failed,
                       std::string purpose, std::vector<int> watched)
    : store_(std::move(store)),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout),
      since_(since),
      failed_(std::move(failed)),
      purpose_(std::move(purpose)),
      watched_(std::move(watched)) {}

void Rendezvous::run(const Work& work) {
  const auto left = std::chrono::ceil<milliseconds>(since_ + timeout_ - Clock::now());
  const auto store = store_->within(std::max(left, kWorkSlack));
  std::string reason;
  bool misuse = false;  // by some rank: it would come again
  bool own = false;     // this rank's alone
  try {
    store->set(mark_key(rank_), std::string(kArrived));
    await(start_detached([work, store] { work(store); }), *store);
    try {
      store_->within(kMarksLimit)->set(mark_key(rank_), std::string(kConnected));
    } catch (const std::exception&) {  // Only the errors of others would have become better.
    }
    return;
  } catch (const std::exception& error) {
    reason = error_line(error);
    misuse = dynamic_cast<const c10::ValueError*>(&error) != nullptr;
    own = is_out_of_memory(error);
  }
  const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - since_);
  const std::string others = give_up(reason, misuse);
  // A rank that began later learns earlier that the time of another is up.
  const std::string time =
      took + kLateStart >= timeout_
          ? c10::str(" within ", timeout_.count(), " ms")
          : c10::str(" (after ", took.count(), " ms of at most ", timeout_.count(), " ms)");
  const std::string text =
      c10::str(failed_, time, " (this is rank ", rank_, ")", others, ". ", reason);
  TORCH_CHECK_WITH(OutOfMemoryError, !own, text);
  throw_error(!misuse, text);
}

bool Rendezvous::all_have_come() const {
  return store_->within(kMarksLimit)->check(mark_keys(0, world_size_));
}

void Rendezvous::await(std::future<void> done, BoundedStore& store) const {
  const auto start = Clock::now();
  const auto deadline = std::max(since_ + timeout_, start) + kWorkSlack;
  bool printed = false;
  while (done.wait_until(std::min(Clock::now() + kAskInterval, deadline)) !=
         std::future_status::ready) {
    TORCH_CHECK(Clock::now() < deadline, "The time is up");
    if (!printed && Clock::now() - start >= slow_wait_after()) {
      printed = true;
      print_whom(store);
    }
    check_ended(store);
    if (store.check({kGivenUp}) && done.wait_for(milliseconds(0)) != std::future_status::ready) {
      const std::string mark = store.get_to_str(kGivenUp);
      const std::string text = mark.substr(1);
      TORCH_CHECK_VALUE(mark[0] != kMisuse, text);
      TORCH_CHECK(false, text);
    }
  }
  done.get();
}

void Rendezvous::check_ended(const BoundedStore& store) const {
  if (watched_.empty()) return;
  const std::set<int> ended = ended_ranks(store);
  for (const int rank : watched_) {
    TORCH_CHECK(!ended.contains(rank), "The process with RANK ", rank,
                " has ended, says the launcher");
  }
}

void Rendezvous::print_whom(BoundedStore& store) const {
  const Marks marks = read_marks(store);
  // A rank that has arrived may itself wait for those that have not.
  const std::vector<int>& whom = marks.missing.empty() ? marks.silent : marks.missing;
  if (whom.empty()) return;
  print_slow_wait(c10::str("rank ", rank_, " of ", world_size_, " waits for ", ranks_text(whom),
                           " ", purpose_, " (up to ", duration_text(timeout_), ")"));
}

Rendezvous::Marks Rendezvous::read_marks(c10d::Store& store) const {
  std::vector<int> marked;
  find_marked(store, 0, world_size_, marked);
  std::vector<std::string> keys;
  for (const int rank : marked) keys.push_back(mark_key(rank));
  const auto values = store.multiGet(keys);
  Marks marks;
  int next = 0;  // The first rank that is not looked at yet.
  for (size_t i = 0; i <= marked.size(); ++i) {
    const int rank = i < marked.size() ? marked[i] : world_size_;
    for (; next < rank; ++next) marks.missing.push_back(next);
    next = rank + 1;
    if (i == marked.size() || rank == rank_) continue;
    const std::string mark(values[i].begin(), values[i].end());
    if (mark == kArrived) marks.silent.push_back(rank);
    if (mark == kGivenUp) ++marks.given_up;
  }
  return marks;
}

std::string Rendezvous::give_up(const std::string& reason, bool misuse) const {
  const auto start = Clock::now();
  const auto store = store_->within(kMarksLimit + kReadersLimit);
  std::optional<Marks> marks;
  try {
    store->set(mark_key(rank_), std::string(kGivenUp));
    // The first reason stays, since later ones follow from it.
    const std::string text =
        c10::str(misuse ? kMisuse : kNoMisuse, "Rank ", rank_, " gave up: ", reason);
    if (!store->check({kGivenUp})) store->set(kGivenUp, text);
    marks = read_marks(*store);
    // A rank that looks finds the reason within kAskInterval, and marks that it gives up too.
    while (!marks->silent.empty() && Clock::now() < start + kMarksLimit) {
      std::this_thread::sleep_for(kPollInterval);
      marks = read_marks(*store);
    }
    store->add(kReasons, 1);
    while (store_->served_here() && store->add(kReasons, 0) <= marks->given_up &&
           Clock::now() < start + kMarksLimit + kReadersLimit) {
      std::this_thread::sleep_for(kPollInterval);
    }
    const auto arrived = static_cast<int64_t>(world_size_) - std::ssize(marks->missing);
    if (store_->served_here() && store->add(kReasons, 0) < arrived) {
      serve_at_exit(store_->each_within(kLateReadersLimit), arrived);
    }
  } catch (const std::exception& error) {
    // The rank that serves the store may have given up earlier, and ends with it. What was read
    // before that still names who is silent.
    if (!marks) return "; " + error_line(error);
  }
  return marks->text();
}

}  // namespace zero
