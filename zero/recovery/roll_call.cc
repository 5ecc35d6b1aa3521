// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/recovery/roll_call.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <thread>
#include <utility>

#include "zero/base/detached_call.h"
#include "zero/base/slow_wait.h"
#include "zero/rendezvous/ended_ranks.h"
#include "zero/rendezvous/rendezvous.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// A rank that is there answers within this time.
constexpr milliseconds kAnswerTime{1000};
// A rank that waits for a dead one fails at its timeout, and needs this time more to call.
constexpr milliseconds kArrivalSlack{5000};
// The thread of a rank asks for a call at this interval. It waits for the store for kStoreLimit,
// and then asks again.
constexpr milliseconds kAskInterval{150};
constexpr milliseconds kStoreLimit{5000};
// A rank that calls looks at the answers at this interval.
constexpr milliseconds kPollInterval{20};
// A process that joins beats at this interval, so that two looks see different numbers.
constexpr milliseconds kBeatInterval{50};
// The limits of the destructor for the thread and for the store.
constexpr milliseconds kEndOfThreadLimit{500};
constexpr milliseconds kEndOfJobLimit{1000};

// Keys of each call, behind its number.
constexpr const char* kBell = "/bell";        // set for a call and for processes that join it
constexpr const char* kOpen = "/open";        // set once a rank has called
constexpr const char* kArrived = "/arrived";  // the ranks that have called
constexpr const char* kAlive = "/alive";      // the numbers whose thread, or wait, has answered
constexpr const char* kList = "/list";        // the numbers present, written once
constexpr const char* kJoining = "/joining";  // the numbers of processes that join
constexpr const char* kBeat = "/beat/";       // and a number: a counter that grows while it waits
// Keys of the job.
constexpr const char* kRanks = "ranks";   // the number of ranks at its beginning
constexpr const char* kTaken = "taken/";  // and a number: how many processes join with it
constexpr const char* kEnded = "ended";   // set at the end of the lowest rank
// Of the store without a prefix: the numbers of processes that have joined some roll.
constexpr const char* kJoined = "zero/recovery/joined";

std::set<int> numbers_in(const std::string& text) {
  std::set<int> result;
  std::istringstream stream(text);
  for (int number = 0; stream >> number;) result.insert(number);
  return result;
}

// Adds a number to the list that the key holds.
void add_number(BoundedStore& store, const std::string& key, int number) {
  const std::string text = std::to_string(number) + " ";
  store.append(key, {text.begin(), text.end()});
}

// Returns what the key holds; empty if there is none.
std::string held_by(BoundedStore& store, const std::string& key) {
  return store.check({key}) ? store.get_to_str(key) : std::string();
}

std::string text_key(const std::string& prefix, int rank) {
  return prefix + "/text/" + std::to_string(rank);
}

std::string list_of(const std::set<int>& numbers) {
  std::string text;
  for (const int n : numbers) text += std::to_string(n) + " ";
  return text;
}

// What the store shows of a call at one look.
struct Seen {
  std::set<int> arrived;  // ranks that have called
  std::set<int> alive;    // numbers that have answered
  std::set<int> joining;
  std::set<int> gone;  // their launcher has seen them end

  bool called_or_gone(int n) const { return arrived.contains(n) || gone.contains(n); }
  bool responded(int n) const { return alive.contains(n) || called_or_gone(n); }

  std::set<int> present() const {
    std::set<int> result = arrived;
    for (const int n : joining) {
      if (alive.contains(n)) result.insert(n);
    }
    std::erase_if(result, [&](int n) { return gone.contains(n); });
    return result;
  }
  // Whether every rank has called or ended, and every process that joins has answered or ended.
  bool nobody_is_open(const std::vector<int>& ranks) const {
    return std::ranges::all_of(ranks, [&](int n) { return called_or_gone(n); }) &&
           std::ranges::all_of(joining,
                               [&](int n) { return alive.contains(n) || gone.contains(n); });
  }
  // Who is neither a rank nor joins may be one that was left behind earlier and has woken up.
  bool all_who_answer_are_present(const std::vector<int>& ranks) const {
    return std::ranges::all_of(alive, [&](int n) {
      return joining.contains(n) || called_or_gone(n) || !std::ranges::binary_search(ranks, n);
    });
  }
};

}  // namespace

struct RollCall::Answers {
  Answers(c10::intrusive_ptr<BoundedStore> store_in, int rank_in)
      : store(std::move(store_in)), rank(rank_in) {}

  // The body of the thread. Returns whether the store is lost.
  bool give();
  // Answers the call, or sees who waits to join it. Returns whether it has answered.
  bool look(int64_t call);
  void watch(int64_t call);

  const c10::intrusive_ptr<BoundedStore> store;
  const int rank;

  std::mutex mutex;
  std::condition_variable changed;
  int64_t calls = 0;
  std::map<int, int64_t> beats;  // of those that join the next call, as last seen
  std::vector<int> waiting;
  bool stop = false;
};

RollCall::RollCall(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                   milliseconds timeout, bool joins, std::vector<int> job_ranks)
    : store_(BoundedStore::of(store, timeout)->each_within(timeout)),
      rank_(rank),
      timeout_(timeout),
      job_ranks_(std::move(job_ranks)),
      ranks_(static_cast<size_t>(world_size)),
      exceptions_(std::uncaught_exceptions()),
      answers_(
          std::make_shared<Answers>(store_->each_within(std::min(timeout, kStoreLimit)), rank)) {
  std::iota(ranks_.begin(), ranks_.end(), 0);
  if (joins) return;
  called_ = newcomers();  // of before this roll
  if (rank == 0) store_->set(kRanks, std::to_string(world_size));
  start();
}

void RollCall::start() {
  lost_ = start_detached([answers = answers_] { return answers->give(); }, "roll call");
}

RollCall::~RollCall() {
  if (!lost_.valid()) return;
  {
    const std::lock_guard<std::mutex> lock(answers_->mutex);
    answers_->stop = true;
    answers_->changed.notify_all();
  }
  // A thread that is left in a call of a silent store owns what it uses.
  const bool ended = lost_.wait_for(kEndOfThreadLimit) == std::future_status::ready;
  const bool failed =
      std::uncaught_exceptions() > exceptions_ || !left_behind_.empty() || !ended || lost_.get();
  if (failed || ranks_.front() != rank_) return;
  try {
    store_->within(kEndOfJobLimit)->set(kEnded, "1");
  } catch (const std::exception&) {  // there is nothing to join, either
  }
}

int64_t RollCall::calls() const {
  const std::lock_guard<std::mutex> lock(answers_->mutex);
  return answers_->calls;
}

// Asks for the next call until the end. The rank itself may be behind: it answers calls while it
// computes.
bool RollCall::Answers::give() {
  int64_t answered = 0;  // how many calls
  bool lost = false;
  std::unique_lock<std::mutex> lock(mutex);
  while (!stop && !lost) {
    const int64_t next = std::max(calls, answered);
    lock.unlock();
    try {
      if (look(next)) answered = next + 1;
    } catch (const std::exception&) {
      // A late answer is no reason to leave this rank without a voice. Nothing can be recovered
      // over a store that is gone, as call() says: asking it again would only make c10d warn.
      lost = store->is_gone();
    }
    lock.lock();
    if (!lost) changed.wait_for(lock, kAskInterval, [this] { return stop; });
  }
  return lost;
}

bool RollCall::Answers::look(int64_t call) {
  const std::string prefix = std::to_string(call);
  // One question is enough while nothing happens.
  if (!store->check({prefix + kBell})) return false;
  if (!store->check({prefix + kOpen})) {
    watch(call);
    return false;
  }
  add_number(*store, prefix + kAlive, rank);
  return true;
}

// A process waits if its beat has grown since the last look: one that was killed is still in the
// list.
void RollCall::Answers::watch(int64_t call) {
  const std::string prefix = std::to_string(call);
  std::map<int, int64_t> now;
  for (const int number : numbers_in(held_by(*store, prefix + kJoining))) {
    now[number] = store->add(prefix + kBeat + std::to_string(number), 0);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (call != calls) return;
  waiting.clear();
  for (const auto& [number, beat] : now) {
    const auto before = beats.find(number);
    if (before != beats.end() && before->second < beat) waiting.push_back(number);
  }
  beats = std::move(now);
}

std::vector<int> RollCall::waiting() const {
  const std::lock_guard<std::mutex> lock(answers_->mutex);
  return answers_->waiting;
}

std::set<int> RollCall::ended(const BoundedStore& store) const {
  std::set<int> ranks = ended_ranks(store);
  if (job_ranks_.empty()) return ranks;
  std::set<int> numbers;
  for (size_t n = 0; n < job_ranks_.size(); ++n) {
    if (ranks.contains(job_ranks_[n])) numbers.insert(static_cast<int>(n));
  }
  // Those that join are called by their number in the job.
  numbers.insert(ranks.lower_bound(static_cast<int>(job_ranks_.size())), ranks.end());
  return numbers;
}

bool RollCall::lost_one_of(const std::vector<int>& numbers) const noexcept {
  const auto deadline = Clock::now() + kAnswerTime;
  try {
    const auto store = store_->within(kAnswerTime);
    do {
      const std::set<int> gone = ended(*store);
      for (const int number : numbers) {
        if (gone.contains(number)) return true;
      }
      std::this_thread::sleep_for(kPollInterval);
    } while (Clock::now() < deadline);
  } catch (const std::exception&) {  // What led to this question says more than a late store.
  }
  return false;
}

std::set<int> RollCall::newcomers() const {
  std::set<int> numbers = numbers_in(held_by(*store_->without_prefix(), kJoined));
  std::erase_if(numbers, [this](int number) { return called_.contains(number); });
  return numbers;
}

bool RollCall::expects_newcomers() const noexcept {
  try {
    return !newcomers().empty();
  } catch (const std::exception&) {
    return false;
  }
}

// Every rank that has called runs this loop, and the first that finds the list complete writes it:
//   1. A list that another rank has written counts.
//   2. Read who has called (arrived), who has answered (alive), who joins (joining), and which
//      processes their launcher has seen end (gone).
//   3. Present are the ranks that have called and the processes that join and have answered,
//      without those that have ended. A process that joins answers itself, when it sees the call.
//   4. The list is complete
//        a. when every rank has called or ended, and every process that joins has answered or
//           ended, also one that has joined another roll and is expected;
//        b. after kAnswerTime, when all of these that have answered are present, each that is
//           expected among them, and `enough` says that these can go on without the silent ones;
//        c. after the timeout and kArrivalSlack in any case.
//   5. Write the list by compare and set: one that another rank wrote meanwhile counts.
std::string RollCall::close(const std::string& prefix, const std::set<int>& expected,
                            const Enough& enough) {
  const auto start = Clock::now();
  auto looked = start;
  Clock::duration waited{};  // for answers that these looks can see
  std::set<int> refused;  // present, and not enough: `enough` reads a text of each from the store
  while (true) {
    // A pause of this rank or of the store, which the others may have with it, counts as one look.
    const auto now = Clock::now();
    waited += std::min<Clock::duration>(now - looked, kAskInterval);
    looked = now;
    // 1
    if (std::string list = held_by(*store_, prefix + kList); !list.empty()) return list;
    // 2
    const auto numbers_at = [&](const char* key) {
      return numbers_in(held_by(*store_, prefix + key));
    };
    Seen seen;
    seen.arrived = numbers_at(kArrived);
    seen.alive = numbers_at(kAlive);
    seen.joining = numbers_at(kJoining);
    seen.gone = ended(*store_);
    // 3
    const std::set<int> present = seen.present();
    // 4
    const bool expected_responded =
        std::ranges::all_of(expected, [&](int number) { return seen.responded(number); });
    bool closes = (seen.nobody_is_open(ranks_) && expected_responded) ||
                  now - start >= timeout_ + kArrivalSlack;
    if (!closes && waited >= kAnswerTime && seen.all_who_answer_are_present(ranks_) &&
        expected_responded && present != refused) {
      closes = !enough || enough(texts_at(prefix, present));
      if (!closes) refused = present;
    }
    // 5
    if (closes) return claim(*store_, prefix + kList, list_of(present));
    std::this_thread::sleep_for(kPollInterval);
  }
}

RollCall::Present RollCall::call(const std::string& text, const Enough& enough) {
  TORCH_CHECK(left_behind_.empty(), left_behind_);
  // Counted when it is complete: one that fails here, as where the store is late, may be complete
  // for the others. Then the next try finds their list and must not be a call of its own.
  const int64_t number = calls();
  const std::string prefix = std::to_string(number);
  // The text before the name, since others read it as soon as the name is on the list.
  store_->set(text_key(prefix, rank_), text);
  add_number(*store_, prefix + kArrived, rank_);
  store_->set(prefix + kOpen, "1");
  store_->set(prefix + kBell, "1");
  const std::set<int> expected = newcomers();
  const std::set<int> present = numbers_in(close(prefix, expected, enough));
  called_.insert(expected.begin(), expected.end());
  if (present.count(rank_) == 0) {
    left_behind_ = c10::str(
        "the other ranks went on without rank ", rank_, " as ", present.size(),
        present.size() == 1 ? " rank" : " ranks",
        ", since it did not answer in time: it was stopped or could not be reached. What it holds "
        "is out of date; end this process");
    TORCH_CHECK(false, left_behind_);
  }
  Present result = present_at(prefix, present);
  const std::lock_guard<std::mutex> lock(answers_->mutex);
  answers_->calls = number + 1;
  answers_->beats.clear();
  answers_->waiting.clear();
  return result;
}

RollCall::Present RollCall::present_at(const std::string& prefix, const std::set<int>& numbers) {
  Present result;
  result.ranks.assign(numbers.begin(), numbers.end());
  result.texts = texts_at(prefix, numbers);
  ranks_ = result.ranks;
  called_.insert(numbers.begin(), numbers.end());
  return result;
}

std::vector<std::string> RollCall::texts_at(const std::string& prefix,
                                            const std::set<int>& numbers) {
  std::vector<std::string> texts;
  for (const int n : numbers) texts.push_back(store_->get_to_str(text_key(prefix, n)));
  return texts;
}

RollCall::Present RollCall::join(const std::string& text) {
  return asking_as(c10::str("process ", rank_, " cannot join the job"),
                   [&] { return wait_to_join(text); });
}

RollCall::Present RollCall::wait_to_join(const std::string& text) {
  const auto deadline = Clock::now() + timeout_;
  const std::string number = std::to_string(rank_);
  const SlowWait notice([&] {
    return c10::str("process ", rank_,
                    " waits until the job takes it in, at its next protected step (", "up to ",
                    duration_text(timeout_), ")");
  });
  std::set<int> members;  // of the job, as far as it is known
  const auto wait = [&](const std::string& for_what) {
    const bool all_ended = members.empty() ? all_below_have_ended(*store_, rank_)
                                           : std::ranges::includes(ended_ranks(*store_), members);
    TORCH_CHECK(!all_ended, "process ", rank_, " cannot join the job: all its ranks have ended");
    TORCH_CHECK(!store_->check({kEnded}), "process ", rank_,
                " cannot join the job: a rank of it has ended, as after its last step");
    TORCH_CHECK(Clock::now() < deadline, "process ", rank_, " cannot join the job: waited ",
                duration_text(timeout_), " for ", for_what,
                "; a larger InitOptions::timeout waits longer");
    std::this_thread::sleep_for(kBeatInterval);
  };
  // 1. Learn how many ranks the job began with: their numbers are taken.
  while (!store_->check({kRanks})) {
    wait("an optimizer with ZeroOptions::protect(), got none of that place in the program");
  }
  const int ranks = std::stoi(store_->get_to_str(kRanks));
  for (int rank = 0; rank < ranks; ++rank) members.insert(rank);
  TORCH_CHECK(rank_ >= ranks, "expected RANK of at least ", ranks,
              ", which no rank of the job has had, to join it, got ", rank_);
  // 2. Take a number that no other process has.
  TORCH_CHECK(store_->add(kTaken + number, 1) == 1,
              "expected a RANK that no other process has "
              "joined the job with, got ",
              rank_, "; start it with a greater one");
  // 3. Find the first call whose list is not closed yet, and be on it.
  for (int64_t call = 0;; ++call) {
    const std::string prefix = std::to_string(call);
    std::string list = held_by(*store_, prefix + kList);
    if (list.empty()) {
      // The bell last: the threads of the ranks look for the name when it is set.
      store_->set(text_key(prefix, rank_), text);
      add_number(*store_, prefix + kJoining, rank_);
      store_->set(prefix + kBell, "1");
    }
    // 4. Beat until the list is closed, and answer once the call is open: who calls waits for that.
    bool answered = false;
    for (; list.empty(); list = held_by(*store_, prefix + kList)) {
      store_->add(prefix + kBeat + number, 1);
      if (!answered && store_->check({prefix + kOpen})) {
        add_number(*store_, prefix + kAlive, rank_);
        answered = true;
      }
      wait("its ranks to call recover()");
    }
    const std::set<int> present = numbers_in(list);
    if (present.count(rank_) == 0) {  // It was closed before this process answered: the next one.
      members = present;
      continue;
    }
    // 5. From here on this process is a rank like the others. Its thread is yet to start.
    answers_->calls = call + 1;
    start();
    // Before the others can call the roll of another optimizer, which takes a message of this rank.
    add_number(*store_->without_prefix(), kJoined, rank_);
    return present_at(prefix, present);
  }
}

}  // namespace zero
