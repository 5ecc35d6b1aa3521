// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "tests/support/in_memory_backend.h"

#include <ATen/ops/maximum.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A copy of what a rank handed over, and when it may be seen.
struct Parcel {
  at::Tensor data;
  Clock::time_point arrives;
};

// One collective of one communicator: what each rank brought to it.
struct Round {
  std::string call;  // Must be equal on all ranks.
  std::vector<std::optional<Parcel>> parts;
  int readers = 0;
};

// The ranks of one communicator.
struct Channel {
  std::vector<int> global_ranks;                                 // -1 until the rank has joined.
  std::set<int> gone;                                            // Hung up or destroyed their side.
  std::map<std::tuple<int, int, int>, std::deque<Parcel>> mail;  // (from, to, tag)
  std::map<int64_t, Round> rounds;
};

// What an operation waits with: run until its result is there, the time is up, or it cannot come.
class MemoryWork : public c10d::Work {
 public:
  using Complete = std::function<void(Clock::time_point deadline)>;
  using Check = std::function<void()>;
  // `check` throws when the result cannot come; without it the work cannot be aborted.
  MemoryWork(Complete complete, milliseconds timeout, Check check = nullptr)
      : complete_(std::move(complete)), timeout_(timeout), check_(std::move(check)) {}

  void abort() override {
    TORCH_CHECK(check_, "zero-memory: cannot be aborted");
    aborted_ = true;
  }
  // After abort() only a later wait ends at once.
  bool wait(milliseconds timeout) override {
    if (aborted_) {
      check_();
      return false;
    }
    const Complete complete = std::exchange(complete_, nullptr);
    if (complete) complete(Clock::now() + (timeout == kNoTimeout ? timeout_ : timeout));
    finish();
    return true;
  }

 private:
  Complete complete_;
  const milliseconds timeout_;
  const Check check_;
  std::atomic<bool> aborted_{false};
};

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

}  // namespace

struct MemoryNetwork::State {
  explicit State(RowTransport rows_in) : rows(rows_in), sections(rows_in == RowTransport::kWhole) {}
  const RowTransport rows;

  mutable std::mutex mutex;  // Guards everything below, and the channels.
  std::condition_variable changed;
  std::map<std::string, std::shared_ptr<Channel>> channels;
  int64_t next_channel = 0;
  std::map<int, Counts> counts;
  std::map<std::pair<int, MemoryOp>, milliseconds> delays;
  struct Link {
    double bytes_per_second = 0;  // 0: no limit.
    Clock::time_point free;       // When what was handed over before has left.
  };
  std::map<int, Link> comms;
  std::map<int, int> holds;  // Sends left to arrive.
  std::map<std::pair<int, MemoryOp>, int> drops;
  std::map<std::pair<int, MemoryOp>, int> deaths;  // Calls left to live.
  std::set<int> dead;
  bool sections;
  int open_sections = 0;
  bool stopped = false;
};

// One rank's end of a Channel.
class MemoryBackend : public c10d::Backend {
 public:
  using State = MemoryNetwork::State;

  MemoryBackend(std::shared_ptr<State> state, std::shared_ptr<Channel> channel, int rank, int size,
                int global_rank, milliseconds timeout)
      : Backend(rank, size),
        state_(std::move(state)),
        channel_(std::move(channel)),
        global_rank_(global_rank),
        timeout_(timeout) {}

  ~MemoryBackend() override { leave(); }

  const std::string getBackendName() const override { return "zero-memory"; }
  void setTimeout(milliseconds timeout) override { timeout_ = timeout; }
  void abort() override { leave(); }

  bool supportsCoalescing() const override {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->sections;
  }

  void startCoalescing() override {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    TORCH_CHECK(!section_, "zero-memory: a section is open");
    section_.emplace();
    ++state_->open_sections;
  }

  WorkPtr endCoalescing() override {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    TORCH_CHECK(section_, "zero-memory: no section is open");
    --state_->open_sections;
    const auto section = *std::exchange(section_, std::nullopt);
    hand_over(MemoryOp::kSection, {}, 0);
    return work([section](Clock::time_point deadline) {
      for (const auto& complete : section) complete(deadline);
    });
  }

  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    const at::Tensor copy = tensors.at(0).detach().clone();
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (auto parcel = hand_over(MemoryOp::kSend, copy, bytes_of(copy))) {
      channel_->mail[{getRank(), to, tag}].push_back(std::move(*parcel));
    }
    state_->changed.notify_all();
    return work([](Clock::time_point) {});
  }

  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    hand_over(MemoryOp::kReceive, {}, 0);
    return c10::make_intrusive<MemoryWork>(
        [self = self(), into = tensors.at(0), from, tag](Clock::time_point deadline) {
          self->receive(into, from, tag, deadline);
        },
        timeout_, [self = self(), from] { self->check_reaches(from); });
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override {
    const at::Tensor values = tensors.at(0);
    const c10d::ReduceOp::RedOpType op = options.reduceOp;
    const bool sum = op == c10d::ReduceOp::SUM;
    const bool either = op == c10d::ReduceOp::BOR;
    TORCH_CHECK(sum || either || op == c10d::ReduceOp::MAX, "zero-memory: SUM, BOR and MAX only");
    return collective(MemoryOp::kAllReduce,
                      sum      ? "sum"
                      : either ? "or"
                               : "max",
                      values, 2 * (getSize() - 1) * bytes_of(values) / getSize(),
                      [values, sum, either](const auto& parts) {
                        values.copy_(parts[0]);
                        for (size_t r = 1; r < parts.size(); ++r) {
                          if (sum) {
                            values.add_(parts[r]);
                          } else if (either) {
                            values.bitwise_or_(parts[r]);
                          } else {
                            values.copy_(at::maximum(values, parts[r]));
                          }
                        }
                      });
  }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options) override {
    const at::Tensor tensor = tensors.at(0);
    const auto source = static_cast<size_t>(options.rootRank);
    const bool own = options.rootRank == getRank();
    return collective(MemoryOp::kBroadcast, c10::str("from ", source), tensor,
                      own ? (getSize() - 1) * bytes_of(tensor) : 0,
                      [tensor, source](const auto& parts) { tensor.copy_(parts[source]); });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    const at::Tensor rows = output.view({getSize(), -1});
    return collective(MemoryOp::kAllGather, "", input, (getSize() - 1) * bytes_of(input),
                      [rows](const auto& parts) {
                        for (size_t r = 0; r < parts.size(); ++r) {
                          rows.select(0, static_cast<int64_t>(r)).copy_(parts[r].flatten());
                        }
                      });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    TORCH_CHECK(output_splits.empty() == input_splits.empty(), "zero-memory: splits of one side");
    if (!input_splits.empty()) return alltoall_of(output, input, output_splits, input_splits);
    const at::Tensor rows = output.view({getSize(), -1});
    return collective(MemoryOp::kAllToAll, "", input, (getSize() - 1) * bytes_of(input) / getSize(),
                      [rows, rank = getRank(), size = getSize()](const auto& parts) {
                        for (int64_t r = 0; r < size; ++r) {
                          const at::Tensor theirs = parts[static_cast<size_t>(r)].view({size, -1});
                          rows.select(0, r).copy_(theirs.select(0, rank));
                        }
                      });
  }

  // All ranks must give the same input_splits.
  WorkPtr alltoall_of(const at::Tensor& output, const at::Tensor& input,
                      const std::vector<int64_t>& output_splits,
                      const std::vector<int64_t>& input_splits) {
    c10d::checkSplitSizes(input_splits, input, getSize());
    c10d::checkSplitSizes(output_splits, output, getSize());
    const auto begin =
        std::accumulate(input_splits.begin(), input_splits.begin() + getRank(), int64_t{0});
    const int64_t own = input_splits[getRank()];
    return collective(
        MemoryOp::kAllToAll, c10::str("of ", input_splits), input,
        bytes_of(input) - own * static_cast<int64_t>(input.element_size()),
        [output, output_splits, begin, own](const auto& parts) {
          int64_t at = 0;
          for (size_t r = 0; r < parts.size(); ++r) {
            output.narrow(0, at, output_splits[r]).copy_(parts[r].narrow(0, begin, own));
            at += output_splits[r];
          }
        });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "zero-memory: SUM only");
    const at::Tensor row = output;
    return collective(MemoryOp::kReduceScatter, "", input,
                      (getSize() - 1) * bytes_of(input) / getSize(),
                      [row, rank = getRank(), size = getSize()](const auto& parts) {
                        row.zero_();
                        for (const at::Tensor& part : parts) {
                          row.add_(part.view({size, -1}).select(0, rank).view_as(row));
                        }
                      });
  }

 private:
  using Parts = std::vector<at::Tensor>;
  using Self = c10::intrusive_ptr<MemoryBackend>;

  Self self() { return Self::unsafe_reclaim_from_nonowning(this); }

  WorkPtr work(MemoryWork::Complete complete) {
    return c10::make_intrusive<MemoryWork>(std::move(complete), timeout_);
  }

  void leave() {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    channel_->gone.insert(getRank());
    state_->changed.notify_all();
  }

  void check_alive() const {
    TORCH_CHECK(!state_->stopped, "zero-memory: the run has been stopped");
    TORCH_CHECK(state_->dead.count(global_rank_) == 0, "zero-memory: rank ", global_rank_,
                " is dead");
    TORCH_CHECK(channel_->gone.count(getRank()) == 0, "zero-memory: this rank has hung up");
  }

  // Counts a call and applies the faults asked for. Empty when the data is to be lost.
  std::optional<Parcel> hand_over(MemoryOp op, at::Tensor data, int64_t bytes) {
    const std::pair<int, MemoryOp> key{global_rank_, op};
    const auto death = state_->deaths.find(key);
    if (death != state_->deaths.end() && --death->second <= 0) {
      state_->dead.insert(global_rank_);
      state_->changed.notify_all();
    }
    check_alive();
    MemoryNetwork::Counts& counts = state_->counts[global_rank_];
    counts.calls[static_cast<size_t>(op)] += 1;
    counts.bytes_sent[static_cast<size_t>(op)] += bytes;
    const auto drop = state_->drops.find(key);
    if (drop != state_->drops.end() && drop->second > 0) {
      --drop->second;
      return std::nullopt;
    }
    const auto hold = state_->holds.find(global_rank_);
    if (op == MemoryOp::kSend && hold != state_->holds.end() && --hold->second < 0) {
      return Parcel{std::move(data), Clock::time_point::max()};
    }
    const auto delay = state_->delays.find(key);
    return Parcel{std::move(data), leaves(bytes) + (delay == state_->delays.end() ? milliseconds(0)
                                                                                  : delay->second)};
  }

  // When the last of `bytes` is on its way.
  Clock::time_point leaves(int64_t bytes) {
    State::Link& link = state_->comms[global_rank_];
    const Clock::time_point now = Clock::now();
    if (link.bytes_per_second <= 0) return now;
    const std::chrono::duration<double> takes(static_cast<double>(bytes) / link.bytes_per_second);
    link.free = std::max(link.free, now) + std::chrono::duration_cast<Clock::duration>(takes);
    return link.free;
  }

  void check_reaches(int rank) {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    check_alive();
    TORCH_CHECK(!unreachable(rank), "zero-memory: rank ", rank, " closed the connection");
  }

  bool unreachable(int rank) const {
    const int global = channel_->global_ranks[static_cast<size_t>(rank)];
    return channel_->gone.count(rank) > 0 || (global >= 0 && state_->dead.count(global) > 0);
  }

  // Waits until find() yields a parcel of rank `from` that has arrived.
  template <typename Find>
  void await(std::unique_lock<std::mutex>& lock, int from, Clock::time_point deadline, Find find) {
    while (true) {
      check_alive();
      const Parcel* parcel = find();
      const Clock::time_point now = Clock::now();
      if (parcel != nullptr && parcel->arrives <= now) return;
      TORCH_CHECK(parcel != nullptr || !unreachable(from), "zero-memory: rank ", from,
                  " closed the connection");
      TORCH_CHECK(now < deadline, "zero-memory: timed out waiting for rank ", from);
      state_->changed.wait_until(
          lock, parcel == nullptr ? deadline : std::min(deadline, parcel->arrives));
    }
  }

  void receive(const at::Tensor& into, int from, int tag, Clock::time_point deadline) {
    at::Tensor data;
    {
      std::unique_lock<std::mutex> lock(state_->mutex);
      auto& letters = channel_->mail[{from, getRank(), tag}];
      await(lock, from, deadline, [&] { return letters.empty() ? nullptr : &letters.front(); });
      data = letters.front().data;
      letters.pop_front();
      if (letters.empty()) channel_->mail.erase({from, getRank(), tag});
    }
    // As Gloo, which takes a shorter message.
    TORCH_CHECK(data.numel() <= into.numel() && data.dtype() == into.dtype(),
                "zero-memory: expected at most ", into.numel(), " ", into.dtype(), " from rank ",
                from, ", got ", data.numel(), " ", data.dtype());
    into.view({-1}).narrow(0, 0, data.numel()).copy_(data.view({-1}));
  }

  // Every rank brings a copy of `input`; use(parts) makes this rank's result of all of them.
  WorkPtr collective(MemoryOp op, const std::string& detail, const at::Tensor& input, int64_t bytes,
                     std::function<void(const Parts&)> use) {
    const at::Tensor copy = input.detach().clone();
    const std::string call = c10::str("operation ", static_cast<int>(op), " ", detail, " of ",
                                      input.numel(), " ", input.dtype());
    const std::lock_guard<std::mutex> lock(state_->mutex);
    const int64_t number = next_round_++;
    auto parcel = hand_over(op, copy, bytes);
    Round& round = channel_->rounds[number];
    if (round.parts.empty()) {
      round.call = call;
      round.parts.resize(static_cast<size_t>(getSize()));
    }
    TORCH_CHECK(round.call == call, "zero-memory: rank ", getRank(), " calls ", call,
                ", another rank ", round.call);
    round.parts[static_cast<size_t>(getRank())] = std::move(parcel);
    state_->changed.notify_all();
    MemoryWork::Complete complete = [self = self(), number,
                                     use = std::move(use)](Clock::time_point deadline) {
      use(self->collect(number, deadline));
    };
    if (!section_) return work(std::move(complete));
    section_->push_back(std::move(complete));
    return work([](Clock::time_point) {
      TORCH_CHECK(false, "zero-memory: a wait for one operation of a section");
    });
  }

  Parts collect(int64_t number, Clock::time_point deadline) {
    std::unique_lock<std::mutex> lock(state_->mutex);
    Round& round = channel_->rounds.at(number);
    Parts parts;
    for (int from = 0; from < getSize(); ++from) {
      const auto& part = round.parts[static_cast<size_t>(from)];
      await(lock, from, deadline, [&] { return part ? &*part : nullptr; });
      parts.push_back(part->data);
    }
    if (++round.readers == getSize()) channel_->rounds.erase(number);
    return parts;
  }

  const std::shared_ptr<State> state_;
  const std::shared_ptr<Channel> channel_;
  const int global_rank_;
  milliseconds timeout_;
  int64_t next_round_ = 0;
  std::optional<std::vector<MemoryWork::Complete>> section_;  // what was started in an open one
};

MemoryNetwork::MemoryNetwork(RowTransport rows) : state_(std::make_shared<State>(rows)) {}
MemoryNetwork::~MemoryNetwork() = default;

BackendFactory MemoryNetwork::factory(int rank) {
  return [state = state_, global_rank = rank](const c10::intrusive_ptr<c10d::Store>& store,
                                              int rank, int world_size, Purpose,
                                              milliseconds timeout) {
    std::string fresh;
    {
      const std::lock_guard<std::mutex> lock(state->mutex);
      fresh = std::to_string(state->next_channel++);
    }
    // Whoever comes first names the channel.
    const std::string id = store->compareSet("zero-memory", "", fresh);
    const std::lock_guard<std::mutex> lock(state->mutex);
    std::shared_ptr<Channel>& channel = state->channels[id];
    if (!channel) {
      channel = std::make_shared<Channel>();
      channel->global_ranks.assign(static_cast<size_t>(world_size), -1);
    }
    channel->global_ranks[static_cast<size_t>(rank)] = global_rank;
    return NewBackend(
        c10::make_intrusive<MemoryBackend>(state, channel, rank, world_size, global_rank, timeout),
        state->rows);
  };
}

MemoryNetwork::Counts MemoryNetwork::counts(int rank) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  const auto found = state_->counts.find(rank);
  return found == state_->counts.end() ? Counts{} : found->second;
}

int MemoryNetwork::open_sections() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->open_sections;
}

void MemoryNetwork::leave_out_sections() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->sections = false;
}

void MemoryNetwork::delay(int rank, MemoryOp op, milliseconds by) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->delays[{rank, op}] = by;
}

void MemoryNetwork::limit_rate(int rank, double bytes_per_second) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->comms[rank].bytes_per_second = bytes_per_second;
}

void MemoryNetwork::hold_after(int rank, int sends) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->holds[rank] = sends;
}

void MemoryNetwork::release(int rank) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->holds.erase(rank);
  for (auto& [name, channel] : state_->channels) {
    for (auto& [key, letters] : channel->mail) {
      const int from = channel->global_ranks[static_cast<size_t>(std::get<0>(key))];
      if (from != rank) continue;
      for (Parcel& parcel : letters) parcel.arrives = Clock::now();
    }
  }
  state_->changed.notify_all();
}

void MemoryNetwork::drop_next(int rank, MemoryOp op) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->drops[{rank, op}] += 1;
}

void MemoryNetwork::kill(int rank) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->dead.insert(rank);
  state_->changed.notify_all();
}

void MemoryNetwork::kill_at(int rank, MemoryOp op, int calls) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->deaths[{rank, op}] = calls;
}

void MemoryNetwork::stop() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_all();
}

namespace {

class SimulatedBackend : public c10d::Backend {
 public:
  SimulatedBackend(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "zero-simulated"; }

  WorkPtr allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return done();
  }
  WorkPtr broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override {
    return done();
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    if (input.scalar_type() == at::kByte || input.scalar_type() == at::kLong) {
      output.view({getSize(), -1}).copy_(input.clone().view({1, -1}));
    }
    return done();
  }
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override {
    return done();
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions&) override {
    output.copy_(input.view({getSize(), -1}).select(0, getRank()));
    return done();
  }

 private:
  static WorkPtr done() { return c10::make_intrusive<MemoryWork>(nullptr, milliseconds(1)); }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_simulated_backend(int rank, int world_size) {
  return c10::make_intrusive<SimulatedBackend>(rank, world_size);
}

}  // namespace zero
