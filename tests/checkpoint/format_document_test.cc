// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// docs/checkpoints.md specifies every field that a manifest has.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "zero/checkpoint/format/manifest.h"

namespace zero {
namespace {

std::string specification() {
  std::ifstream file("docs/checkpoints.md", std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const size_t begin = text.find("## The format, version " + std::to_string(kCheckpointVersion));
  return begin == std::string::npos ? "" : text.substr(begin);
}

// The fields of objects and of objects in lists. Names in `groups` and `metadata` are the user's.
void expect_fields(const nlohmann::json& value, const std::string& text) {
  if (value.is_array()) {
    for (const auto& item : value) expect_fields(item, text);
  }
  if (!value.is_object()) return;
  for (const auto& [name, field] : value.items()) {
    EXPECT_NE(text.find("`" + name + "`"), std::string::npos)
        << "docs/checkpoints.md does not say what `" << name << "` of a manifest is";
    if (name != "groups" && name != "metadata") expect_fields(field, text);
  }
}

TEST(FormatDocumentTest, EveryFieldOfAManifestIsSpecified) {
  Manifest m;
  m.holders = 2;
  m.parameters = {
      {"weight", {2, 3}, {3, 1}, c10::ScalarType::Float, 0, {4, 3}, 0, 2, {2, 2}, "int8", "split"}};
  m.files = {{"rank-00000.safetensors", 10, 1, 1, 1, "id of a link"}};
  m.tensors = {{"weight", {"master"}, {{0, 0, 6}}}};
  const std::string text = specification();
  ASSERT_GT(text.size(), 2000u);
  expect_fields(nlohmann::json::parse(manifest_text(m)), text);
}

}  // namespace
}  // namespace zero
