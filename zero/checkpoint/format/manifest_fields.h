// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The fields of a manifest, in lists that write and read it. manifest_fields.cc is the one place
// that names them; a new field is a member in manifest.h and a line in its list.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "zero/checkpoint/format/held_tensor.h"
#include "zero/checkpoint/format/manifest.h"

namespace zero {

// Appends all fields of the current version to `root`.
void write_fields(const Manifest& manifest, nlohmann::ordered_json& root);
// Reads a manifest of version `version`. Throws c10::Error for what write_fields() cannot have
// written, and for a missing field, which it names.
Manifest read_fields(const nlohmann::json& root, int64_t version);

// The files of a rank, as ranks send them to each other.
nlohmann::ordered_json files_json(const std::vector<FileContent>& files);
std::vector<FileContent> files_from(const nlohmann::json& list);

// The tensors that a rank holds, as ranks send them to each other; never in a file.
nlohmann::ordered_json held_json(const HeldTensors& held);
HeldTensors held_from(const nlohmann::json& object);

}  // namespace zero
