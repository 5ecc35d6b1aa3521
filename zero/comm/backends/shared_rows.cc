// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/backends/shared_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "zero/comm/backends/shared_memory.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Peers = std::vector<std::shared_ptr<PeerMemory>>;  // by rank; null: not shared

// The answer to a message has its tag and this bit.
constexpr int kTakenTag = 1 << 30;
// In place of an offset: the row follows as a message.
constexpr int64_t kFollows = -1;
// A wait ends earlier: it is aborted, or its connection ends.
constexpr milliseconds kForever = std::chrono::hours(24 * 365);

class RowBackend;

at::Tensor bytes_of(const at::Tensor& row) { return row.view({-1}).view(at::kByte); }

// A row whose place the sender has sent to this rank, or will send.
struct Announced {
  int64_t bytes = 0;
  int from = 0;
  int tag = 0;
  at::Tensor place;   // [1] int64: where it is
  WorkPtr announced;  // of `place`
};

// A row to be copied here. The backend's mutex guards the last three.
struct Arrival {
  Announced row;
  at::Tensor into;
  bool taken = false;  // by the thread that copies it
  bool done = false;
  std::exception_ptr error;
};

class ArrivalWork : public c10d::Work {
 public:
  ArrivalWork(c10::intrusive_ptr<RowBackend> backend, std::shared_ptr<Arrival> arrival)
      : backend_(std::move(backend)), arrival_(std::move(arrival)) {}
  bool wait(milliseconds timeout) override;

 private:
  const c10::intrusive_ptr<RowBackend> backend_;
  const std::shared_ptr<Arrival> arrival_;
};

class RowInPlace : public SharedMemoryBackend::Row {
 public:
  RowInPlace(c10::intrusive_ptr<RowBackend> backend, Announced row)
      : backend_(std::move(backend)), row_(std::move(row)) {}
  bool wait(milliseconds timeout) override;
  const void* address() const override { return address_; }
  void release() noexcept override;

 private:
  const c10::intrusive_ptr<RowBackend> backend_;
  const Announced row_;
  at::Tensor followed_;
  const void* address_ = nullptr;
};

// A row on its way from here; it keeps alive what the receiver reads.
class DepartureWork : public c10d::Work {
 public:
  DepartureWork(std::vector<WorkPtr> steps, std::vector<at::Tensor> used)
      : steps_(std::move(steps)), used_(std::move(used)) {}
  bool wait(milliseconds timeout) override {
    return std::all_of(steps_.begin(), steps_.end(),
                       [&](const WorkPtr& step) { return step->wait(timeout); });
  }
  void abort() override {
    for (const WorkPtr& step : steps_) step->abort();
  }

 private:
  const std::vector<WorkPtr> steps_;
  const std::vector<at::Tensor> used_;
};

// Rows are copied by whoever waits for them, or else by a thread, so that a sender never depends on
// when its peers wait: they may have other things to do first.
class RowBackend : public SharedMemoryBackend {
 public:
  RowBackend(BackendPtr under, std::shared_ptr<SharedMemory> memory, Peers peers,
             milliseconds timeout, int64_t least_bytes)
      : SharedMemoryBackend(under->getRank(), under->getSize()),
        under_(std::move(under)),
        memory_(std::move(memory)),
        peers_(std::move(peers)),
        timeout_(timeout),
        least_bytes_(least_bytes),
        copier_([this] { copy_arrivals(); }) {}

  ~RowBackend() override {
    stop();
    try {
      under_->abort();  // for transports whose waits end only with it
    } catch (...) {
    }
    copier_.join();
  }

  const std::string getBackendName() const override { return under_->getBackendName(); }
  void setTimeout(milliseconds timeout) override { under_->setTimeout(timeout); }
  void shutdown() override { under_->shutdown(); }
  void abort() override {
    stop();
    under_->abort();
  }

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    const auto bytes = size * static_cast<int64_t>(options.dtype().itemsize());
    const at::Tensor shared = memory_->allocate(bytes);
    if (!shared.defined()) return at::zeros({size}, options);
    return shared.view(c10::typeMetaToScalarType(options.dtype()));
  }

  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;

  bool reads(int peer, int64_t bytes) const override {
    return peers_[peer] && bytes >= least_bytes_;
  }
  c10::intrusive_ptr<Row> receive_in_place(int64_t bytes, int from, int tag) override;

  // Returns the row's address once the sender has sent it: there, or in `followed`, made if need
  // be. Throws when it cannot come, or not in time.
  const void* find(const Announced& row, at::Tensor& followed, milliseconds timeout);
  void tell_taken(const Announced& row, milliseconds timeout) noexcept;
  // Returns when the row has been copied.
  bool finish(const std::shared_ptr<Arrival>& arrival, milliseconds timeout);

 private:
  WorkPtr send_under(const at::Tensor& tensor, int to, int tag) {
    std::vector<at::Tensor> one{tensor};
    const std::lock_guard<std::mutex> lock(under_mutex_);
    return under_->send(one, to, tag);
  }
  WorkPtr receive_under(const at::Tensor& tensor, int from, int tag) {
    std::vector<at::Tensor> one{tensor};
    const std::lock_guard<std::mutex> lock(under_mutex_);
    return under_->recv(one, from, tag);
  }
  // Throws when the work fails, and when it does not come in time or before stop().
  void await(const WorkPtr& work, milliseconds timeout);
  Announced announced(int64_t bytes, int from, int tag);
  void copy_arrivals();
  // Copies a row that this thread has taken.
  void copy(Arrival& arrival, milliseconds timeout);
  void stop();

  const BackendPtr under_;
  std::mutex under_mutex_;  // backends number their calls without locks
  const std::shared_ptr<SharedMemory> memory_;
  const Peers peers_;
  const milliseconds timeout_;
  const int64_t least_bytes_;
  const at::Tensor taken_ = at::zeros({1}, at::kByte);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Arrival>> waiting_;
  std::vector<c10d::Work*> awaited_;  // by any thread, to be aborted
  bool stop_ = false;
  std::thread copier_;
};

WorkPtr RowBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  const at::Tensor& row = tensors.at(0);
  if (!reads(to, static_cast<int64_t>(row.nbytes()))) return send_under(row, to, tag);
  at::Tensor carrier = row;
  if (!memory_->offset_of(row)) {
    carrier = memory_->allocate(static_cast<int64_t>(row.nbytes()));
    if (carrier.defined()) carrier.copy_(bytes_of(row));
  }
  const at::Tensor place =
      at::full({1}, carrier.defined() ? *memory_->offset_of(carrier) : kFollows, at::kLong);
  const at::Tensor answer = at::empty({1}, at::kByte);
  // The receive of the answer is posted first, so that the answer never waits for it.
  std::vector<WorkPtr> steps{receive_under(answer, to, tag | kTakenTag),
                             send_under(place, to, tag)};
  if (!carrier.defined()) steps.push_back(send_under(bytes_of(row), to, tag));
  std::reverse(steps.begin(), steps.end());
  return c10::make_intrusive<DepartureWork>(std::move(steps),
                                            std::vector<at::Tensor>{row, carrier, place, answer});
}

WorkPtr RowBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  const auto bytes = static_cast<int64_t>(tensors.at(0).nbytes());
  if (!reads(from, bytes)) return receive_under(tensors[0], from, tag);
  auto arrival = std::make_shared<Arrival>();
  arrival->row = announced(bytes, from, tag);
  arrival->into = tensors[0];
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(arrival);
  }
  changed_.notify_all();
  return c10::make_intrusive<ArrivalWork>(c10::intrusive_ptr<RowBackend>::reclaim_copy(this),
                                          std::move(arrival));
}

void RowBackend::await(const WorkPtr& work, milliseconds timeout) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!stop_, "aborted");
    awaited_.push_back(work.get());
  }
  std::exception_ptr error;
  bool came = false;
  try {
    came = work->wait(timeout);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    awaited_.erase(std::find(awaited_.begin(), awaited_.end(), work.get()));
  }
  if (error) std::rethrow_exception(error);
  TORCH_CHECK(came, "aborted");
}

Announced RowBackend::announced(int64_t bytes, int from, int tag) {
  const at::Tensor place = at::empty({1}, at::kLong);
  return {bytes, from, tag, place, receive_under(place, from, tag)};
}

const void* RowBackend::find(const Announced& row, at::Tensor& followed, milliseconds timeout) {
  await(row.announced, timeout);
  const int64_t offset = *row.place.const_data_ptr<int64_t>();
  if (offset != kFollows) return peers_[row.from]->at(offset, row.bytes);
  if (!followed.defined()) followed = at::empty({row.bytes}, at::kByte);
  await(receive_under(followed, row.from, row.tag), timeout);
  return followed.const_data_ptr();
}

void RowBackend::tell_taken(const Announced& row, milliseconds timeout) noexcept {
  try {
    await(send_under(taken_, row.from, row.tag | kTakenTag), std::min(timeout, timeout_));
  } catch (...) {  // The row is here. That the sender is gone concerns the next operation.
  }
}

c10::intrusive_ptr<SharedMemoryBackend::Row> RowBackend::receive_in_place(int64_t bytes, int from,
                                                                          int tag) {
  return c10::make_intrusive<RowInPlace>(c10::intrusive_ptr<RowBackend>::reclaim_copy(this),
                                         announced(bytes, from, tag));
}

void RowBackend::copy(Arrival& arrival, milliseconds timeout) {
  at::Tensor followed = bytes_of(arrival.into);
  const void* row = find(arrival.row, followed, timeout);
  if (row != arrival.into.const_data_ptr()) {
    std::memcpy(arrival.into.mutable_data_ptr(), row, arrival.row.bytes);
  }
  tell_taken(arrival.row, timeout);
}

void RowBackend::copy_arrivals() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
    if (stop_) return;
    const std::shared_ptr<Arrival> arrival = std::move(waiting_.front());
    waiting_.pop_front();
    arrival->taken = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      copy(*arrival, kForever);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    arrival->error = error;
    arrival->done = true;
    changed_.notify_all();
  }
}

bool RowBackend::finish(const std::shared_ptr<Arrival>& arrival, milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!arrival->taken) {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), arrival));
    arrival->taken = true;
    lock.unlock();
    copy(*arrival, timeout);
    lock.lock();
    arrival->done = true;
    return true;
  }
  const bool done = changed_.wait_for(lock, timeout, [&] { return arrival->done || stop_; });
  if (arrival->error) std::rethrow_exception(arrival->error);
  TORCH_CHECK(done && arrival->done, "shared memory: rank ", arrival->row.from, " sent nothing in ",
              timeout.count(), " ms");
  return true;
}

void RowBackend::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    for (c10d::Work* work : awaited_) {
      try {
        work->abort();
      } catch (...) {  // Not every transport can. Then its own abort() ends the wait.
      }
    }
  }
  changed_.notify_all();
}

bool ArrivalWork::wait(milliseconds timeout) { return backend_->finish(arrival_, timeout); }

void RowInPlace::release() noexcept { backend_->tell_taken(row_, kForever); }

bool RowInPlace::wait(milliseconds timeout) {
  address_ = backend_->find(row_, followed_, timeout);
  return true;
}

// Every rank's `own`, as rows.
at::Tensor all_gather(c10d::Backend& ranks, const at::Tensor& own, milliseconds timeout) {
  const int world = ranks.getSize();
  at::Tensor all = at::empty({world, own.numel()}, own.options());
  all.select(0, ranks.getRank()).copy_(own);
  std::vector<WorkPtr> works;
  for (int k = 1; k < world; ++k) {
    const int peer = (ranks.getRank() + k) % world;
    std::vector<at::Tensor> sent{own};
    std::vector<at::Tensor> received{all.select(0, peer)};
    works.push_back(ranks.send(sent, peer, 0));
    works.push_back(ranks.recv(received, peer, 0));
  }
  for (const WorkPtr& work : works) TORCH_CHECK(work->wait(timeout), "aborted");
  return all;
}

}  // namespace

BackendPtr share_memory(const BackendPtr& under, milliseconds timeout, bool willing,
                        int64_t least_bytes) {
  const int rank = under->getRank();
  const int world = under->getSize();
  const std::shared_ptr<SharedMemory> memory = willing ? SharedMemory::instance() : nullptr;
  const SharedMemoryAddress own = memory ? memory->address() : SharedMemoryAddress();
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(own))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &own, sizeof(own));
  const at::Tensor addresses = all_gather(*under, bytes, timeout);

  Peers peers(static_cast<size_t>(world));
  at::Tensor sees = at::zeros({world}, at::kByte);
  for (int peer = 0; peer < world; ++peer) {
    if (peer == rank || !memory) continue;
    SharedMemoryAddress address;
    std::memcpy(&address, addresses[peer].const_data_ptr(), sizeof(address));
    peers[peer] = PeerMemory::open(address);
    sees[peer].fill_(peers[peer] ? 1 : 0);
  }
  // One may see the other and not be seen, as with different users.
  const at::Tensor all_see = all_gather(*under, sees, timeout);
  bool any = false;
  for (int peer = 0; peer < world; ++peer) {
    if (all_see[peer][rank].item<uint8_t>() == 0) peers[peer].reset();
    any = any || peers[peer];
  }
  if (!any) return under;
  return c10::make_intrusive<RowBackend>(under, memory, std::move(peers), timeout, least_bytes);
}

}  // namespace zero
