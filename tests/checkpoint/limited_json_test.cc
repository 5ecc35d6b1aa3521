// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// JSON that is made to exhaust memory, time or the stack is refused while it is parsed.
#include "zero/checkpoint/format/limited_json.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/error_of.h"
#include "zero/checkpoint/format/manifest.h"

namespace zero {
namespace {

std::string nested(int levels) { return std::string(levels, '[') + std::string(levels, ']'); }

std::string list_of(int64_t count, const std::string& entry) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i > 0 ? "," : "") + entry;
  return text + "]";
}

std::string object_of(int64_t count) {
  std::string text = "{";
  for (int64_t i = 0; i < count; ++i) text += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":0";
  return text + "}";
}

TEST(LimitedJsonTest, WhatIsWithinTheLimitsIsParsed) {
  const auto value = parse_limited_json(R"({"a":[1,-2,0.5,true,null,"x"],"b":{"c":{}}})");
  EXPECT_EQ(value.at("a").size(), 6u);
  EXPECT_EQ(value.at("a").at(1).get<int>(), -2);
  EXPECT_TRUE(value.at("b").at("c").is_object());
}

TEST(LimitedJsonTest, SixLevelsAreReadAndSevenAreNot) {
  EXPECT_EQ(error_of([] { parse_limited_json(nested(6)); }), "");
  for (const int levels : {7, 300000}) {
    expect_words(error_of([&] { parse_limited_json(nested(levels)); }), {"at most 6 levels"});
  }
  const std::string objects = R"({"a":{"a":{"a":{"a":{"a":{"a":{}}}}}}})";
  expect_words(error_of([&] { parse_limited_json(objects); }), {"at most 6 levels"});
  // Levels beside each other are not levels above each other.
  EXPECT_EQ(error_of([] { parse_limited_json("[" + nested(5) + "," + nested(5) + "]"); }), "");
}

TEST(LimitedJsonTest, GroupsAndMetadataAreCountedEachByItself) {
  const std::string most = "{\"metadata\":" + object_of(kEntriesLimit) +
                           ",\"groups\":" + list_of(kEntriesLimit, "{}") + "}";
  EXPECT_EQ(error_of([&] { parse_limited_json(most); }), "");
  expect_words(
      error_of([] { parse_limited_json("{\"metadata\":" + object_of(kEntriesLimit + 1) + "}"); }),
      {"metadata: expected at most 100000 entries"});
  expect_words(
      error_of([] { parse_limited_json("{\"groups\":" + list_of(kEntriesLimit + 1, "{}") + "}"); }),
      {"groups: expected at most 100000 entries"});
  // Other lists are as long as the file.
  EXPECT_EQ(
      error_of([] { parse_limited_json("{\"files\":" + list_of(kEntriesLimit + 1, "{}") + "}"); }),
      "");
}

TEST(LimitedJsonTest, ANulIsForMetadataAlone) {
  const std::string text = R"({"metadata":{"a\u0000":"b\u0000"}})";
  EXPECT_EQ(parse_limited_json(text).at("metadata").begin().value().get<std::string>(),
            std::string("b\0", 2));
  expect_words(error_of([] { parse_limited_json(R"({"id":"a\u0000"})"); }), {"NUL", "a\\x00"});
  expect_words(error_of([] { parse_limited_json(R"({"metadata":{},"a\u0000":1})"); }), {"NUL"});
}

TEST(LimitedJsonTest, AnObjectWithANameTwiceIsRefusedAtAnyLevel) {
  for (const char* text : {R"({"a":1,"a":1})", R"({"b":[{"a":{},"c":0,"a":1}]})"}) {
    expect_words(error_of([&] { parse_json_of_depth(text, 6); }), {"once in an object, got \"a\""});
  }
  // Objects beside and within each other may have the same names.
  EXPECT_EQ(parse_json_of_depth(R"({"a":{"a":1,"b":2},"b":[{"a":3},{"a":4}]})", 6).size(), 2u);
}

TEST(LimitedJsonTest, WhatIsNoJsonIsExplainedByTheLibrary) {
  for (const char* text : {"", "{", "[1,]", "{\"a\"}", "1e999", "\"\xff\"", "{} {}"}) {
    EXPECT_THROW(parse_limited_json(text), nlohmann::json::exception) << text;
  }
}

}  // namespace
}  // namespace zero
