// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/device/emulated_streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "tests/support/device/past.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

std::atomic<int64_t> longest_delay_us{500};
std::atomic<int64_t> patience_ms{20000};

struct Violations {
  std::mutex mutex;
  std::vector<std::string> list;
};

// Never destroyed: threads of streams run until the process ends.
Violations& violations() {
  static auto* const all = new Violations;
  return *all;
}

}  // namespace

namespace emulated {

void report(const std::string& violation) {
  Violations& all = violations();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.list.push_back(violation);
}

milliseconds patience() { return milliseconds(patience_ms.load()); }

struct Gate::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
};

Gate::Gate() : state_(std::make_shared<State>()) {}

void Gate::open() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->open = true;
  state_->changed.notify_all();
}

bool Gate::is_open() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->open;
}

void Gate::wait(const std::string& what) const {
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (state_->changed.wait_for(lock, patience(), [this] { return state_->open; })) return;
  lock.unlock();
  report("deadlock: " + what + " waited for more than " + std::to_string(patience().count()) +
         " ms");
}

namespace {

class StreamThread {
 public:
  explicit StreamThread(int number) : random_(static_cast<unsigned>(number)) {
    std::thread([this] { run(); }).detach();
  }

  void push(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }

  Gate mark() {
    Gate gate;
    push([gate]() mutable { gate.open(); });
    return gate;
  }

  bool idle() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty() && !running_;
  }

 private:
  void run() {
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        running_ = false;
        changed_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
        running_ = true;
      }
      delay();
      work();
    }
  }

  // Slow for a while, then fast again, so that any stream falls behind any other.
  void delay() {
    const int64_t longest = longest_delay_us;
    if (longest == 0) return;
    if (random_() % 16 == 0) slow_ = random_() % 4 == 0;
    if (slow_)
      std::this_thread::sleep_for(microseconds(random_() % static_cast<uint64_t>(longest)));
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool running_ = false;
  bool slow_ = false;
  std::mt19937_64 random_;
};

struct StreamThreads {
  std::mutex mutex;
  std::map<std::pair<int, c10::StreamId>, StreamThread*> all;
};

StreamThreads& stream_threads() {
  static auto* const threads = new StreamThreads;
  return *threads;
}

StreamThread& thread_of(const c10::Stream& stream) {
  StreamThreads& threads = stream_threads();
  const std::lock_guard<std::mutex> lock(threads.mutex);
  const int device = stream.device_index();
  StreamThread*& found = threads.all[{device, stream.id()}];
  if (found == nullptr) {
    found = new StreamThread(device * kStreams + static_cast<int>(stream.id()) % kStreams);
  }
  return *found;
}

std::string name_of(const c10::Stream& stream) {
  return c10::str("stream ", stream.id(), " of device ", static_cast<int>(stream.device_index()));
}

}  // namespace

c10::Stream stream_of(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE,
                     c10::Device(kEmulated, static_cast<c10::DeviceIndex>(device)), id);
}

Gate mark(const c10::Stream& stream) { return thread_of(stream).mark(); }
void push_outside(const c10::Stream& stream, std::function<void()> work) {
  thread_of(stream).push(std::move(work));
}
bool is_idle(const c10::Stream& stream) { return thread_of(stream).idle(); }

std::vector<Gate> marks() {
  StreamThreads& threads = stream_threads();
  const std::lock_guard<std::mutex> lock(threads.mutex);
  std::vector<Gate> result;
  for (const auto& [stream, thread] : threads.all) result.push_back(thread->mark());
  return result;
}

// ---- Captures ----

// What streams were given from its begin to its end, and so a graph.
class Capture {
 public:
  explicit Capture(const c10::Stream& origin) : origin_(origin) { streams_[origin.id()] = {}; }
  ~Capture() {
    push_outside(stream_of(origin_.device_index(), kFrees),
                 [replayed = replayed_, memory = std::move(memory_)] {
                   if (replayed) replayed->wait("the memory of a graph");
                   for (const auto& give_back : memory) give_back();
                 });
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  bool has(const c10::Stream& stream) const {
    return stream.device() == origin_.device() && streams_.contains(stream.id());
  }

  void add(const c10::Stream& stream, std::function<void()> work, bool counts) {
    if (counts) streams_[stream.id()].add_call(stream.id());
    nodes_.push_back({stream.id(), Node::kWork, std::move(work)});
  }
  size_t record(const c10::Stream& stream) {
    nodes_.push_back({stream.id(), Node::kRecord, nullptr, events_.size()});
    events_.push_back(streams_[stream.id()]);
    return events_.size() - 1;
  }
  void wait(const c10::Stream& stream, size_t event) {
    Past& past = streams_[stream.id()];
    past.join(events_[event]);
    past.add_call(stream.id());  // a stream that only waits is to be joined, too
    nodes_.push_back({stream.id(), Node::kWait, nullptr, event});
  }

  void end(const c10::Stream& stream) {
    open = false;
    if (!(stream == origin_))
      report("a capture ends on " + name_of(stream) + ", not where it began");
    const Past& joined = streams_[origin_.id()];
    for (const auto& [id, past] : streams_) {
      if (joined.has(id, past.count(id))) continue;
      report(name_of(stream_of(origin_.device_index(), id)) +
             " was not joined when its capture ended");
    }
  }

  // Each stream of the capture has one for replays.
  void replay(const c10::Stream& stream) {
    std::map<c10::StreamId, c10::Stream> replaying;
    for (const auto& [id, past] : streams_) {
      const auto number = static_cast<c10::StreamId>(replaying.size());
      replaying.emplace(id, stream_of(origin_.device_index(), kFrees - 1 - number));
    }
    std::vector<Gate> events(events_.size());
    const Gate begin = mark(stream);
    for (const auto& [id, own] : replaying) {
      push_outside(own, [begin] { begin.wait("a replay"); });
    }
    for (const Node& node : nodes_) {
      const c10::Stream& own = replaying.at(node.stream);
      switch (node.kind) {
        case Node::kWork:
          push_outside(own, node.work);
          break;
        case Node::kRecord:
          push_outside(own, [gate = events[node.event]]() mutable { gate.open(); });
          break;
        case Node::kWait:
          push_outside(own, [gate = events[node.event]] { gate.wait("a stream of a replay"); });
          break;
      }
    }
    for (const auto& [id, own] : replaying) {
      push_outside(stream, [end = mark(own)] { end.wait("the end of a replay"); });
    }
    replayed_ = mark(stream);
  }

  const uint64_t number = next++;
  // With the lock of captures, as all of the above.
  bool open = true;

  void keep(std::function<void()> give_back) { memory_.push_back(std::move(give_back)); }
  int device() const { return origin_.device_index(); }

 private:
  static inline std::atomic<uint64_t> next = 1;
  struct Node {
    enum Kind { kWork, kRecord, kWait };
    c10::StreamId stream;
    Kind kind;
    std::function<void()> work;
    size_t event = 0;
  };

  const c10::Stream origin_;
  std::vector<Node> nodes_;
  std::vector<Past> events_;
  std::map<c10::StreamId, Past> streams_;
  std::vector<std::function<void()>> memory_;
  std::optional<Gate> replayed_;  // behind the last replay
};

namespace {

struct Captures {
  std::mutex mutex;
  std::map<int, CapturePtr> under_way;  // by device
  std::atomic<size_t> count = 0;        // of these
};

Captures& captures() {
  static auto* const all = new Captures;
  return *all;
}

// As in cudaStreamCaptureModeRelaxed.
thread_local bool relaxed = false;

// The capture under way of a device, with the lock.
CapturePtr under_way(int device) {
  const auto found = captures().under_way.find(device);
  return found == captures().under_way.end() ? nullptr : found->second;
}

// With the lock.
CapturePtr having(const c10::Stream& stream) {
  CapturePtr capture = under_way(stream.device_index());
  return capture != nullptr && capture->has(stream) ? capture : nullptr;
}

}  // namespace

CapturePtr capture_of(const c10::Stream& stream) {
  if (captures().count == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  return having(stream);
}

void keep_memory(Capture& capture, std::function<void()> give_back) {
  const std::lock_guard<std::mutex> lock(captures().mutex);
  capture.keep(std::move(give_back));
}

void check_outside(const c10::Stream& stream) {
  if (captures().count == 0) return;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  if (under_way(stream.device_index()) == nullptr || having(stream)) return;
  report("work on " + name_of(stream) + ", which the capture under way there does not have");
}

void enqueue(c10::Stream stream, std::function<void()> work) {
  check_outside(stream);
  if (captures().count > 0) {
    const std::lock_guard<std::mutex> lock(captures().mutex);
    if (const CapturePtr capture = having(stream)) {
      return capture->add(stream, std::move(work), /*counts=*/true);
    }
  }
  push_outside(stream, std::move(work));
}

void add_unseen(Capture& capture, const c10::Stream& stream, std::function<void()> work) {
  const std::lock_guard<std::mutex> lock(captures().mutex);
  capture.add(stream, std::move(work), /*counts=*/false);
}

void record(Event& event, const c10::Stream& stream) {
  event = {};
  if (captures().count > 0) {
    const std::lock_guard<std::mutex> lock(captures().mutex);
    event.capture = having(stream);
    if (event.capture) event.number = event.capture->record(stream);
  }
  if (!event.capture) event.gate = mark(stream);
}

void block(const Event& event, const c10::Stream& stream) {
  if (captures().count > 0 || event.capture) {
    const std::lock_guard<std::mutex> lock(captures().mutex);
    const CapturePtr capture = having(stream);
    if (event.capture && !event.capture->open) {
      return report(name_of(stream) + " waits for an event of a capture that has ended");
    }
    if (capture != event.capture && capture) {
      return report(name_of(stream) + " has a capture and waits for an event from outside of it");
    }
    if (event.capture) return event.capture->wait(stream, event.number);
  }
  push_outside(stream, [gate = event.gate] { gate.wait("a stream"); });
}

bool host_may_wait(int device, const std::string& what, const Event* event) {
  if (captures().count == 0 && (event == nullptr || !event->capture)) return true;
  const std::lock_guard<std::mutex> lock(captures().mutex);
  if (event != nullptr && event->capture) {
    report(what + " an event of a capture");
    return false;
  }
  if (under_way(device) == nullptr || relaxed) return true;
  report(c10::str(what, " device ", device, " during a capture"));
  return false;
}

}  // namespace emulated

// ---- Declared in emulated_device.h ----

std::vector<std::string> EmulatedDevice::take_violations() {
  Violations& all = violations();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return std::exchange(all.list, {});
}

void EmulatedDevice::finish() {
  // Each wait of a stream has a limit, so this has an end.
  for (const emulated::Gate& gate : emulated::marks()) {
    while (!gate.is_open()) std::this_thread::sleep_for(microseconds(100));
  }
}

void EmulatedDevice::set_delay(microseconds longest) { longest_delay_us = longest.count(); }
void EmulatedDevice::set_patience(milliseconds longest) { patience_ms = longest.count(); }

void EmulatedGraph::capture_begin() {
  using namespace emulated;
  const int device = c10::impl::getDeviceGuardImpl(kEmulated)->getDevice().index();
  const c10::Stream stream = current_stream(device);
  if (stream.id() == 0) report("a capture begins on the default stream");
  const std::lock_guard<std::mutex> lock(captures().mutex);
  TORCH_CHECK(!captures().under_way.contains(device), "a capture is under way");
  capture_ = std::make_shared<emulated::Capture>(stream);
  captures().under_way[device] = capture_;
  ++captures().count;
}

void EmulatedGraph::capture_end() {
  using namespace emulated;
  TORCH_CHECK(capture_ && capture_->open, "no capture is under way");
  const std::lock_guard<std::mutex> lock(captures().mutex);
  capture_->end(current_stream(capture_->device()));
  captures().under_way.erase(capture_->device());
  --captures().count;
}

void EmulatedGraph::replay() {
  TORCH_CHECK(capture_ && !capture_->open, "nothing was captured");
  capture_->replay(emulated::current_stream(capture_->device()));
}

// In the place of those of zero/memory/device_stream.cc.
uint64_t current_capture(c10::Device device) {
  if (device.type() != kEmulated) return 0;
  const auto capture = emulated::capture_of(emulated::current_stream(device.index()));
  return capture ? capture->number : 0;
}

bool is_complete(const c10::Event& event) {
  emulated::relaxed = true;
  const bool complete = event.query();
  emulated::relaxed = false;
  return complete;
}

}  // namespace zero
