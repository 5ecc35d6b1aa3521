// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One list of fields for both directions, over versions: files of version 1 and 2 are read by a
// list of version 2.
#include "zero/checkpoint/format/json.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace json_fields_test {

using nlohmann::json;
using nlohmann::ordered_json;

struct Part {
  int64_t size = 0;
  int64_t weight = 10;
};

struct Shelf {
  int64_t depth = 0;
  int64_t label = 20;
  int64_t color = 30;
  int64_t left = 0;
  std::vector<Part> parts;
};

struct Number {
  static ordered_json write(int64_t value) { return value; }
  static int64_t read(const json& value, const char* name, int64_t) {
    TORCH_CHECK(value.is_number(), name, ": expected a number");
    return value.get<int64_t>();
  }
};

}  // namespace json_fields_test

using namespace json_fields_test;

template <>
struct JsonFields<Part> {
  static constexpr char kWhat[] = "a part";
  static void list(auto& fields, auto& part) {
    fields.required("size", part.size, 1, Number());
    fields.required("weight", part.weight, 2, Number());
  }
  static void check(const Part& part) { TORCH_CHECK(part.size <= part.weight, "too light"); }
};

template <>
struct JsonFields<Shelf> {
  static constexpr char kWhat[] = "the shelf";
  static void list(auto& fields, auto& shelf) {
    fields.required("depth", shelf.depth, 1, Number());
    fields.optional("label", shelf.label, shelf.label != 20, Number());
    fields.required("color", shelf.color, 2, Number());
    fields.required("parts", shelf.parts);
    fields.section("place", [&](auto& place) { place.required("left", shelf.left, 1, Number()); });
  }
};

namespace {

Shelf read(const std::string& text, int64_t version) {
  return JsonForm<Shelf>::read(json::parse(text), "shelf", version);
}

std::string written(const Shelf& shelf) { return JsonForm<Shelf>::write(shelf).dump(); }

constexpr char kFull[] =
    R"({"depth":1,"label":2,"color":3,"parts":[{"size":5,"weight":6}],"place":{"left":4}})";
constexpr char kOfVersionOne[] = R"({"depth":1,"parts":[{"size":5}],"place":{"left":0}})";

TEST(JsonFieldsTest, WritesInTheOrderOfTheTableAndReadsItBack) {
  const Shelf shelf = read(kFull, 2);
  EXPECT_EQ(shelf.depth, 1);
  EXPECT_EQ(shelf.label, 2);
  EXPECT_EQ(shelf.color, 3);
  EXPECT_EQ(shelf.left, 4);
  ASSERT_EQ(shelf.parts.size(), 1u);
  EXPECT_EQ(shelf.parts[0].weight, 6);
  EXPECT_EQ(written(shelf), kFull);
}

TEST(JsonFieldsTest, AFileOfThePreviousVersionGetsTheInitialValuesOfNewFields) {
  const Shelf shelf = read(kOfVersionOne, 1);
  EXPECT_EQ(shelf.depth, 1);
  EXPECT_EQ(shelf.label, 20);
  EXPECT_EQ(shelf.color, 30);
  ASSERT_EQ(shelf.parts.size(), 1u);
  EXPECT_EQ(shelf.parts[0].size, 5);
  EXPECT_EQ(shelf.parts[0].weight, 10);
}

TEST(JsonFieldsTest, AFileOfItsVersionMustHaveARequiredField) {
  expect_words(error_of([] { read(kOfVersionOne, 2); }),
               {"\"color\" of the shelf", "since version 2", "got none"});
  expect_words(error_of([] { read(R"({"depth":1,"color":3,"parts":[{"size":5}]})", 2); }),
               {"\"weight\" of a part", "since version 2"});
  expect_words(error_of([] { read(R"({"parts":[]})", 1); }),
               {"\"depth\" of the shelf", "since version 1"});
  expect_words(error_of([] { read(R"({"depth":1,"place":{},"parts":[]})", 1); }),
               {"\"left\" of place"});
}

TEST(JsonFieldsTest, UnknownFieldsAreIgnored) {
  EXPECT_EQ(
      written(read(
          R"({"later":[1],"depth":1,"parts":[{"size":5,"later":{}}],"place":{"left":0,"later":1}})",
          1)),
      written(read(kOfVersionOne, 1)));
}

TEST(JsonFieldsTest, WhatIsNoObjectOrNoListIsRefused) {
  expect_words(error_of([] { read("[]", 1); }), {"the shelf as an object", "another array"});
  expect_words(error_of([] { read(R"({"depth":1,"parts":{}})", 1); }),
               {"parts: expected a list", "another object"});
  expect_words(error_of([] { read(R"({"depth":1,"parts":[7]})", 1); }),
               {"a part as an object", "another number"});
  expect_words(error_of([] { read(R"({"depth":null,"parts":[]})", 1); }), {"depth: expected"});
}

TEST(JsonFieldsTest, ValuesThatDoNotGoTogetherAreRefused) {
  expect_words(error_of([] { read(R"({"depth":1,"parts":[{"size":11}]})", 1); }), {"too light"});
}

}  // namespace
}  // namespace zero
