// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The safetensors reader trusts nothing.
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/forged_manifest.h"
#include "zero/checkpoint/format/safetensors.h"

namespace zero {
namespace {

constexpr uint64_t kDataBytes = 24;
constexpr char kValid[] =
    R"({"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
    R"("y":{"dtype":"I64","shape":[1],"data_offsets":[16,24]},)"
    R"("z":{"dtype":"BF16","shape":[0,3],"data_offsets":[24,24]}})";

SafetensorsHeader parse(const std::string& json, uint64_t data_bytes = kDataBytes) {
  return parse_safetensors_header(json, 8 + json.size() + data_bytes, "a file");
}

std::string refusal(const std::string& json, uint64_t data_bytes = kDataBytes) {
  return error_of([&] { parse(json, data_bytes); });
}

TEST(SafetensorsTest, ReadsAValidHeader) {
  const SafetensorsHeader header = parse(kValid);
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.metadata.at("a"), "b");
  EXPECT_EQ(header.find("y")->dtype, at::kLong);
  EXPECT_EQ(header.find("y")->begin, 8 + sizeof(kValid) - 1 + 16);
  EXPECT_EQ(header.find("z")->shape, (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(header.find("w"), nullptr);
}

TEST(SafetensorsTest, ATensorOfAnUnknownDtypeIsListedWithItsPlace) {
  const SafetensorsHeader header = parse(replaced(kValid, "\"F32\"", "\"F8_E4M3\""));
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.find("x")->dtype, c10::ScalarType::Undefined);
  EXPECT_EQ(header.find("x")->end - header.find("x")->begin, 16u);
}

TEST(SafetensorsTest, RefusesHostileHeaders) {
  const std::vector<std::pair<std::string, std::string>> changes = {
      {"[0,16]", "[0,12]"},                  // too short for its shape
      {"[16,24]", "[12,20]"},                // overlaps
      {"\"I64\"", "\"I32\""},                // size does not match
      {"[0,16]", "[16,0]"},                  // backwards
      {"[24,24]", "[25,25]"},                // outside, a hole before
      {"[0,16]", "[0,16.0]"},                // not whole
      {"[0,16]", "[-16,0]"},                 // negative
      {"[0,16]", "[0]"},                     // one offset
      {"[2,2]", "[4294967296,4294967296]"},  // overflows to 0
      {"[2,2]", "[9223372036854775807,9223372036854775807,0]"},
      {"[2,2]", "[18446744073709551615]"},
      {"[2,2]", "2"},
      {"\"F32\"", "7"},
      {"\"y\"", "\"x\""},  // a name twice
      {"{\"a\":\"b\"}", "7"},
      {"{\"a\":\"b\"}", "{\"a\":7}"},
      {"\"dtype\":\"F32\",", ""},
      {"{\"a\":\"b\"}", std::string(10000, '[') + std::string(10000, ']')},
  };
  for (const auto& [what, by] : changes) {
    EXPECT_FALSE(refusal(replaced(kValid, what, by)).empty()) << what << " -> " << by.substr(0, 60);
  }
  // Of a tensor without elements, whose bytes are none in any case.
  expect_words(refusal(replaced(kValid, "[0,3]", "[9223372036854775807,9223372036854775807,0]")),
               {"fit 63 bits"});
  for (const std::string& text : {std::string(), std::string("7"), std::string("[]"),
                                  std::string("{"), std::string("\0{}", 3)}) {
    EXPECT_FALSE(refusal(text).empty()) << text;
  }
  EXPECT_FALSE(refusal(kValid, kDataBytes + 1).empty()) << "a byte that belongs to no tensor";
  EXPECT_FALSE(refusal(kValid, kDataBytes - 1).empty()) << "a byte too few";
}

TEST(SafetensorsTest, AFieldThatIsUnknownHereIsIgnored) {
  for (const char* more :
       {R"("more":7,)", R"("more":[[-1],"a"],)", R"("more":{"shape":[null]},)"}) {
    const SafetensorsHeader header =
        parse(replaced(kValid, "\"dtype\"", more + std::string("\"dtype\"")));
    EXPECT_EQ(header.find("x")->shape, (std::vector<int64_t>{2, 2})) << more;
  }
}

// Byte for byte what the JSON library writes of sorted names, with the metadata among them.
TEST(SafetensorsTest, TheHeaderThatIsWrittenIsCanonicalJson) {
  std::vector<StoredTensor> tensors;
  for (const char* name :
       {"z", "A", "__metadata_", "__metadata__a", "a\"b\\c\n", "\xc3\xa9\x7f", ""}) {
    tensors.push_back({name, at::kFloat, {1, 2}, 0, 0});
  }
  tensors.push_back({"scalar", at::kLong, {}, 0, 0});
  for (const std::map<std::string, std::string>& metadata :
       {std::map<std::string, std::string>{{"k\"", "v\n"}, {"a", ""}}, {}}) {
    const std::string text = lay_out_safetensors(tensors, metadata, "a file").substr(8);
    const auto value = nlohmann::json::parse(text);
    EXPECT_EQ(text.substr(0, text.find_last_not_of(' ') + 1), value.dump());
    EXPECT_EQ(value.size(), tensors.size() + (metadata.empty() ? 0 : 1));
    EXPECT_EQ(value.value("__metadata__", nlohmann::json::object()).size(), metadata.size());
    EXPECT_EQ(value.at("scalar").dump(), R"({"data_offsets":[0,8],"dtype":"I64","shape":[]})");
  }
  for (const char* name : {"A", "__metadata__"}) {
    std::vector<StoredTensor> taken = tensors;
    taken.push_back({name, at::kFloat, {1}, 0, 0});
    EXPECT_THROW(lay_out_safetensors(taken, {}, "a file"), c10::Error) << name;
  }
  std::vector<StoredTensor> bytes{{"\xff", at::kFloat, {1}, 0, 0}};
  EXPECT_THROW(lay_out_safetensors(bytes, {}, "a file"), c10::Error);
}

TEST(SafetensorsTest, TensorsOfAnySizeAreWrittenWhereTheHeaderSays) {
  const std::string path = ::testing::TempDir() + "/sizes.safetensors";
  std::filesystem::remove(path);
  const auto full = [](const char* name, int64_t bytes) {
    return TensorToWrite{
        name, at::kByte, {bytes}, [=] { return at::full({bytes}, name[0], at::kByte); }};
  };
  write_safetensors_files(path, {full("a", 1 << 20), full("none", 0), full("b", 3)}, {}, 0);
  FileReader reader(path);
  const SafetensorsHeader header = read_safetensors_header(reader);
  for (const auto& [name, text] :
       {std::pair("a", std::string(1 << 20, 'a')), std::pair("b", std::string("bbb"))}) {
    const StoredTensor& t = *header.find(name);
    EXPECT_TRUE(reader.read_text(t.begin, t.end - t.begin) == text) << name;
  }
}

// The entries of 50,000 parameters with AdamW. A search of all before for each of them would take
// half an hour.
TEST(SafetensorsTest, ReadsManyEntriesInProportion) {
  std::string text = "{";
  for (int i = 0; i < 200000; ++i) {
    text += (i > 0 ? ",\"" : "\"") + std::to_string(i) +
            R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  }
  EXPECT_EQ(parse(text + "}", 0).tensors.size(), 200000u);
}

TEST(SafetensorsTest, RefusesLengthsThatDoNotFitTheFile) {
  const std::string path = ::testing::TempDir() + "/lengths.safetensors";
  for (uint64_t length : {uint64_t{9}, uint64_t{100'000'001}, ~uint64_t{0}, uint64_t{1} << 63}) {
    std::filesystem::remove(path);
    FileWriter writer(path);
    writer.write(&length, sizeof(length));
    writer.write("{}      ", 8);
    writer.finish();
    FileReader reader(path);
    EXPECT_THROW(read_safetensors_header(reader), c10::Error) << length;
  }
}

// Under AddressSanitizer too. What is accepted must lie within the file.
TEST(SafetensorsTest, MutatedHeadersNeverReachOutsideTheFile) {
  std::mt19937 random(3);
  const std::string letters = "{}[]\",:0123456789-.eF32I64xtrue null\\u\xff";
  int accepted = 0;
  for (int i = 0; i < 50000; ++i) {
    std::string text = kValid;
    for (uint32_t n = 1 + random() % 4; n > 0; --n) {
      const size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = letters[random() % letters.size()];
          break;
        case 1:
          text.erase(at, 1 + random() % 8);
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 12));
      }
      if (text.empty()) text = "{";
    }
    try {
      const SafetensorsHeader header = parse(text);
      uint64_t end = header.data_begin;
      for (const StoredTensor& t : header.tensors) {
        ASSERT_EQ(t.begin, end);
        end = t.end;
      }
      ASSERT_EQ(end, 8 + text.size() + kDataBytes);
      ++accepted;
    } catch (const c10::Error&) {
    }
  }
  std::printf("50000 mutated headers, %d of them valid\n", accepted);
}

}  // namespace
}  // namespace zero
