// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/agreement/problem_board.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "zero/base/error_text.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// A store is asked for at most this many texts, however many ranks there are.
constexpr int kTextsAtMost = 64;

// How long each may take; see problem_board.h.
constexpr milliseconds kLeaveLimit{500};
constexpr milliseconds kAnnounceLimit{200};
constexpr milliseconds kReadLimit{300};
// Between two looks at what others announce.
constexpr milliseconds kPollInterval{20};

std::string key_of(const std::string& topic, int rank) {
  return topic + "/" + std::to_string(rank);
}

std::string announcement_key(int rank) { return key_of("announced", rank); }

// The first rank behind those texts that announces something. What others announce then comes of
// it, as a rule.
constexpr const char* kFirstBehind = "announced/behind";

std::string to_text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

ProblemBoard::ProblemBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                           milliseconds timeout)
    : store_(BoundedStore::of(std::move(store), timeout)),
      rank_(rank),
      world_size_(world_size),
      timeout_(timeout) {}

int ProblemBoard::texts() const { return std::min(world_size_, kTextsAtMost); }

void ProblemBoard::leave(const std::string& topic, const std::string& text) noexcept {
  try {
    store_->within(std::min(kLeaveLimit, timeout_))->set(key_of(topic, rank_), text);
  } catch (const std::exception&) {
  }
}

std::string ProblemBoard::text_of(const std::string& topic, int rank) noexcept {
  try {
    return to_text(store_->within(timeout_)->get(key_of(topic, rank)));
  } catch (const std::exception& error) {
    return "(its text is not here: " + error_line(error) + ")";
  }
}

void ProblemBoard::announce(const std::string& problem) noexcept {
  try {
    const auto store = store_->within(kAnnounceLimit);
    store->set(announcement_key(rank_), problem);
    if (rank_ < kTextsAtMost) return;
    const std::string own = std::to_string(rank_), none;
    store->compareSet(kFirstBehind, problem.empty() ? own : none, problem.empty() ? none : own);
  } catch (const std::exception&) {  // The store may be gone with its host; nothing depends on it.
  }
}

std::vector<std::string> ProblemBoard::announcements(BoundedStore& store) const {
  const auto text_at = [&](const std::string& key) {
    return store.check({key}) ? to_text(store.get(key)) : std::string();
  };
  const auto line_of = [&](int rank) -> std::string {
    std::string problem = rank == rank_ ? std::string() : text_at(announcement_key(rank));
    if (problem.empty()) return {};
    const std::string name = "rank " + std::to_string(rank);
    // Some begin with it, as errors do.
    if (problem.compare(0, name.size() + 2, name + ": ") == 0) problem.erase(0, name.size() + 2);
    return "\n" + name + " had reported: " + problem;
  };
  std::vector<std::string> lines;
  for (int rank = 0; rank < texts(); ++rank) lines.push_back(line_of(rank));
  const std::string behind = texts() < world_size_ ? text_at(kFirstBehind) : std::string();
  lines.push_back(behind.empty() ? behind : line_of(std::stoi(behind)));
  return lines;
}

std::string ProblemBoard::announced() noexcept {
  std::string text;
  try {
    for (const std::string& line : announcements(*store_->within(kReadLimit))) text += line;
  } catch (const std::exception&) {
  }
  return text;
}

std::string ProblemBoard::announced_after_failure() noexcept {
  const auto deadline = Clock::now() + kReadLimit;
  std::vector<std::string> lines(texts() + 1);
  try {
    const auto store = store_->within(kReadLimit);
    while (true) {
      lines = announcements(*store);
      const auto silent =
          std::count(lines.begin(), lines.end() - 1, "") - (rank_ < texts() ? 1 : 0);
      const bool all = silent == 0 && !store_->served_here();
      if (all || Clock::now() + kPollInterval >= deadline) break;
      std::this_thread::sleep_for(kPollInterval);
    }
  } catch (const std::exception& error) {
    // A rank that serves the store ends with it; what it reported before counts.
    std::string known;
    for (const std::string& line : lines) known += line;
    if (known.empty()) return "\nwhat other ranks reported is not known: " + error_line(error);
    return known;
  }
  std::string text;
  for (int rank = 0; rank < texts(); ++rank) {
    if (rank == rank_) continue;
    text += lines[rank].empty() ? "\nrank " + std::to_string(rank) + " has reported nothing"
                                : lines[rank];
  }
  return text + lines.back();
}

}  // namespace zero
