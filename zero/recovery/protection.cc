// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/recovery/protection.h"

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/base/own_thread_wait.h"

namespace zero {

Protection::Protection(const Group& group, std::shared_ptr<Snapshots> snapshots, int64_t recovery,
                       std::function<std::string()> failed)
    : snapshots_(std::move(snapshots)),
      recovery_(recovery),
      group_(group),
      failed_(std::move(failed)),
      others_may_join_(recovery > 0) {
  // After one of the same ranks, as where parameters change: no two snapshots have one number.
  // All ranks have agreed that its last one is complete.
  const auto before = snapshots_->all();
  if (!before.empty() && before.back()->recovery == recovery) begun_ = before.back()->number + 1;
  if (group.world_size() > 1) ring_ = std::make_unique<CopyRing>(group);
  // Here a failure is one of the construction: begin() is too late for it.
  if (ring_ || others_may_join_) thread_.start();
}

Protection::~Protection() { abort("its optimizer was destroyed"); }

void Protection::abort(const std::string& reason) noexcept {
  if (ring_) ring_->abort(reason);
}

Problem Protection::finish() {
  if (!made_.valid()) return problem_;
  OwnThreadWait wait(c10::str("rank ", group_.rank(), " of ", group_.world_size(),
                              " waits for its thread that copies a protected step"),
                     group_.timeout());
  int64_t local = 0;  // looks at work on own memory, which has no limit
  try {
    while (made_.wait_for(OwnThreadWait::kLook) != std::future_status::ready) {
      if (!ring_ || !ring_->is_waiting()) ++local;
      wait.look(local + (ring_ ? ring_->traffic().small_calls : 0));
    }
    problem_ = made_.get();
  } catch (const std::exception& error) {
    problem_ = {error_text(error), is_of_communication(error)};
  }
  // The two others would wait for this rank until their timeout. Not on the thread: they close the
  // communicators then, and this rank would throw that before its own reason.
  if (!problem_.empty()) abort(problem_.text);
  return problem_;
}

void Protection::complete(Snapshot& snapshot, MemoryFileWriter& writer) {
  const auto allocate = [this](int64_t bytes) { return snapshots_->allocate(bytes, at::kCPU); };
  MemoryFile own = writer.finish();
  if (ring_) snapshot.files.emplace(ring_->primary(), ring_->exchange(own, allocate));
  snapshot.files.emplace(group_.rank(), std::move(own));
  snapshots_->add(std::move(snapshot));
}

std::shared_ptr<ShardCopies> Protection::begin(Manifest manifest, FileToSave file) {
  if (!ring_ && !others_may_join_) return nullptr;
  TORCH_INTERNAL_ASSERT(!made_.valid() && problem_.empty());
  // The first one replaces those of a group before this one only when it is agreed on.
  if (begun_ > 0) snapshots_->keep_newest();
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->recovery = recovery_;
  snapshot->number = begun_++;
  snapshot->world_size = group_.world_size();
  manifest.id = snapshot->id();
  snapshot->manifest = std::move(manifest);
  auto writer = std::make_shared<MemoryFileWriter>(
      std::move(file), snapshot->id(),
      [this](int64_t bytes, c10::Device device) { return snapshots_->allocate(bytes, device); });
  const std::shared_ptr<ShardCopies> copies = writer->copy();
  auto promise = std::make_shared<std::promise<Problem>>();
  made_ = promise->get_future();
  thread_.push([this, promise, snapshot, writer, copies] {
    Problem problem;
    try {
      copies->copy_all();
      // A group remembers its failure before it ends its collectives on the device, so the copies,
      // which are behind them there, are not made before it does.
      const std::string failure = failed_();
      if (!failure.empty()) throw_communication_error(failure);
      complete(*snapshot, *writer);
    } catch (const std::exception& error) {
      problem = {"the copy of a protected step failed: " + error_text(error),
                 is_of_communication(error)};
    }
    promise->set_value(problem);
  });
  return copies;
}

}  // namespace zero
