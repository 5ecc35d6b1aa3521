// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/run_identity.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/checkpoint_list.h"

namespace zero {

RunIdentity::RunIdentity() : id_(random_id()) {}

int64_t RunIdentity::next_save(const std::string& parent) {
  if (known_.insert(parent).second) {
    try {
      const auto found = list_checkpoints(parent);
      if (!found.empty()) last_ = std::max(last_, found.back().saved);
    } catch (const c10::Error&) {  // not listable; a save into it may still be possible
    }
  }
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  last_ += last_ < std::numeric_limits<int64_t>::max() ? 1 : 0;
  last_ =
      std::max<int64_t>(last_, std::chrono::duration_cast<std::chrono::microseconds>(now).count());
  return last_;
}

void RunIdentity::resume(const Manifest& manifest) {
  if (!manifest.run.empty()) id_ = manifest.run;
  last_ = std::max(last_, manifest.saved);
}

}  // namespace zero
