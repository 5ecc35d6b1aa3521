// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/recovery/roll_call.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include "zero/base/error_text.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// A rank that is there answers within this time.
constexpr milliseconds kAnswer{1000};
// A rank that waits for a dead one fails at its timeout, and then needs a moment to get here.
constexpr milliseconds kMoment{5000};
constexpr milliseconds kLook{150};
constexpr milliseconds kPause{20};

constexpr const char* kOpen = "/open";
constexpr const char* kArrived = "/arrived";
constexpr const char* kAlive = "/alive";
constexpr const char* kList = "/list";

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::set<int> numbers_in(const std::string& text) {
  std::set<int> result;
  std::istringstream stream(text);
  for (int number = 0; stream >> number;) result.insert(number);
  return result;
}

std::string text_of(const std::set<int>& numbers) {
  std::string text;
  for (const int n : numbers) text += std::to_string(n) + " ";
  return text;
}

}  // namespace

RollCall::RollCall(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                   milliseconds timeout)
    : store_(BoundedStore::of(store, timeout)->each_within(std::min(timeout, milliseconds(5000)))),
      rank_(rank),
      timeout_(timeout),
      ranks_(static_cast<size_t>(world_size)) {
  std::iota(ranks_.begin(), ranks_.end(), 0);
  thread_ = std::thread([this] { answer(); });
}

RollCall::~RollCall() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
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
      if (store_->check({prefix + kOpen})) {
        store_->append(prefix + kAlive, bytes_of(std::to_string(rank_) + " "));
        answered = next + 1;
      }
    } catch (const std::exception&) {
      // Nothing can be recovered over a store that is gone, as call() says. Asking it again would
      // only make c10d warn.
      return;
    }
    lock.lock();
    changed_.wait_for(lock, kLook, [this] { return stop_; });
  }
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
    const auto waited = Clock::now() - start;
    const bool all_who_answer =
        std::includes(arrived.begin(), arrived.end(), alive.begin(), alive.end());
    if (arrived == expected || (waited >= kAnswer && all_who_answer) ||
        waited >= timeout_ + kMoment) {
      // The first list stays.
      return text_of(store_->compareSet(prefix + kList, {}, bytes_of(text_of(arrived))));
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
  }
  const auto text_key = [&](int rank) { return prefix + "/text/" + std::to_string(rank); };
  store_->set(text_key(rank_), bytes_of(text));
  store_->append(prefix + kArrived, bytes_of(std::to_string(rank_) + " "));
  store_->set(prefix + kOpen, bytes_of("1"));
  const std::set<int> present = numbers_in(close(prefix));
  if (present.count(rank_) == 0) {
    left_behind_ = c10::str(
        "the other ranks went on without rank ", rank_, " as ", present.size(),
        present.size() == 1 ? " rank" : " ranks",
        ", since it did not answer in time: it was stopped or could not be reached. What it holds "
        "is out of date; end this process");
    TORCH_CHECK(false, left_behind_);
  }
  Present result;
  result.ranks.assign(present.begin(), present.end());
  for (const int rank : result.ranks) result.texts.push_back(text_of(store_->get(text_key(rank))));
  ranks_ = result.ranks;
  return result;
}

}  // namespace zero
