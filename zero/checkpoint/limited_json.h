// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The JSON of a manifest as values, refused while it is parsed where it is made to
// exhaust memory, time or the stack: a checksum that matches makes nothing safe.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace zero {

// Throws nlohmann::json::exception for what is not JSON, and c10::Error beyond six
// levels, beyond kEntriesLimit parameter groups or entries of metadata, and for a NUL
// outside of metadata.
nlohmann::json parse_limited_json(const std::string& text);

}  // namespace zero
