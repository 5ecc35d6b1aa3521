// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/base/json_text.h"

#include <nlohmann/json.hpp>

namespace zero {

nlohmann::json parse_json(std::string_view text) { return nlohmann::json::parse(text); }

std::string json_text(const nlohmann::json& value, int indent) { return value.dump(indent); }

std::string json_text(const nlohmann::ordered_json& value) { return value.dump(); }

}  // namespace zero
