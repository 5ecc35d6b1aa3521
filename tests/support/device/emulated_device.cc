// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/device/emulated_device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "tests/support/device/device_calls.h"
#include "tests/support/device/emulated_operations.h"
#include "tests/support/device/emulated_streams.h"

namespace zero {
namespace {

using std::chrono::microseconds;

constexpr unsigned char kPoison = 0xFF;
constexpr size_t kQuarantine = size_t{64} << 20;

std::atomic<int64_t> copy_time_us{0};
std::array<std::atomic<int64_t>, kEmulatedDevices> waits{};
std::array<std::atomic<int64_t>, kEmulatedDevices> copied{};
std::array<std::atomic<int64_t>, kEmulatedDevices> launched{};
std::array<std::atomic<int64_t>, kEmulatedDevices> under_way{};

}  // namespace

namespace emulated {

microseconds copy_time() { return microseconds(copy_time_us.load()); }

}  // namespace emulated

namespace {

using emulated::kFrees;
using emulated::kStreams;
using emulated::stream_of;

using Kind = DeviceCall::Kind;

DeviceCall of_stream(Kind kind, const c10::Stream& stream) {
  DeviceCall call;
  call.kind = kind;
  call.device = stream.device_index();
  call.stream = stream.id();
  return call;
}

// `waits`: the host, which does not only ask.
void note(Kind kind, const c10::Stream& stream, const emulated::Event* event = nullptr,
          bool waits = false) {
  DeviceCall call = of_stream(kind, stream);
  if (event != nullptr) call.event = event->gate.id();
  call.waits = waits;
  if (kind == Kind::kWait) call.captured = emulated::capture_of(stream) != nullptr;
  DeviceCalls::add(std::move(call));
}

thread_local int this_device = 0;
thread_local std::array<c10::StreamId, kEmulatedDevices> these_streams{};

// ---- Memory ----

struct Block {
  int device = 0;
  size_t bytes = 0;
  c10::StreamId stream = 0;
  std::vector<c10::Stream> used_on = {};   // besides `stream`
  emulated::CapturePtr capture = nullptr;  // to whose graph it belongs
};

class Memory {
 public:
  void* allocate(size_t bytes) {
    void* const memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    // What it holds is not known: it may have been something else's.
    std::memset(memory, kPoison, bytes);
    const c10::Stream stream = emulated::current_stream(this_device);
    const emulated::CapturePtr capture = emulated::capture_of(stream);
    if (capture) {
      emulated::add_unseen(*capture, stream,
                           [memory, bytes] { std::memset(memory, kPoison, bytes); });
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[memory] = {this_device, bytes, stream.id(), {}, capture};
    note(Kind::kAllocate, this_device, stream.id(), memory, bytes);
    return memory;
  }

  void free(void* memory) {
    Block block;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      block = std::move(blocks_.at(memory));
      blocks_.erase(memory);
      note(Kind::kFree, block.device, block.stream, memory, block.bytes);
    }
    const c10::Stream owner = stream_of(block.device, block.stream);
    if (block.capture) {
      // Memory that other streams have used is not used again in a capture.
      if (block.used_on.empty() && emulated::capture_of(owner) == block.capture) {
        emulated::add_unseen(*block.capture, owner, [memory, bytes = block.bytes] {
          std::memset(memory, kPoison, bytes);
        });
      }
      return emulated::keep_memory(*block.capture,
                                   [this, memory, bytes = block.bytes] { retire(memory, bytes); });
    }
    // No stream waits for others' use of the memory: it only comes back later.
    const c10::Stream last = block.used_on.empty() ? owner : stream_of(block.device, kFrees);
    if (!(last == owner)) {
      emulated::push_outside(last,
                             [gate = emulated::mark(owner)] { gate.wait("memory of a stream"); });
    }
    for (const c10::Stream& stream : block.used_on) {
      emulated::push_outside(
          last, [gate = emulated::mark(stream)] { gate.wait("memory of another stream"); });
    }
    emulated::push_outside(last, [this, memory, bytes = block.bytes] { retire(memory, bytes); });
  }

  void record(const void* memory, const c10::Stream& stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find(memory);
    if (found == blocks_.end() || found->second.stream == stream.id()) return;
    auto& streams = found->second.used_on;
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
    note(Kind::kRecordStream, stream.device_index(), stream.id(), memory, 1);
  }

  int device_of(const void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find(memory);
    return found == blocks_.end() ? -1 : found->second.device;
  }

  void check_quarantine() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [memory, bytes] : quarantine_) check(memory, bytes);
  }

 private:
  using Blocks = std::map<const void*, Block>;

  Blocks::iterator find(const void* memory) {
    auto found = blocks_.upper_bound(memory);
    if (found == blocks_.begin()) return blocks_.end();
    --found;
    const auto* const begin = static_cast<const char*>(found->first);
    return static_cast<const char*>(memory) < begin + std::max<size_t>(found->second.bytes, 1)
               ? found
               : blocks_.end();
  }

  static void note(Kind kind, int device, c10::StreamId stream, const void* memory, size_t bytes) {
    DeviceCall call = of_stream(kind, stream_of(device, stream));
    call.memory = {static_cast<const char*>(memory), static_cast<int64_t>(bytes)};
    DeviceCalls::add(std::move(call));
  }

  static void check(void* memory, size_t bytes) {
    const auto* const begin = static_cast<const unsigned char*>(memory);
    if (std::all_of(begin, begin + bytes, [](unsigned char c) { return c == kPoison; })) return;
    emulated::report("memory of " + std::to_string(bytes) +
                     " bytes was written after it was freed");
    std::memset(memory, kPoison, bytes);  // Once is enough.
  }

  void retire(void* memory, size_t bytes) {
    std::memset(memory, kPoison, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    quarantine_.emplace_back(memory, bytes);
    quarantined_ += bytes;
    while (quarantined_ > kQuarantine) {
      const auto [oldest, size] = quarantine_.front();
      quarantine_.pop_front();
      check(oldest, size);
      quarantined_ -= size;
      std::free(oldest);
    }
  }

  std::mutex mutex_;
  Blocks blocks_;
  std::deque<std::pair<void*, size_t>> quarantine_;
  size_t quarantined_ = 0;
};

Memory& device_memory() {
  static auto* const all = new Memory;
  return *all;
}

void free_device_memory(void* memory) {
  if (memory != nullptr) device_memory().free(memory);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kEmulated, static_cast<c10::DeviceIndex>(this_device));
    if (bytes == 0) return {nullptr, device};
    void* const memory = device_memory().allocate(bytes);
    return {memory, memory, &free_device_memory, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
};

// Host memory that a stream may copy while the host goes on.
struct PinnedMemory {
  std::mutex mutex;
  std::map<const void*, size_t> blocks;

  bool contains(const void* memory) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.upper_bound(memory);
    if (found == blocks.begin()) return false;
    --found;
    return static_cast<const char*>(memory) <
           static_cast<const char*>(found->first) + found->second;
  }
};

PinnedMemory& pinned_memory() {
  static auto* const all = new PinnedMemory;
  return *all;
}

void free_pinned_memory(void* memory) {
  PinnedMemory& pinned = pinned_memory();
  const std::lock_guard<std::mutex> lock(pinned.mutex);
  pinned.blocks.erase(memory);
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const memory = std::aligned_alloc(64, (std::max<size_t>(bytes, 1) + 63) / 64 * 64);
    PinnedMemory& pinned = pinned_memory();
    const std::lock_guard<std::mutex> lock(pinned.mutex);
    pinned.blocks[memory] = std::max<size_t>(bytes, 1);
    return {memory, memory, &free_pinned_memory, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
};

// ---- What libtorch asks of a device ----

struct DeviceGuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kEmulated; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    this_device = device.index();
    return before;
  }
  c10::Device getDevice() const override {
    return {kEmulated, static_cast<c10::DeviceIndex>(this_device)};
  }
  void setDevice(c10::Device device) const override { this_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    this_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return emulated::current_stream(device.has_index() ? device.index() : this_device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::atomic<int> next{0};
    return stream_of(device.index(), device.index() * kStreams + 1 + next++ % (kStreams - 1));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = emulated::current_stream(stream.device_index());
    these_streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<emulated::Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new emulated::Event;
    emulated::record(event_of(*event), stream);
    note(Kind::kRecord, stream, &event_of(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    note(Kind::kWait, stream, &event_of(event));
    emulated::block(event_of(event), stream);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    if (!emulated::host_may_wait(this_device, "the host asks", &event_of(event))) return true;
    const bool open = event_of(event).gate.is_open();
    if (open) note_seen(event);
    return open;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kEmulatedDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    if (!emulated::host_may_wait(stream.device_index(), "the host asks a stream of")) return true;
    const bool idle = emulated::is_idle(stream);
    if (idle) note(Kind::kHostSawStream, stream);
    return idle;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    emulated::await(stream, "the host waits for a stream of");
  }
  void synchronizeEvent(void* event) const override {
    emulated::count_host_wait(this_device);
    if (event == nullptr) return;
    if (!emulated::host_may_wait(this_device, "the host waits for", &event_of(event))) return;
    event_of(event).gate.wait("synchronizing an event");
    note_seen(event, /*waits=*/true);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    emulated::count_host_wait(device);
    if (!emulated::host_may_wait(device, "the host waits for")) return;
    for (int n = 0; n < kStreams; ++n) {
      const c10::Stream stream = stream_of(device, n == 0 ? 0 : device * kStreams + n);
      emulated::mark(stream).wait("synchronizing a device");
      note(Kind::kHostSawStream, stream, nullptr, /*waits=*/true);
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().record(data.get(), stream);
  }

 private:
  // An event is of one device here.
  static void note_seen(void* event, bool waits = false) {
    note(Kind::kHostSawEvent, stream_of(this_device, 0), &event_of(event), waits);
  }
  static emulated::Event& event_of(void* event) { return *static_cast<emulated::Event*>(event); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kEmulatedDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(this_device);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { this_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(this_device, device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kEmulated, static_cast<c10::DeviceIndex>(device_memory().device_of(data))};
  }
  bool isPinnedPtr(const void* data) const override { return pinned_memory().contains(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
};

// Before main(): autograd counts the devices when it is first used.
const bool registered = [] {
  static DeviceAllocator allocator;
  static DeviceGuardImpl guard;
  static Hooks hooks;
  c10::SetAllocator(kEmulated, &allocator);
  c10::impl::registerDeviceGuard(kEmulated, &guard);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::register_privateuse1_backend("emulated");
  return true;
}();

}  // namespace

namespace emulated {

void note_use(const c10::Stream& stream, const MemoryUse& use) {
  if (use.begin == nullptr || use.bytes == 0) return;
  DeviceCall call = of_stream(Kind::kUse, stream);
  call.memory = {static_cast<const char*>(use.begin), use.bytes};
  call.writes = use.writes;
  DeviceCalls::add(std::move(call));
}

const char* launch(void* native_stream, const void* memory, std::function<void()> work,
                   const std::vector<MemoryUse>& used) {
  const auto id = static_cast<c10::StreamId>(reinterpret_cast<intptr_t>(native_stream));
  const int device = id == 0 ? this_device : static_cast<int>(id) / kStreams;
  if (device != this_device) {
    report("a kernel for a stream of device " + std::to_string(device) +
           " was launched on device " + std::to_string(this_device));
    return "invalid resource handle";
  }
  if (const int owner = device_of(memory); owner != device) {
    report("a kernel on device " + std::to_string(device) + " was given memory of " +
           (owner < 0 ? std::string("the host, or freed") : "device " + std::to_string(owner)));
    return "an illegal memory access was encountered";
  }
  ++launched[device];
  const c10::Stream stream = stream_of(device, id);
  note_use(stream, {memory, 1, true});
  for (const MemoryUse& use : used) note_use(stream, use);
  enqueue(stream, std::move(work));
  return nullptr;
}

c10::Stream current_stream(int device) { return stream_of(device, these_streams[device]); }
int device_of(const void* memory) { return device_memory().device_of(memory); }
void count_host_wait(int device) { ++waits[device]; }
void count_to_host(int device, int64_t bytes) { copied[device] += bytes; }
void count_under_way(int device, int64_t copies) { under_way[device] += copies; }
void record_on_stream(const void* memory, const c10::Stream& stream) {
  device_memory().record(memory, stream);
}

void await(const c10::Stream& stream, const std::string& what) {
  count_host_wait(stream.device_index());
  if (!host_may_wait(stream.device_index(), what)) return;
  mark(stream).wait("the host");
  note(Kind::kHostSawStream, stream, nullptr, /*waits=*/true);
}

// Not counted: it stands for the host that runs ahead of what it enqueues.
void catch_up(int device) { mark(current_stream(device)).wait("an operation"); }

}  // namespace emulated

int64_t EmulatedDevice::host_waits(int device) { return waits[device]; }
int64_t EmulatedDevice::launches(int device) { return launched[device]; }
int64_t EmulatedDevice::bytes_to_host(int device) { return copied[device]; }
int64_t EmulatedDevice::copies_under_way(int device) { return under_way[device]; }

void EmulatedDevice::check_freed_memory() { device_memory().check_quarantine(); }
void EmulatedDevice::set_copy_time(microseconds time) { copy_time_us = time.count(); }

}  // namespace zero
