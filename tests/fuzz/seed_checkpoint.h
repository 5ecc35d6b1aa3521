// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A small checkpoint, the same at every call: what the fuzzers start from.
#pragma once

#include <string>

#include "zero/checkpoint/format/manifest.h"

namespace zero {

// Writes the tensor file of the checkpoint into `folder` and returns the manifest
// that goes with it.
Manifest write_seed_file(const std::string& folder);

// A manifest of the JSON object `body`, true or not: with the last line that
// makes the reader believe that nothing is damaged.
std::string with_checksum(std::string body);

// What with_checksum() turns into the text of `manifest`.
std::string without_checksum(const Manifest& manifest);

}  // namespace zero
