// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/recovery/roll_call.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/base/slow_wait.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// A rank that is there answers within this time.
constexpr milliseconds kAnswer{1000};
// A rank that waits for a dead one fails at its timeout, and then needs a moment to get here.
constexpr milliseconds kMoment{5000};
constexpr milliseconds kLook{150};
constexpr milliseconds kPause{20};
// Between two beats, so that each look sees another one.
constexpr milliseconds kBeatPause{50};

// Keys of each call.
constexpr const char* kBell = "/bell";  // rings for a call and for those that join
constexpr const char* kOpen = "/open";
constexpr const char* kArrived = "/arrived";
constexpr const char* kAlive = "/alive";
constexpr const char* kList = "/list";
constexpr const char* kJoining = "/joining";
constexpr const char* kBeat = "/beat/";
// Keys of the job.
constexpr const char* kRanks = "ranks";
constexpr const char* kTaken = "taken/";
constexpr const char* kEnded = "ended";

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::set<int> numbers_in(const std::string& text) {
  std::set<int> result;
  std::istringstream stream(text);
  for (int number = 0; stream >> number;) result.insert(number);
  return result;
}

std::string text_key(const std::string& prefix, int rank) {
  return prefix + "/text/" + std::to_string(rank);
}

std::string text_of(const std::set<int>& numbers) {
  std::string text;
  for (const int n : numbers) text += std::to_string(n) + " ";
  return text;
}

}  // namespace

RollCall::RollCall(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                   milliseconds timeout, bool joins)
    : store_(BoundedStore::of(store, timeout)->each_within(std::min(timeout, milliseconds(5000)))),
      rank_(rank),
      timeout_(timeout),
      ranks_(static_cast<size_t>(world_size)),
      exceptions_(std::uncaught_exceptions()) {
  std::iota(ranks_.begin(), ranks_.end(), 0);
  if (joins) return;
  if (rank == 0) store_->set(kRanks, bytes_of(std::to_string(world_size)));
  start();
}

void RollCall::start() {
  thread_ = std::thread([this] { answer(); });
}

RollCall::~RollCall() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  const bool failed = std::uncaught_exceptions() > exceptions_ || !left_behind_.empty() || lost_;
  if (failed || ranks_.front() != rank_) return;
  try {
    store_->set(kEnded, bytes_of("1"));
  } catch (const std::exception&) {  // there is nothing to join, either
  }
}

int64_t RollCall::calls() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return calls_;
}

void RollCall::answer() {
  int64_t answered = 0;  // calls
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    const int64_t next = std::max(calls_, answered);
    lock.unlock();
    try {
      const std::string prefix = std::to_string(next);
      if (store_->check({prefix + kBell})) {
        if (store_->check({prefix + kOpen})) {
          store_->append(prefix + kAlive, bytes_of(std::to_string(rank_) + " "));
          answered = next + 1;
        } else {
          watch(next);
        }
      }
    } catch (const std::exception&) {
      // Nothing can be recovered over a store that is gone, as call() says. Asking it again would
      // only make c10d warn.
      lost_ = true;
      return;
    }
    lock.lock();
    changed_.wait_for(lock, kLook, [this] { return stop_; });
  }
}

void RollCall::watch(int64_t next) {
  const std::string prefix = std::to_string(next);
  std::map<int, int64_t> beats;
  for (const int number : numbers_in(list_of(prefix + kJoining))) {
    beats[number] = store_->add(prefix + kBeat + std::to_string(number), 0);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (next != calls_) return;
  std::vector<int> waiting;
  for (const auto& [number, beat] : beats) {
    const auto before = beats_.find(number);
    if (before != beats_.end() && before->second < beat) waiting.push_back(number);
  }
  beats_ = std::move(beats);
  waiting_ = std::move(waiting);
}

std::vector<int> RollCall::waiting() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return waiting_;
}

std::string RollCall::list_of(const std::string& key) const {
  return store_->check({key}) ? text_of(store_->get(key)) : std::string();
}

std::string RollCall::close(const std::string& prefix) {
  const auto start = Clock::now();
  const std::set<int> expected(ranks_.begin(), ranks_.end());
  while (true) {
    if (std::string list = list_of(prefix + kList); !list.empty()) return list;
    const std::set<int> arrived = numbers_in(list_of(prefix + kArrived));
    const std::set<int> alive = numbers_in(list_of(prefix + kAlive));
    const std::set<int> joining = numbers_in(list_of(prefix + kJoining));
    const auto waited = Clock::now() - start;
    std::set<int> present = arrived;
    bool all_who_answer = true;
    bool all_who_join = true;
    for (const int number : alive) {
      const bool joins = joining.count(number) != 0;
      if (joins) present.insert(number);
      all_who_answer = all_who_answer && (joins || arrived.count(number) != 0);
    }
    for (const int number : joining) all_who_join = all_who_join && alive.count(number) != 0;
    if ((arrived == expected && all_who_join) || (waited >= kAnswer && all_who_answer) ||
        waited >= timeout_ + kMoment) {
      // The first list stays.
      return text_of(store_->compareSet(prefix + kList, {}, bytes_of(text_of(present))));
    }
    std::this_thread::sleep_for(kPause);
  }
}

RollCall::Present RollCall::call(const std::string& text) {
  TORCH_CHECK(left_behind_.empty(), left_behind_);
  std::string prefix;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    prefix = std::to_string(calls_++);
    beats_.clear();
    waiting_.clear();
  }
  store_->set(text_key(prefix, rank_), bytes_of(text));
  store_->append(prefix + kArrived, bytes_of(std::to_string(rank_) + " "));
  store_->set(prefix + kOpen, bytes_of("1"));
  store_->set(prefix + kBell, bytes_of("1"));
  const std::set<int> present = numbers_in(close(prefix));
  if (present.count(rank_) == 0) {
    left_behind_ = c10::str(
        "the other ranks went on without rank ", rank_, " as ", present.size(),
        present.size() == 1 ? " rank" : " ranks",
        ", since it did not answer in time: it was stopped or could not be reached. What it holds "
        "is out of date; end this process");
    TORCH_CHECK(false, left_behind_);
  }
  return present_at(prefix, present);
}

RollCall::Present RollCall::present_at(const std::string& prefix, const std::set<int>& numbers) {
  Present result;
  result.ranks.assign(numbers.begin(), numbers.end());
  for (const int rank : result.ranks) {
    result.texts.push_back(text_of(store_->get(text_key(prefix, rank))));
  }
  ranks_ = result.ranks;
  return result;
}

RollCall::Present RollCall::join(const std::string& text) {
  const auto deadline = Clock::now() + timeout_;
  const std::string number = std::to_string(rank_);
  const SlowWait notice([&] {
    return c10::str("process ", rank_,
                    " waits until the job takes it in, at its next protected step (", "up to ",
                    duration_text(timeout_), ")");
  });
  const auto wait = [&](const std::string& for_what) {
    TORCH_CHECK(!store_->check({kEnded}), "process ", rank_,
                " cannot join the job: a rank of it has ended, as after its last step");
    TORCH_CHECK(Clock::now() < deadline, "process ", rank_, " cannot join the job: waited ",
                duration_text(timeout_), " for ", for_what,
                "; a larger InitOptions::timeout waits longer");
    std::this_thread::sleep_for(kBeatPause);
  };
  while (!store_->check({kRanks})) {
    wait("an optimizer with ZeroOptions::protect(), got none of that place in the program");
  }
  const int ranks = std::stoi(text_of(store_->get(kRanks)));
  TORCH_CHECK(rank_ >= ranks, "expected RANK of at least ", ranks,
              ", which no rank of the job has had, to join it, got ", rank_);
  TORCH_CHECK(store_->add(kTaken + number, 1) == 1,
              "expected a RANK that no other process has "
              "joined the job with, got ",
              rank_, "; start it with a greater one");
  for (int64_t call = 0;; ++call) {
    const std::string prefix = std::to_string(call);
    std::string list = list_of(prefix + kList);
    if (list.empty()) {
      store_->set(text_key(prefix, rank_), bytes_of(text));
      store_->append(prefix + kJoining, bytes_of(number + " "));
      store_->set(prefix + kBell, bytes_of("1"));
    }
    bool answered = false;
    for (; list.empty(); list = list_of(prefix + kList)) {
      store_->add(prefix + kBeat + number, 1);
      if (!answered && store_->check({prefix + kOpen})) {
        store_->append(prefix + kAlive, bytes_of(number + " "));
        answered = true;
      }
      wait("its ranks to call recover()");
    }
    const std::set<int> present = numbers_in(list);
    if (present.count(rank_) == 0) continue;  // the list was closed before
    calls_ = call + 1;
    start();
    return present_at(prefix, present);
  }
}

}  // namespace zero
