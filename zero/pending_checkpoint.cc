// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/pending_checkpoint.h"

#include <c10/util/Exception.h>

#include <utility>

namespace zero {

PendingCheckpoint::PendingCheckpoint(std::shared_ptr<CheckpointWriter> writer,
                                     std::vector<FileToSave> files, std::function<void()> finish)
    : finish_(std::move(finish)), thread_([writer = std::move(writer), files = std::move(files)] {
        writer->write_files(files);
      }) {}

PendingCheckpoint::~PendingCheckpoint() {
  if (thread_.joinable()) thread_.join();
}

void PendingCheckpoint::finish() {
  TORCH_CHECK(finish_ != nullptr, "finish(): expected one call for each save, got another");
  if (thread_.joinable()) thread_.join();
  std::exchange(finish_, nullptr)();
}

}  // namespace zero
