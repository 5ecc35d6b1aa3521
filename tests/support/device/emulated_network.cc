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
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/device/emulated_device.h"

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

// The ranks of one communicator.
struct EmulatedChannel {
  explicit EmulatedChannel(int size_in) : size(size_in) {}
  const int size;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int64_t, Round> rounds;
  std::map<std::string, int> connecting;  // by call: the ranks that have come to their first one
  bool stopped = false;
};

struct EmulatedNetwork::State {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<EmulatedChannel>> channels;
  int64_t next = 0;
  bool stopped = false;
};

namespace {

// Computes the output of one rank from all parts, in host memory of its own; runs on a stream.
using Compute = std::function<std::vector<char>(const std::vector<Part>& parts, int rank)>;

class EmulatedWork : public c10d::Work {
 public:
  EmulatedWork(c10::Stream stream, std::vector<at::Tensor> tensors)
      : event_(kEmulated), tensors_(std::move(tensors)) {
    event_.record(stream);
  }
  // Tensors are kept until here, as ProcessGroupNCCL does.
  bool wait(milliseconds) override {
    event_.block(emulated::current_stream(event_.device().index()));
    tensors_.clear();
    return true;
  }

 private:
  c10::Event event_;
  std::vector<at::Tensor> tensors_;
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
  EmulatedBackend(std::shared_ptr<EmulatedChannel> channel, int rank, int device)
      : Backend(rank, channel->size),
        channel_(std::move(channel)),
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
    section_ = Section{std::this_thread::get_id(), {}, {}};
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(section_, "no section is open");
    check_section_thread();
    const Section section = *std::exchange(section_, std::nullopt);
    for (const auto& launch : section.launches) launch();
    return c10::make_intrusive<EmulatedWork>(stream_, section.tensors);
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
      return start("alltoall", input, output, [=](const std::vector<Part>& parts, int) {
        std::vector<char> result(parts.size() * row);
        for (size_t r = 0; r < parts.size() && row > 0; ++r) {
          std::memcpy(result.data() + r * row, parts[r].input + row_begin, row);
        }
        return result;
      });
    }
    return start("alltoall", input, output, [](const std::vector<Part>& parts, int rank) {
      const auto row = static_cast<size_t>(parts[0].bytes) / parts.size();
      std::vector<char> result(parts.size() * row);
      for (size_t r = 0; r < parts.size(); ++r) {
        std::memcpy(result.data() + r * row, parts[r].input + rank * row, row);
      }
      return result;
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions&) override {
    return start("reduce_scatter", input, output, [](const std::vector<Part>& parts, int rank) {
      const auto row = static_cast<size_t>(parts[0].bytes) / parts.size();
      TORCH_INTERNAL_ASSERT(parts[0].dtype == at::kFloat);
      std::vector<char> result(row, 0);
      auto* const sum = reinterpret_cast<float*>(result.data());
      for (const Part& part : parts) {
        const auto* const values = reinterpret_cast<const float*>(part.input + rank * row);
        for (size_t i = 0; i < row / sizeof(float); ++i) sum[i] += values[i];
      }
      return result;
    });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    return start("allgather", input, output, [](const std::vector<Part>& parts, int) {
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
    return start(c10::str("allreduce ", static_cast<int>(op)), tensor, tensor,
                 [op](const std::vector<Part>& parts, int) { return all_reduced(parts, op); });
  }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options) override {
    at::Tensor& tensor = tensors.at(0);
    const auto root = options.rootRank;
    return start(c10::str("broadcast from ", root), tensor, tensor,
                 [root](const std::vector<Part>& parts, int) {
                   return std::vector<char>(parts[root].input,
                                            parts[root].input + parts[root].bytes);
                 });
  }

  void abort() override {
    const std::lock_guard<std::mutex> lock(channel_->mutex);
    channel_->stopped = true;
    channel_->changed.notify_all();
  }
  void shutdown() override {}

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

  WorkPtr start(const std::string& name, const at::Tensor& input, const at::Tensor& output,
                Compute compute) {
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
    const auto launch = [this, number = calls_++, part, call, compute = std::move(compute)] {
      connect(call);
      emulated::enqueue(stream_, [channel = channel_, rank = getRank(), number, part, call,
                                  compute] { run(*channel, rank, number, part, call, compute); });
    };
    WorkPtr work;
    if (section_) {
      check_section_thread();
      section_->launches.push_back(launch);
      section_->tensors.insert(section_->tensors.end(), {input, output});
      work = c10::make_intrusive<SectionPart>();
    } else {
      launch();
      work = c10::make_intrusive<EmulatedWork>(stream_, std::vector<at::Tensor>{input, output});
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

  // The first call of a kind and size holds the host until all ranks have come to it.
  void connect(const std::string& call) {
    std::unique_lock<std::mutex> lock(channel_->mutex);
    if (!connected_.insert(call).second) return;
    int& ranks = channel_->connecting[call];
    ++ranks;
    channel_->changed.notify_all();
    wait(*channel_, lock, "the first " + call, [&] { return ranks >= channel_->size; });
  }

  // Blocks until `ready`; false: the communicator has ended.
  static bool wait(EmulatedChannel& channel, std::unique_lock<std::mutex>& lock,
                   const std::string& call, const std::function<bool()>& ready) {
    const bool in_time = channel.changed.wait_for(lock, emulated::patience(),
                                                  [&] { return channel.stopped || ready(); });
    if (!in_time) {
      emulated::report("deadlock: " + call + " was not called by all ranks");
      channel.stopped = true;
      channel.changed.notify_all();
    }
    return !channel.stopped;
  }

  static void run(EmulatedChannel& channel, int rank, int64_t number, const Part& part,
                  const std::string& call, const Compute& compute) {
    std::unique_lock<std::mutex> lock(channel.mutex);
    if (channel.stopped) return;
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
    if (!wait(channel, lock, call, [&] { return round.arrived == channel.size; })) return;
    lock.unlock();
    const std::vector<char> result = compute(round.parts, rank);
    lock.lock();
    ++round.computed;
    channel.changed.notify_all();
    if (!wait(channel, lock, call, [&] { return round.computed == channel.size; })) return;
    if (!result.empty()) std::memcpy(part.output, result.data(), result.size());
    if (++round.left == channel.size) channel.rounds.erase(number);
  }

  const std::shared_ptr<EmulatedChannel> channel_;
  const int device_;
  const c10::Stream stream_;
  int64_t calls_ = 0;
  std::set<std::string> connected_;
  std::atomic<bool> busy_ = false;
  struct Section {
    std::thread::id thread;
    std::vector<std::function<void()>> launches;
    std::vector<at::Tensor> tensors;
  };
  std::optional<Section> section_;  // an open one
};

}  // namespace

EmulatedNetwork::EmulatedNetwork() : state_(std::make_shared<State>()) {}
EmulatedNetwork::~EmulatedNetwork() = default;

BackendFactory EmulatedNetwork::factory(int rank) {
  return [state = state_, device = rank, host = host_.factory(rank)](
             const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
             Purpose purpose, milliseconds timeout) -> NewBackend {
    if (purpose != Purpose::kData) return host(store, rank, world_size, purpose, timeout);
    if (rank == 0) {
      const std::lock_guard<std::mutex> lock(state->mutex);
      const int64_t number = state->next++;
      state->channels[number] = std::make_shared<EmulatedChannel>(world_size);
      store->set("channel", std::to_string(number));
    }
    store->wait({"channel"}, timeout);
    const std::vector<uint8_t> text = store->get("channel");
    const std::lock_guard<std::mutex> lock(state->mutex);
    const auto channel = state->channels.at(std::stoll(std::string(text.begin(), text.end())));
    return {c10::make_intrusive<EmulatedBackend>(channel, rank, device), RowTransport::kWhole};
  };
}

void EmulatedNetwork::stop() {
  host_.stop();
  const std::lock_guard<std::mutex> lock(state_->mutex);
  for (const auto& [number, channel] : state_->channels) {
    const std::lock_guard<std::mutex> channel_lock(channel->mutex);
    channel->stopped = true;
    channel->changed.notify_all();
  }
}

void run_device_ranks(int world_size, const std::function<void(const Group&)>& body,
                      const DeviceRunOptions& options) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(options.timeout);
  EmulatedNetwork network;
  MemoryNetwork host;
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
  EmulatedDevice::check_freed_memory();
  for (const std::string& violation : EmulatedDevice::take_violations()) {
    ADD_FAILURE() << violation;
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace zero
