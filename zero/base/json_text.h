// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// JSON from text and back. Each file that calls the library's own parse() and dump() compiles its
// parser and its printer again, which takes longer than all else in it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace zero {

// Throws nlohmann::json::exception for what is not JSON. For text of this program or of a rank of
// the job: parse_limited_json() is for what others may have written.
nlohmann::json parse_json(std::string_view text);

// `indent` spaces before an entry of a list or an object, on a line of its own; -1: all on one
// line. Throws nlohmann::json::exception for a string that is not UTF-8.
std::string json_text(const nlohmann::json& value, int indent = -1);
std::string json_text(const nlohmann::ordered_json& value);

}  // namespace zero
