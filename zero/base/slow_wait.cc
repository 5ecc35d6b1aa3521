// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/base/slow_wait.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "zero/base/detached_call.h"
#include "zero/base/threads.h"

namespace zero {

using std::chrono::milliseconds;

namespace {

std::atomic<int64_t> after_ms{10000};

// How long print_slow_wait() waits until its line is out, and how many lines may be under way.
constexpr milliseconds kLineLimit{1000};
constexpr int kMostLines = 16;
std::atomic<int> lines_under_way{0};
std::atomic<bool> stuck{false};  // a line was not out in time

// Without the lock of stderr, which others would wait for as long as this line stands.
void write_line(const std::string& line) {
  for (size_t done = 0; done < line.size();) {
    const ssize_t written = write(STDERR_FILENO, line.data() + done, line.size() - done);
    pollfd writable{STDERR_FILENO, POLLOUT, 0};
    if (written >= 0) {
      done += static_cast<size_t>(written);
    } else if (errno == EAGAIN) {
      poll(&writable, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace

milliseconds slow_wait_after() { return milliseconds(after_ms); }
void set_slow_wait_after(milliseconds duration) { after_ms = duration.count(); }

void print_slow_wait(const std::string& text) {
  if (++lines_under_way > kMostLines) {
    --lines_under_way;
    return;
  }
  const auto print = [line = "zero: " + text + "\n"] {
    write_line(line);
    stuck = false;
    --lines_under_way;
  };
  try {
    const auto printed = start_detached(print);
    if (!stuck) stuck = printed.wait_for(kLineLimit) == std::future_status::timeout;
  } catch (const c10::Error&) {  // The system has no thread left.
    pollfd writable{STDERR_FILENO, POLLOUT, 0};
    if (poll(&writable, 1, 0) == 1) {
      print();
    } else {
      --lines_under_way;
    }
  }
}

std::string duration_text(milliseconds duration) {
  const int64_t ms = duration.count();
  if (ms % 1000 != 0) return std::to_string(ms) + " ms";
  if (ms % 60000 != 0 || ms == 0) return std::to_string(ms / 1000) + " s";
  return std::to_string(ms / 60000) + " min";
}

// All waits of this process. Never destroyed: its thread runs until the process ends.
struct SlowWaits {
  static SlowWaits& instance() {
    static auto* waits = new SlowWaits;
    return *waits;
  }

  void add(SlowWait& wait) {
    const std::lock_guard<std::mutex> lock(mutex);
    wait.next_ = first;
    if (first != nullptr) first->previous_ = &wait;
    first = &wait;
    if (!started) start();
  }

  void remove(SlowWait& wait) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (wait.next_ != nullptr) wait.next_->previous_ = wait.previous_;
    (wait.previous_ != nullptr ? wait.previous_->next_ : first) = wait.next_;
  }

 private:
  void start() {
    try {
      start_detached_thread([this] { look_for_ever(); }, "waits");
      started = true;
    } catch (const c10::Error&) {  // No thread, no lines. The next wait tries again.
    }
  }

  [[noreturn]] void look_for_ever() {
    while (true) {
      const milliseconds period =
          std::clamp(slow_wait_after() / 4, milliseconds(10), kLookInterval);
      std::this_thread::sleep_for(period);
      // Without the lock: looks may take others, and lines may stand.
      for (const auto& look : looks(std::chrono::steady_clock::now() - period)) {
        try {
          look();
        } catch (const std::exception&) {  // It looks again.
        }
      }
      for (const std::string& text : new_lines()) print_slow_wait(text);
    }
  }

  // Of the waits that have become long.
  std::vector<std::string> new_lines() {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto before = std::chrono::steady_clock::now() - slow_wait_after();
    std::vector<std::string> lines;
    for (SlowWait* wait = first; wait != nullptr; wait = wait->next_) {
      if (wait->printed_ || wait->since_ > before) continue;
      wait->printed_ = true;
      lines.push_back(wait->text_());
    }
    return lines;
  }

  // Of the waits that began before `begin`.
  std::vector<std::function<void()>> looks(std::chrono::steady_clock::time_point begin) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<std::function<void()>> result;
    for (const SlowWait* wait = first; wait != nullptr; wait = wait->next_) {
      if (wait->look_ && wait->since_ <= begin) result.push_back(wait->look_);
    }
    return result;
  }

  static constexpr milliseconds kLookInterval{1000};
  std::mutex mutex;
  SlowWait* first = nullptr;
  bool started = false;
};

SlowWait::SlowWait(std::function<std::string()> text, std::function<void()> look)
    : text_(std::move(text)), look_(std::move(look)) {
  SlowWaits::instance().add(*this);
}

SlowWait::~SlowWait() { SlowWaits::instance().remove(*this); }

}  // namespace zero
