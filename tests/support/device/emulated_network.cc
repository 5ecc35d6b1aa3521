// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/device/emulated_network.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/device/collective_rules.h"
#include "tests/support/device/device_calls.h"
#include "tests/support/device/emulated_device.h"
#include "zero/comm/backends/nccl.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What one rank brings to a collective.
struct Part {
  const char* input = nullptr;
  char* output = nullptr;
  int64_t bytes = 0;  // of the input
  at::ScalarType dtype = at::kByte;
};

struct Round {
  std::string call;
  std::vector<Part> parts;
  int arrived = 0;
  int computed = 0;
  int left = 0;
};

}  // namespace

// Of one device: places for collectives that have started there.
class EmulatedRoom {
 public:
  explicit EmulatedRoom(int places) : places_(places), free_(places) {}
  // Returns whether a place was free within a short time.
  bool enter() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!left_.wait_for(lock, milliseconds(5), [this] { return free_ > 0; })) return false;
    --free_;
    return true;
  }
  void leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++free_;
    left_.notify_all();
  }
  // Blocks until none has a place, as memory that is freed waits for the device.
  void await_idle() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (left_.wait_for(lock, emulated::patience(), [this] { return free_ == places_; })) return;
    emulated::report("deadlock: an abort waits for a collective of another communicator");
  }

  std::atomic<bool> dead = false;  // the rank of the device

 private:
  std::mutex mutex_;
  std::condition_variable left_;
  const int places_;
  int free_;
};

// The ranks of one communicator.
struct EmulatedChannel {
  enum class End : char { kNone, kSeenByAll, kUnseen };
  EmulatedChannel(int64_t number_in, int size_in)
      : number(number_in),
        size(size_in),
        begun(static_cast<size_t>(size_in)),
        ends(static_cast<size_t>(size_in)) {}
  const int64_t number;  // of the communicator
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int64_t, Round> rounds;
  std::vector<int64_t> begun;             // by rank: its collectives that have begun on the device
  std::map<std::string, int> connecting;  // by call: the ranks that have come to their first one
  std::vector<End> ends;                  // by rank
  int shut_down = 0;                      // ranks
  bool broken = false;                    // nothing gets through
  bool stopped = false;                   // on all ranks

  bool has_ended(int rank) const {
    return stopped || ends[static_cast<size_t>(rank)] != End::kNone;
  }
  bool has_failed() const {
    return broken || stopped || std::ranges::count(ends, End::kSeenByAll) > 0;
  }
};

struct EmulatedNetwork::State {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<EmulatedChannel>> channels;
  int64_t next = 0;
  bool stopped = false;
  std::vector<std::shared_ptr<EmulatedRoom>> rooms = {};  // by device
  bool ring_sums = false;

  void set_in_all(bool EmulatedChannel::*flag) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [number, channel] : channels) {
      const std::lock_guard<std::mutex> channel_lock(channel->mutex);
      (*channel).*flag = true;
      channel->changed.notify_all();
    }
  }
};

namespace {

// Computes the output of one rank from all parts, in host memory of its own; runs on a stream.
using Compute = std::function<std::vector<char>(const std::vector<Part>& parts, int rank)>;

using Kind = CollectiveCall::Kind;
using CallPtr = std::shared_ptr<const CollectiveCall>;

struct CollectiveKind {
  CollectiveKind(Kind kind_in, int operation_in = -1) : kind(kind_in), operation(operation_in) {}
  Kind kind;
  int operation;  // c10d::ReduceOp::RedOpType, where it reduces
};

void note_collective(DeviceCall::Kind kind, const c10::Stream& stream, CallPtr collective) {
  DeviceCall call;
  call.kind = kind;
  call.device = stream.device_index();
  call.stream = stream.id();
  call.collective = std::move(collective);
  DeviceCalls::add(std::move(call));
}

DeviceMemory memory_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}

class EmulatedWork : public c10d::Work {
 public:
  EmulatedWork(c10::Stream stream, std::vector<at::Tensor> tensors, std::vector<CallPtr> calls)
      : event_(kEmulated), tensors_(std::move(tensors)), calls_(std::move(calls)) {
    event_.record(stream);
  }
  // Tensors are kept until here, as ProcessGroupNCCL does.
  bool wait(milliseconds) override {
    const c10::Stream current = emulated::current_stream(event_.device().index());
    event_.block(current);
    for (const CallPtr& call : calls_) {
      note_collective(DeviceCall::Kind::kCollectiveWait, current, call);
    }
    tensors_.clear();
    return true;
  }

 private:
  c10::Event event_;
  std::vector<at::Tensor> tensors_;
  const std::vector<CallPtr> calls_;
};

// Of one collective of a section.
class SectionPart : public c10d::Work {
 public:
  bool wait(milliseconds) override {
    emulated::report("a wait for one collective of a section");
    return true;
  }
};

class EmulatedBackend : public c10d::Backend {
 public:
  EmulatedBackend(std::shared_ptr<EmulatedChannel> channel, std::shared_ptr<EmulatedRoom> room,
                  int rank, int device, milliseconds limit, bool ring_sums)
      : Backend(rank, channel->size),
        limit_(limit),
        ring_sums_(ring_sums),
        channel_(std::move(channel)),
        room_(std::move(room)),
        device_(device),
        stream_(c10::impl::getDeviceGuardImpl(kEmulated)->getStreamFromGlobalPool(
            c10::Device(kEmulated, static_cast<c10::DeviceIndex>(device)), true)) {
    setBoundDeviceId(c10::Device(kEmulated, static_cast<c10::DeviceIndex>(device)));
  }
  ~EmulatedBackend() override {
    if (section_) emulated::report(c10::str("rank ", getRank(), " leaves a section open"));
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    if (section_) emulated::report("a section begins in an open one");
    section_ = Section{std::this_thread::get_id(), {}, {}, {}};
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(section_, "no section is open");
    check_section_thread();
    const Section section = *std::exchange(section_, std::nullopt);
    for (const auto& launch : section.launches) launch();
    return c10::make_intrusive<EmulatedWork>(stream_, section.tensors, section.calls);
  }

  const std::string getBackendName() const override { return "emulated"; }

  // With splits, all ranks must give the same for their inputs.
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&,
                        std::vector<int64_t>& splits, const c10d::AllToAllOptions&) override {
    if (!splits.empty()) {
      const auto element = input.element_size();
      const auto row_begin = element * static_cast<size_t>(std::accumulate(
                                           splits.begin(), splits.begin() + getRank(), int64_t{0}));
      const auto row = element * static_cast<size_t>(splits[getRank()]);
      return start(Kind::kAllToAll, c10::str("alltoall of ", splits), input, output,
                   [=](const std::vector<Part>& parts, int) {
                     std::vector<char> result(parts.size() * row);
                     for (size_t r = 0; r < parts.size() && row > 0; ++r) {
                       std::memcpy(result.data() + r * row, parts[r].input + row_begin, row);
                     }
                     return result;
                   });
    }
    return start(Kind::kAllToAll, "alltoall", input, output,
                 [](const std::vector<Part>& parts, int rank) {
                   const auto row = static_cast<size_t>(parts[0].bytes) / parts.size();
                   std::vector<char> result(parts.size() * row);
                   for (size_t r = 0; r < parts.size(); ++r) {
                     std::memcpy(result.data() + r * row, parts[r].input + rank * row, row);
                   }
                   return result;
                 });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    const int op = options.reduceOp.op_;
    const CollectiveKind kind{Kind::kReduceScatter, op};
    return start(kind, c10::str("reduce_scatter ", op), input, output,
                 [ring = ring_sums_](const std::vector<Part>& parts, int rank) {
                   const auto row = static_cast<size_t>(parts[0].bytes) / parts.size();
                   TORCH_INTERNAL_ASSERT(parts[0].dtype == at::kFloat);
                   std::vector<char> result(row, 0);
                   auto* const sum = reinterpret_cast<float*>(result.data());
                   for (size_t n = 0; n < parts.size(); ++n) {
                     const size_t first = ring ? static_cast<size_t>(rank) + 1 : 0;
                     const Part& part = parts[(first + n) % parts.size()];
                     const auto* const values =
                         reinterpret_cast<const float*>(part.input + rank * row);
                     for (size_t i = 0; i < row / sizeof(float); ++i) sum[i] += values[i];
                   }
                   return result;
                 });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    return start(Kind::kAllGather, "allgather", input, output,
                 [](const std::vector<Part>& parts, int) {
                   std::vector<char> result;
                   for (const Part& part : parts) {
                     result.insert(result.end(), part.input, part.input + part.bytes);
                   }
                   return result;
                 });
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override {
    at::Tensor& tensor = tensors.at(0);
    const c10d::ReduceOp::RedOpType op = options.reduceOp.op_;
    const CollectiveKind kind{Kind::kAllReduce, op};
    return start(kind, c10::str("allreduce ", static_cast<int>(op)), tensor, tensor,
                 [op](const std::vector<Part>& parts, int) { return all_reduced(parts, op); });
  }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options) override {
    at::Tensor& tensor = tensors.at(0);
    const auto root = options.rootRank;
    return start(Kind::kBroadcast, c10::str("broadcast from ", root), tensor, tensor,
                 [root](const std::vector<Part>& parts, int) {
                   return std::vector<char>(parts[root].input,
                                            parts[root].input + parts[root].bytes);
                 });
  }

  void abort() override {
    {
      const std::lock_guard<std::mutex> lock(channel_->mutex);
      channel_->ends[static_cast<size_t>(getRank())] =
          room_->dead ? EmulatedChannel::End::kUnseen : EmulatedChannel::End::kSeenByAll;
      channel_->changed.notify_all();
    }
    room_->await_idle();
  }
  void shutdown() override {
    auto call = std::make_shared<CollectiveCall>();
    call->communicator = channel_->number;
    note_collective(DeviceCall::Kind::kEnd, stream_, std::move(call));
    std::unique_lock<std::mutex> lock(channel_->mutex);
    ++channel_->shut_down;
    channel_->changed.notify_all();
    channel_->changed.wait_for(lock, emulated::patience(), [this] {
      return channel_->shut_down == channel_->size || channel_->has_failed();
    });
  }
  c10d::ErrorType getError() override {
    {
      const std::lock_guard<std::mutex> lock(channel_->mutex);
      if (channel_->has_failed()) return c10d::ErrorType::COMM_ERROR;
    }
    const std::lock_guard<std::mutex> lock(watched_mutex_);
    while (!watched_.empty() && watched_.front().done.is_open()) watched_.pop_front();
    const bool late =
        !watched_.empty() && std::chrono::steady_clock::now() > watched_.front().limit;
    return late ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::SUCCESS;
  }

 private:
  static std::vector<char> all_reduced(const std::vector<Part>& parts,
                                       c10d::ReduceOp::RedOpType op) {
    const auto bytes = static_cast<size_t>(parts[0].bytes);
    std::vector<char> result(parts[0].input, parts[0].input + bytes);
    const auto combine = [&]<class T>(T*) {
      auto* const values = reinterpret_cast<T*>(result.data());
      for (size_t r = 1; r < parts.size(); ++r) {
        const auto* const others = reinterpret_cast<const T*>(parts[r].input);
        for (size_t i = 0; i < bytes / sizeof(T); ++i) {
          values[i] =
              op == c10d::ReduceOp::MAX ? std::max(values[i], others[i]) : values[i] + others[i];
        }
      }
    };
    switch (parts[0].dtype) {
      case at::kDouble:
        combine(static_cast<double*>(nullptr));
        break;
      case at::kLong:
        combine(static_cast<int64_t*>(nullptr));
        break;
      case at::kInt:
        combine(static_cast<int32_t*>(nullptr));
        break;
      default:
        TORCH_INTERNAL_ASSERT(false, "no sum of ", parts[0].dtype);
    }
    return result;
  }

  CallPtr call_of(CollectiveKind kind, const std::string& text, const at::Tensor& input,
                  const at::Tensor& output) const {
    auto call = std::make_shared<CollectiveCall>();
    call->kind = kind.kind;
    call->text = text;
    call->communicator = channel_->number;
    call->number = calls_;
    call->rank = getRank();
    call->ranks = channel_->size;
    call->dtype = input.scalar_type();
    call->operation = kind.operation;
    call->connects = !connected_.contains(text);
    call->input = memory_of(input);
    call->output = memory_of(output);
    return call;
  }

  WorkPtr start(CollectiveKind kind, const std::string& name, const at::Tensor& input,
                const at::Tensor& output, Compute compute) {
    if (busy_.exchange(true)) {
      emulated::report("two threads use one communicator at once: " + name);
    }
    for (const at::Tensor& tensor : {input, output}) {
      if (tensor.device() != c10::Device(kEmulated, static_cast<c10::DeviceIndex>(device_))) {
        emulated::report(c10::str(name, " of rank ", getRank(), " got a tensor on ",
                                  tensor.device(), ", its device is ", device_));
      }
    }
    TORCH_CHECK(input.is_contiguous() && output.is_contiguous(), name, " of strided memory");
    c10::Event ready(kEmulated);
    ready.record(emulated::current_stream(device_));
    ready.block(stream_);
    const Part part{static_cast<const char*>(input.const_data_ptr()),
                    static_cast<char*>(output.mutable_data_ptr()),
                    static_cast<int64_t>(input.nbytes()), input.scalar_type()};
    const std::string call = c10::str(name, " of ", input.nbytes(), " bytes of ", input.dtype());
    const CallPtr recorded = call_of(kind, call, input, output);
    note_collective(DeviceCall::Kind::kCollective, stream_, recorded);
    ++calls_;
    const auto launch = [this, part, call, compute = std::move(compute)] {
      connect(call);
      emulated::enqueue(stream_,
                        [channel = channel_, room = room_, rank = getRank(), part, call, compute] {
                          if (!enter(*room, *channel, rank, call)) return;
                          run(*channel, rank, part, call, compute);
                          room->leave();
                        });
      watch();
    };
    WorkPtr work;
    if (section_) {
      check_section_thread();
      section_->launches.push_back(launch);
      section_->tensors.insert(section_->tensors.end(), {input, output});
      section_->calls.push_back(recorded);
      work = c10::make_intrusive<SectionPart>();
    } else {
      launch();
      work = c10::make_intrusive<EmulatedWork>(stream_, std::vector<at::Tensor>{input, output},
                                               std::vector<CallPtr>{recorded});
    }
    busy_ = false;
    return work;
  }

  // NCCL keeps what is open for each thread.
  void check_section_thread() const {
    if (section_->thread != std::this_thread::get_id()) {
      emulated::report("a section goes on in another thread");
    }
  }

  // From the call on, as ProcessGroupNCCL does, and nothing in a graph.
  void watch() {
    if (is_capturing(stream_.device())) return;
    emulated::Gate done;
    emulated::enqueue(stream_, [done]() mutable { done.open(); });
    const std::lock_guard<std::mutex> lock(watched_mutex_);
    watched_.push_back({std::chrono::steady_clock::now() + limit_, done});
  }

  // The first call of a kind and size holds the host until all ranks have come to it.
  void connect(const std::string& call) {
    std::unique_lock<std::mutex> lock(channel_->mutex);
    if (!connected_.insert(call).second) return;
    int& ranks = channel_->connecting[call];
    ++ranks;
    channel_->changed.notify_all();
    wait(*channel_, getRank(), lock, "the first " + call, [&] { return ranks >= channel_->size; });
  }

  // Blocks until `ready`; false: the communicator has ended.
  static bool wait(EmulatedChannel& channel, int rank, std::unique_lock<std::mutex>& lock,
                   const std::string& call, const std::function<bool()>& ready) {
    const bool in_time = channel.changed.wait_for(lock, emulated::patience(), [&] {
      return channel.has_ended(rank) || (ready() && !channel.broken);
    });
    if (!in_time) {
      emulated::report("deadlock: " + call + " was not called by all ranks");
      channel.stopped = true;
      channel.changed.notify_all();
    }
    return !channel.has_ended(rank);
  }

  // Waits for a place on the device; false: the communicator has ended.
  static bool enter(EmulatedRoom& room, EmulatedChannel& channel, int rank,
                    const std::string& call) {
    const auto limit = std::chrono::steady_clock::now() + emulated::patience();
    while (!room.enter()) {
      const std::lock_guard<std::mutex> lock(channel.mutex);
      if (!channel.stopped && std::chrono::steady_clock::now() > limit) {
        emulated::report("deadlock: " + call + " found no room beside other collectives");
        channel.stopped = true;
        channel.changed.notify_all();
      }
      if (channel.has_ended(rank)) return false;
    }
    return true;
  }

  static void run(EmulatedChannel& channel, int rank, const Part& part, const std::string& call,
                  const Compute& compute) {
    std::unique_lock<std::mutex> lock(channel.mutex);
    if (channel.has_ended(rank)) return;
    const int64_t number = channel.begun[rank]++;  // counted here: a replay has numbers of its own
    Round& round = channel.rounds[number];
    if (round.parts.empty()) {
      round.parts.resize(static_cast<size_t>(channel.size));
      round.call = call;
    }
    if (round.call != call) {
      emulated::report("one communicator, collective " + std::to_string(number) + ": " +
                       round.call + " and " + call);
      channel.stopped = true;
    }
    round.parts[rank] = part;
    ++round.arrived;
    channel.changed.notify_all();
    if (!wait(channel, rank, lock, call, [&] { return round.arrived == channel.size; })) return;
    lock.unlock();
    const std::vector<char> result = compute(round.parts, rank);
    lock.lock();
    ++round.computed;
    channel.changed.notify_all();
    if (!wait(channel, rank, lock, call, [&] { return round.computed == channel.size; })) return;
    if (!result.empty()) std::memcpy(part.output, result.data(), result.size());
    if (++round.left == channel.size) channel.rounds.erase(number);
  }

  struct Watched {
    std::chrono::steady_clock::time_point limit;
    emulated::Gate done;
  };

  const milliseconds limit_;
  const bool ring_sums_;
  const std::shared_ptr<EmulatedChannel> channel_;
  const std::shared_ptr<EmulatedRoom> room_;
  const int device_;
  const c10::Stream stream_;
  int64_t calls_ = 0;
  std::set<std::string> connected_;
  std::atomic<bool> busy_ = false;
  struct Section {
    std::thread::id thread;
    std::vector<std::function<void()>> launches;
    std::vector<at::Tensor> tensors;
    std::vector<CallPtr> calls;
  };
  std::optional<Section> section_;  // an open one
  std::mutex watched_mutex_;
  std::deque<Watched> watched_;
};

}  // namespace

EmulatedNetwork::EmulatedNetwork(int room, bool ring_sums) : state_(std::make_shared<State>()) {
  state_->ring_sums = ring_sums;
  for (int device = 0; device < kEmulatedDevices; ++device) {
    state_->rooms.push_back(std::make_shared<EmulatedRoom>(room));
  }
}
EmulatedNetwork::~EmulatedNetwork() = default;

BackendFactory EmulatedNetwork::factory(int rank) {
  return [state = state_, device = rank, host = host_.factory(rank)](
             const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
             Purpose purpose, milliseconds timeout) -> NewBackend {
    if (purpose != Purpose::kData) return host(store, rank, world_size, purpose, timeout);
    if (rank == 0) {
      const std::lock_guard<std::mutex> lock(state->mutex);
      const int64_t number = state->next++;
      state->channels[number] = std::make_shared<EmulatedChannel>(number, world_size);
      store->set("channel", std::to_string(number));
    }
    store->wait({"channel"}, timeout);
    const std::vector<uint8_t> text = store->get("channel");
    const std::lock_guard<std::mutex> lock(state->mutex);
    const auto channel = state->channels.at(std::stoll(std::string(text.begin(), text.end())));
    return {c10::make_intrusive<EmulatedBackend>(channel, state->rooms[device], rank, device,
                                                 nccl_timeout(timeout), state->ring_sums),
            RowTransport::kWhole};
  };
}

void EmulatedNetwork::kill(int rank) {
  state_->rooms[static_cast<size_t>(rank)]->dead = true;
  host_.kill(rank);
}

void EmulatedNetwork::break_links() { state_->set_in_all(&EmulatedChannel::broken); }

void EmulatedNetwork::stop() {
  host_.stop();
  state_->set_in_all(&EmulatedChannel::stopped);
}

void run_device_ranks(int world_size, const std::function<void(const Group&)>& body,
                      const DeviceRunOptions& options) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(options.timeout);
  std::optional<EmulatedNetwork> own;
  if (options.network == nullptr) own.emplace(options.room, options.ring_sums);
  EmulatedNetwork& network = options.network != nullptr ? *options.network : *own;
  MemoryNetwork host;
  DeviceCalls::begin();
  std::mutex mutex;
  std::exception_ptr first;
  const auto run = [&](int rank) {
    try {
      const int local = options.ranks_per_machine > 0 ? options.ranks_per_machine : world_size;
      body(Group(store, rank, world_size, "test",
                 options.over_host ? host.factory(rank) : network.factory(rank),
                 c10::Device(kEmulated, static_cast<c10::DeviceIndex>(rank)), options.timeout,
                 Topology::of_equal_machines(world_size, local)));
    } catch (...) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!first) first = std::current_exception();
      }
      network.stop();
      host.stop();
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  EmulatedDevice::finish();
  EmulatedDevice::check_freed_memory();
  std::vector<std::string> violations = EmulatedDevice::take_violations();
  const CollectiveRules rules{.one_order = options.room == 1,
                              .finished = !first && options.finishes};
  const std::vector<std::string> broken = broken_rules(DeviceCalls::take(), rules);
  violations.insert(violations.end(), broken.begin(), broken.end());
  if (options.violations != nullptr) {
    *options.violations = std::move(violations);
  } else {
    constexpr size_t kShown = 20;  // one fault breaks a rule again and again
    for (size_t i = 0; i < std::min(kShown, violations.size()); ++i) {
      ADD_FAILURE() << violations[i];
    }
    if (violations.size() > kShown) {
      ADD_FAILURE() << "and " << violations.size() - kShown << " more violations";
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace zero
