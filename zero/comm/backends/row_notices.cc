// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/backends/row_notices.h"

#include <c10/util/Exception.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <ctime>
#include <list>
#include <random>
#include <utility>
#include <vector>

#include "zero/comm/backends/notice_page.h"

namespace zero {

namespace {

// The memory is mapped by both processes, and read-only by one of them.
template <typename T>
struct SharedWord {
  T value;
  T load(std::memory_order order) const {
    return std::atomic_ref<T>(const_cast<T&>(value)).load(order);
  }
  void store(T desired, std::memory_order order) {
    std::atomic_ref<T>(value).store(desired, order);
  }
  void add(T more, std::memory_order order) { std::atomic_ref<T>(value).fetch_add(more, order); }
};

struct Slot {
  int64_t tag;
  int64_t offset;
  int64_t bytes;
};

}  // namespace

struct RowNotices::Page : NoticePage<SharedWord, Slot, kSlots> {};

// What has been said to a peer that may still read it.
struct RowNotices::Left {
  at::Tensor memory;
  Peer peer;
  bool is_free() const { return peer.is_closed(); }
};

namespace {

// The futex is shared by processes that have mapped it at different addresses. Waiting and waking
// only read the word, so it may belong to the peer.
long futex(const SharedWord<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, &word.value, operation, value, limit, nullptr, 0);
}

void wake_all(const SharedWord<uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

void sleep_on(const SharedWord<uint32_t>& word, uint32_t seen, std::chrono::milliseconds limit) {
  timespec time{};
  time.tv_sec = limit.count() / 1000;
  time.tv_nsec = limit.count() % 1000 * 1000000;
  futex(word, FUTEX_WAIT, seen, &time);
}

bool can_sleep_on(const SharedWord<uint32_t>& word) {
  const timespec none{};
  return futex(word, FUTEX_WAIT, word.load(std::memory_order_relaxed) + 1, &none) == -1 &&
         errno == EAGAIN;
}

int64_t random_password() {
  std::random_device random;
  return (int64_t{random()} << 32) | random();
}

}  // namespace

bool RowNotices::Peer::is_closed() const {
  return page->closed.load(std::memory_order_acquire) != 0 ||
         page->password.load(std::memory_order_acquire) != password || !memory->is_there();
}

std::unique_ptr<RowNotices> RowNotices::make(const std::shared_ptr<SharedMemory>& memory) {
  at::Tensor page = memory->allocate(sizeof(Page));
  if (!page.defined()) return nullptr;
  const int64_t offset = *memory->offset_of(page);
  std::unique_ptr<RowNotices> notices(new RowNotices(std::move(page)));
  notices->offset_ = offset;
  return notices;
}

RowNotices::RowNotices(at::Tensor memory)
    : memory_(std::move(memory)),
      own_(static_cast<Page*>(memory_.mutable_data_ptr())),
      process_(getpid()) {
  own_->password.value = random_password();
}

RowNotices::~RowNotices() {
  close();
  if (peer_.page == nullptr) return;
  // Never destroyed: communicators may end with the process.
  static auto& mutex = *new std::mutex;
  static auto& left = *new std::list<Left>;
  const std::lock_guard<std::mutex> lock(mutex);
  left.push_back({std::move(memory_), std::move(peer_)});
  left.remove_if([](const Left& item) { return item.is_free(); });
}

RowNotices::Address RowNotices::address() const { return {offset_, own_->password.value}; }

bool RowNotices::connect(std::shared_ptr<PeerMemory> peer, Address theirs) {
  if (theirs.offset == 0) return false;
  const auto* page = static_cast<const Page*>(peer->at(theirs.offset, sizeof(Page)));
  if (!can_sleep_on(page->announced)) return false;
  peer_ = {std::move(peer), page, theirs.password};
  return true;
}

bool RowNotices::has_slot() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return announced_ < kSlots || is_taken(announced_ - kSlots);
}

uint64_t RowNotices::announce(int tag, int64_t offset, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t number = announced_++;
  TORCH_INTERNAL_ASSERT(number < kSlots || is_taken(number - kSlots));
  own_->announce(number, Slot{tag, offset, bytes});
  wake_all(own_->announced);
  return number;
}

void RowNotices::take(uint64_t number) noexcept {
  own_->take(number);
  wake_all(own_->taken);
}

void RowNotices::close() noexcept {
  if (process_ != getpid()) return;
  own_->closed.store(1, std::memory_order_release);
  wake_all(own_->announced);
  wake_all(own_->taken);
}

std::optional<RowNotices::Row> RowNotices::find(int tag) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Not more than there can be, whatever the peer has written.
  const uint32_t news = peer_.page->count_announced() - static_cast<uint32_t>(read_);
  std::vector<std::pair<int, Row>> rows;
  for (uint64_t n = read_; n < read_ + std::min<uint64_t>(news, kSlots); ++n) {
    const Slot& slot = peer_.page->slots[n % kSlots];
    rows.push_back({static_cast<int>(slot.tag), {n, slot.offset, slot.bytes}});
  }
  // Else these may be zeros.
  if (peer_.memory->is_there()) {
    read_ += rows.size();
    arrived_.insert(rows.begin(), rows.end());
  }
  const auto found = arrived_.lower_bound(tag);
  if (found == arrived_.end() || found->first != tag) return std::nullopt;
  const Row row = found->second;
  arrived_.erase(found);
  return row;
}

bool RowNotices::is_taken(uint64_t number) const { return peer_.page->is_taken(number); }

bool RowNotices::is_closed() const { return peer_.is_closed(); }

uint32_t RowNotices::count(Kind kind) const {
  return kind == Kind::kAnnounced ? peer_.page->count_announced() : peer_.page->count_taken();
}

void RowNotices::wait(Kind kind, uint32_t seen, std::chrono::milliseconds limit) const {
  sleep_on(kind == Kind::kAnnounced ? peer_.page->announced : peer_.page->taken, seen, limit);
}

void RowNotices::wake() const noexcept {
  wake_all(peer_.page->announced);
  wake_all(peer_.page->taken);
}

}  // namespace zero
