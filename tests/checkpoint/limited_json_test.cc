// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// JSON that is made to exhaust the stack or memory or has a name twice is refused while it is
// parsed.
#include "zero/checkpoint/format/json.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/error_of.h"

namespace zero {
namespace {

std::string nested(int levels) { return std::string(levels, '[') + std::string(levels, ']'); }

TEST(LimitedJsonTest, WhatIsWithinTheLimitsIsParsed) {
  const auto value = parse_limited_json(R"({"a":[1,-2,0.5,true,null,"x"],"b":{"c":{}}})", 6);
  EXPECT_EQ(value.at("a").size(), 6u);
  EXPECT_EQ(value.at("a").at(1).get<int>(), -2);
  EXPECT_TRUE(value.at("b").at("c").is_object());
}

TEST(LimitedJsonTest, SixLevelsAreReadAndSevenAreNot) {
  EXPECT_EQ(error_of([] { parse_limited_json(nested(6), 6); }), "");
  for (const int levels : {7, 300000}) {
    expect_words(error_of([&] { parse_limited_json(nested(levels), 6); }), {"at most 6 levels"});
  }
  const std::string objects = R"({"a":{"a":{"a":{"a":{"a":{"a":{}}}}}}})";
  expect_words(error_of([&] { parse_limited_json(objects, 6); }), {"at most 6 levels"});
  // Levels beside each other are not levels above each other.
  EXPECT_EQ(error_of([] { parse_limited_json("[" + nested(5) + "," + nested(5) + "]", 6); }), "");
}

TEST(LimitedJsonTest, ValuesAreCountedWithTheirListsAndBounded) {
  LimitedJson limit(6);
  limit.start_array(0);
  for (int64_t values = 2; values <= kValuesLimit; ++values) limit.number_unsigned(0);
  limit.end_array();
  expect_words(error_of([&] { limit.null(); }), {"at most 67108864 values"});
  expect_words(error_of([&] { limit.start_object(0); }), {"at most 67108864 values"});
}

TEST(LimitedJsonTest, AnObjectWithANameTwiceIsRefusedAtAnyLevel) {
  for (const char* text : {R"({"a":1,"a":1})", R"({"b":[{"a":{},"c":0,"a":1}]})"}) {
    expect_words(error_of([&] { parse_limited_json(text, 6); }), {"once in an object, got \"a\""});
  }
  // Objects beside and within each other may have the same names.
  EXPECT_EQ(parse_limited_json(R"({"a":{"a":1,"b":2},"b":[{"a":3},{"a":4}]})", 6).size(), 2u);
}

TEST(LimitedJsonTest, WhatIsNoJsonIsExplainedByTheLibrary) {
  for (const char* text : {"", "{", "[1,]", "{\"a\"}", "1e999", "\"\xff\"", "{} {}"}) {
    EXPECT_THROW(parse_limited_json(text, 6), nlohmann::json::exception) << text;
  }
}

}  // namespace
}  // namespace zero
