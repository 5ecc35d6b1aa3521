// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/backends/shared_rows.h"

#include <ATen/ops/empty.h>
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

#include "zero/base/own_thread_wait.h"
#include "zero/base/threads.h"
#include "zero/comm/backends/row_notices.h"
#include "zero/comm/backends/shared_memory.h"
#include "zero/comm/backends/shared_peers.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// In place of an offset: the row follows as a message.
constexpr int64_t kFollows = -1;
// A wait ends earlier: it is aborted, or its connection ends.
constexpr milliseconds kForever = std::chrono::hours(24 * 365);
constexpr std::chrono::seconds kWakeUpSlack{1};  // A lost wake-up costs so much.

class RowBackend;

milliseconds left_until(std::chrono::steady_clock::time_point deadline) {
  const auto left = deadline - std::chrono::steady_clock::now();
  return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(left));
}

at::Tensor bytes_of(const at::Tensor& row) { return row.view({-1}).view(at::kByte); }

// A row that the sender has announced to this rank, or will announce.
struct Expected {
  int64_t bytes = 0;
  int from = 0;
  int tag = 0;
};

// The wait for a row that follows. The backend's mutex guards both.
struct Following {
  c10d::Work* work = nullptr;  // while it is waited for
  bool aborted = false;
};

// A row to be copied here. The backend's mutex guards the last four.
struct Arrival {
  Expected row;
  at::Tensor into;
  Following following;
  bool taken = false;  // by the thread that copies it
  bool done = false;
  std::exception_ptr error;
};

class ArrivalWork : public c10d::Work {
 public:
  ArrivalWork(c10::intrusive_ptr<RowBackend> backend, std::shared_ptr<Arrival> arrival)
      : backend_(std::move(backend)), arrival_(std::move(arrival)) {}
  bool wait(milliseconds timeout) override;
  void abort() override;

 private:
  const c10::intrusive_ptr<RowBackend> backend_;
  const std::shared_ptr<Arrival> arrival_;
};

class RowInPlace : public SharedMemoryBackend::Row {
 public:
  RowInPlace(c10::intrusive_ptr<RowBackend> backend, Expected row)
      : backend_(std::move(backend)), row_(row) {}
  bool wait(milliseconds timeout) override;
  void abort() override;
  const void* address() const override { return address_; }
  void release() override;

 private:
  const c10::intrusive_ptr<RowBackend> backend_;
  const Expected row_;
  uint64_t number_ = 0;
  Following following_;
  at::Tensor followed_;
  const void* address_ = nullptr;
};

// A row on its way from here; it keeps alive what the receiver reads.
class DepartureWork : public c10d::Work {
 public:
  //   follows  the work that sends it, if the peer cannot read it
  DepartureWork(c10::intrusive_ptr<RowBackend> backend, int to, uint64_t number, WorkPtr follows,
                std::vector<at::Tensor> used)
      : backend_(std::move(backend)),
        to_(to),
        number_(number),
        follows_(std::move(follows)),
        used_(std::move(used)) {}
  bool wait(milliseconds timeout) override;
  void abort() override {
    if (follows_) follows_->abort();
  }

 private:
  const c10::intrusive_ptr<RowBackend> backend_;
  const int to_;
  const uint64_t number_;
  const WorkPtr follows_;
  const std::vector<at::Tensor> used_;
};

// Rows are copied by whoever waits for them, or else by a thread, so that a sender never depends on
// when its peers wait: they may have other things to do first.
class RowBackend : public SharedMemoryBackend {
 public:
  RowBackend(BackendPtr under, std::shared_ptr<SharedMemory> memory,
             std::unique_ptr<SharedPeers> peers, int64_t least_bytes)
      : SharedMemoryBackend(under->getRank(), under->getSize()),
        under_(std::move(under)),
        memory_(std::move(memory)),
        peers_(std::move(peers)),
        least_bytes_(least_bytes),
        copier_(start_thread([this] { copy_arrivals(); }, "copies")) {}

  ~RowBackend() override {
    stop();
    try {
      under_->abort();  // for transports whose waits end only with it
    } catch (...) {
    }
    join_own_thread(copier_, "its thread that copies rows");
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
    return peers_->shares(peer) && bytes >= least_bytes_;
  }
  c10::intrusive_ptr<Row> receive_in_place(int64_t bytes, int from, int tag) override;

  // Returns the row's address once the sender has announced it: there, or in `followed`, made if
  // need be. Throws when it cannot come, or not in time.
  const void* find(const Expected& row, uint64_t& number, at::Tensor& followed,
                   Following& following, milliseconds timeout);
  // Ends the wait of find() for a message; that for a notice ends by itself with the connection.
  void abort(Following& following);
  SharedPeers& peers() { return *peers_; }
  // Returns when the row has been copied.
  bool finish(const std::shared_ptr<Arrival>& arrival, milliseconds timeout);

 private:
  WorkPtr send_under(const at::Tensor& tensor, int to, int tag) {
    std::vector<at::Tensor> one{tensor};
    const std::lock_guard<std::mutex> lock(peers_->calls());
    return under_->send(one, to, tag);
  }
  WorkPtr receive_under(const at::Tensor& tensor, int from, int tag) {
    std::vector<at::Tensor> one{tensor};
    const std::lock_guard<std::mutex> lock(peers_->calls());
    return under_->recv(one, from, tag);
  }
  // Throws when the work fails, and when it does not come in time or before stop() or abort().
  void await(const WorkPtr& work, Following& following, milliseconds timeout);
  static void end(c10d::Work& work) noexcept;
  void copy_arrivals();
  // Copies a row that this thread has taken.
  void copy(Arrival& arrival, milliseconds timeout);
  void stop();

  const BackendPtr under_;
  const std::shared_ptr<SharedMemory> memory_;
  const std::unique_ptr<SharedPeers> peers_;
  const int64_t least_bytes_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Arrival>> waiting_;
  std::vector<c10d::Work*> awaited_;  // by any thread, to be aborted
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
  WorkPtr follows;
  if (!carrier.defined()) follows = send_under(bytes_of(row), to, tag);
  const int64_t offset = carrier.defined() ? *memory_->offset_of(carrier) : kFollows;
  const uint64_t number = peers_->announce(to, tag, offset, static_cast<int64_t>(row.nbytes()));
  return c10::make_intrusive<DepartureWork>(c10::intrusive_ptr<RowBackend>::reclaim_copy(this), to,
                                            number, std::move(follows),
                                            std::vector<at::Tensor>{row, carrier});
}

WorkPtr RowBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  const auto bytes = static_cast<int64_t>(tensors.at(0).nbytes());
  if (!reads(from, bytes)) return receive_under(tensors[0], from, tag);
  auto arrival = std::make_shared<Arrival>();
  arrival->row = {bytes, from, tag};
  arrival->into = tensors[0];
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(arrival);
  }
  changed_.notify_all();
  return c10::make_intrusive<ArrivalWork>(c10::intrusive_ptr<RowBackend>::reclaim_copy(this),
                                          std::move(arrival));
}

void RowBackend::await(const WorkPtr& work, Following& following, milliseconds timeout) {
  // 1. Be seen by stop() and abort(), which abort what is awaited.
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!peers_->is_stopped() && !following.aborted, "aborted");
    awaited_.push_back(work.get());
    following.work = work.get();
  }
  // 2. Wait without the lock.
  std::exception_ptr error;
  bool came = false;
  try {
    came = work->wait(timeout);
  } catch (...) {
    error = std::current_exception();
  }
  // 3. `work` may end with the caller from here on.
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    awaited_.erase(std::find(awaited_.begin(), awaited_.end(), work.get()));
    following.work = nullptr;
  }
  if (error) std::rethrow_exception(error);
  TORCH_CHECK(came, "aborted");
}

// A row of rank s for rank r, from send() on s to where r reads it. Each rank has one shared
// memory, which the others have mapped (shared_memory.h), and one page of notices for each peer
// there (row_notices.h).
//
//   s: send()       1. If the row is not in its shared memory, s copies it there.
//                   2. s announces (tag, offset, bytes) in its page for r. Rows are numbered in the
//                      order of their announcements.
//   r: find()       3. r waits until s has announced a row with this tag: by a futex on the counter
//                      of s. Every 100 ms it asks whether the connection to s has ended.
//                   4. The address is s's mapping plus the offset.
//   r: copy(), or   5. r copies the row, or reads it in place,
//      release()    6. and marks its number as taken in its page for s.
//   s: wait()       7. s waits for that mark, and may then write to the row again.
//
// Where s's memory has no room in step 1, s announces the row without an offset (kFollows) and
// sends it as a message of the transport underneath; r then receives that message here, into
// `followed`. A receive of the transport that is posted early would be matched with the wrong send:
// only the notice says which of the two ways a row takes.
//
// Who may be in steps 3 to 6: the thread that waits for the operation, or, for rows to be copied,
// the copier if it was first. Arrival::taken says which of the two.
const void* RowBackend::find(const Expected& row, uint64_t& number, at::Tensor& followed,
                             Following& following, milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const RowNotices::Row announced = peers_->await_row(row.from, row.tag, row.bytes, timeout);
  number = announced.number;
  if (announced.offset != kFollows) return peers_->at(row.from, announced);
  if (!followed.defined()) followed = at::empty({announced.bytes}, at::kByte);
  await(receive_under(followed, row.from, row.tag), following, left_until(deadline));
  return followed.const_data_ptr();
}

c10::intrusive_ptr<SharedMemoryBackend::Row> RowBackend::receive_in_place(int64_t bytes, int from,
                                                                          int tag) {
  return c10::make_intrusive<RowInPlace>(c10::intrusive_ptr<RowBackend>::reclaim_copy(this),
                                         Expected{bytes, from, tag});
}

void RowBackend::copy(Arrival& arrival, milliseconds timeout) {
  at::Tensor followed = bytes_of(arrival.into);
  uint64_t number = 0;
  const void* row = find(arrival.row, number, followed, arrival.following, timeout);
  if (row != arrival.into.const_data_ptr()) {
    std::memcpy(arrival.into.mutable_data_ptr(), row, arrival.row.bytes);
  }
  peers_->take(arrival.row.from, number);
}

void RowBackend::copy_arrivals() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const auto called = [this] { return peers_->is_stopped() || !waiting_.empty(); };
    while (!changed_.wait_for(lock, kWakeUpSlack, called)) {
    }
    if (peers_->is_stopped()) return;
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
  const bool done =
      changed_.wait_for(lock, timeout, [&] { return arrival->done || peers_->is_stopped(); });
  if (arrival->error) std::rethrow_exception(arrival->error);
  TORCH_CHECK(arrival->done || !peers_->is_stopped(), "aborted");
  TORCH_CHECK(done, "shared memory: the peer sent nothing in ", timeout.count(), " ms");
  return true;
}

void RowBackend::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    peers_->stop();
    for (c10d::Work* work : awaited_) end(*work);
  }
  changed_.notify_all();
}

void RowBackend::end(c10d::Work& work) noexcept {
  try {
    work.abort();
  } catch (...) {  // Not every transport can. Then its own abort() ends the wait.
  }
}

void RowBackend::abort(Following& following) {
  const std::lock_guard<std::mutex> lock(mutex_);
  following.aborted = true;
  if (following.work != nullptr) end(*following.work);
}

bool ArrivalWork::wait(milliseconds timeout) { return backend_->finish(arrival_, timeout); }

void ArrivalWork::abort() { backend_->abort(arrival_->following); }

void RowInPlace::release() { backend_->peers().take(row_.from, number_); }

bool RowInPlace::wait(milliseconds timeout) {
  address_ = backend_->find(row_, number_, followed_, following_, timeout);
  return true;
}

void RowInPlace::abort() { backend_->abort(following_); }

bool DepartureWork::wait(milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  if (follows_ && !follows_->wait(timeout)) return false;
  backend_->peers().await_taken(to_, number_, left_until(deadline));
  return true;
}

}  // namespace

BackendPtr share_memory(const BackendPtr& under, milliseconds timeout, bool willing,
                        int64_t least_bytes) {
  const std::shared_ptr<SharedMemory> memory = willing ? SharedMemory::instance() : nullptr;
  std::unique_ptr<SharedPeers> peers = SharedPeers::find(under, memory, timeout);
  if (!peers) return under;
  return c10::make_intrusive<RowBackend>(under, memory, std::move(peers), least_bytes);
}

}  // namespace zero
