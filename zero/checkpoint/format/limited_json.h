// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The JSON of a manifest or of a header as values, refused while it is parsed where it is made
// to exhaust memory, time or the stack: a checksum that matches makes nothing safe.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace zero {

// Throws nlohmann::json::exception for what is not JSON, and c10::Error beyond six
// levels, beyond kEntriesLimit parameter groups or entries of metadata, and for a NUL
// outside of metadata.
nlohmann::json parse_limited_json(const std::string& text);

// The same for any text. Returns a discarded value for what is not JSON, and throws c10::Error
// beyond `deepest` levels and for an object that has a name twice, which readers take for different
// things.
nlohmann::json parse_json_of_depth(std::string_view text, int deepest);

}  // namespace zero
