// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What ranks tell each other about the tensors that they hold, before a checkpoint is written. It
// has the fields of a manifest and is never in a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "zero/checkpoint/format/manifest.h"

namespace zero {

// The description of a tensor by one rank. The ranks of a set share the work; each tensor of each
// set is described once.
struct HeldTensor {
  ManifestParameter about;  // `group` is the number in the set
  int64_t index = 0;        // in the set's order
  int64_t holder = 0;
  int64_t copies = 1;  // sets that hold a parameter; 0: another set counts it
  uint64_t hash = 0;   // of a frozen parameter's bytes
  // For a tensor-parallel part: its number, of how many, and the dimension along which they are
  // cut.
  int64_t part = 0;
  int64_t parts = 1;
  int64_t dimension = 0;
  std::vector<int64_t> sections = {};  // as in ManifestParameter
};

struct HeldTensors {
  std::vector<HeldTensor> parameters;
  std::vector<HeldTensor> frozen;
  std::vector<HeldTensor> buffers;
  OptionGroups groups;  // of a holder; empty on other ranks
};

// For sending. The first throws c10::Error for names that are not UTF-8.
std::string held_text(const HeldTensors& held);
HeldTensors parse_held(const std::string& text, const std::string& origin);

}  // namespace zero
