// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/written_once.h"

#include <exception>

namespace zero {

bool WrittenOnce::link(const FileToSave& file, CheckpointWriter& writer) noexcept {
  if (path_.empty() || file.name != content_.about.name) return false;
  try {
    const ManifestFile now = hash_file(file, content_.about.id).about;
    if (now.hash != content_.about.hash || now.bytes != content_.about.bytes) return false;
    return writer.link_file(path_, content_);
  } catch (const std::exception&) {  // memory, or a device: writing it will say so
    return false;
  }
}

void WrittenOnce::keep(const std::string& folder, const std::string& name,
                       const CheckpointWriter& writer) {
  const FileContent* const content = writer.written(name);
  path_.clear();
  if (content == nullptr) return;
  path_ = folder + "/" + name;
  content_ = *content;
  if (content_.about.id.empty()) content_.about.id = writer.id();
}

}  // namespace zero
