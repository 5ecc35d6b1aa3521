// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The safetensors reader trusts nothing, the manifest reader as little; and pieces
// of parameters are cut anew without a gap.
#include <gtest/gtest.h>

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "bookkeeping/reshard.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/reader.h"
#include "zero/checkpoint/safetensors.h"

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
  try {
    parse(json, data_bytes);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  const size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return text.replace(at, what.size(), by);
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
      {"\"F32\"", "\"F99\""},
      {"\"F32\"", "7"},
      {"{\"a\":\"b\"}", "7"},
      {"{\"a\":\"b\"}", "{\"a\":7}"},
      {"\"dtype\":\"F32\",", ""},
      {"{\"a\":\"b\"}", std::string(10000, '[') + std::string(10000, ']')},
  };
  for (const auto& [what, by] : changes) {
    EXPECT_FALSE(refusal(replaced(kValid, what, by)).empty()) << what << " -> " << by.substr(0, 60);
  }
  for (const std::string& text : {std::string(), std::string("7"), std::string("[]"),
                                  std::string("{"), std::string("\0{}", 3)}) {
    EXPECT_FALSE(refusal(text).empty()) << text;
  }
  EXPECT_FALSE(refusal(kValid, kDataBytes + 1).empty()) << "a byte that belongs to no tensor";
  EXPECT_FALSE(refusal(kValid, kDataBytes - 1).empty()) << "a byte too few";
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

TEST(ManifestTest, TextReadBackIsTheSameAndMutationsAreRefused) {
  Manifest m;
  m.id = "0123";
  m.scale = 0.1;
  m.groups = {{{"beta2", 0.999}, {"lr", 1e-3}}};
  m.parameters = {{"p \"quoted\" \u00e4", {2, 3}, {1, 2}, at::kBFloat16, 0}};
  m.files = {{"f", 10, ~uint64_t{0}, {{"k", "p", "master", 3, 4, 5}}}};
  m.metadata = {{"epoch", "3"}};
  const std::string text = manifest_text(m);
  EXPECT_EQ(manifest_text(parse_manifest(text, "m")), text);
  EXPECT_EQ(parse_manifest(text, "m").scale, 0.1);
  std::mt19937 random(4);
  for (int i = 0; i < 5000; ++i) {
    std::string changed = text;
    if (i % 2 == 0) {
      changed[random() % changed.size()] ^= static_cast<char>(1 << (random() % 8));
    } else {
      changed.resize(random() % changed.size());
    }
    EXPECT_THROW(parse_manifest(changed, "m"), c10::Error);
  }
}

// A checksum that matches makes nothing else safe.
TEST(ManifestTest, HostileContentWithAMatchingChecksumIsRefused) {
  Manifest m;
  m.files = {{"f", 10, 1, {{"k", "p", "master", 3, 4, 5}}}};
  const auto refused = [](const Manifest& manifest) {
    EXPECT_THROW(parse_manifest(manifest_text(manifest), "m"), c10::Error);
  };
  EXPECT_NO_THROW(parse_manifest(manifest_text(m), "m"));
  for (const char* name : {"../f", "/etc/passwd", "", ".hidden"}) {
    m.files[0].name = name;
    refused(m);
  }
  m.files[0].name = "f";
  m.files[0].tensors[0].begin = -1;
  refused(m);
  m.files[0].tensors[0].begin = INT64_MAX;
  refused(m);
  m.files[0].tensors[0].begin = 0;
  const auto refused_parameter = [&](std::vector<int64_t> shape, std::vector<int64_t> strides) {
    m.parameters = {{"p", std::move(shape), std::move(strides), at::kFloat, 0}};
    refused(m);
  };
  refused_parameter({int64_t{1} << 40, int64_t{1} << 40}, {});
  refused_parameter({0, int64_t{1} << 40, int64_t{1} << 40}, {});
  refused_parameter({-1}, {});
  refused_parameter({2, 3}, {1});
  refused_parameter({2, 3}, {4, 1});
  refused_parameter({2, 3}, {INT64_MAX, INT64_MAX});
  refused_parameter({2, 3}, {-1, 1});
}

// The same manifest with other text in it, and a checksum that matches.
std::string forged(const std::string& what, const std::string& by) {
  std::string text = replaced(manifest_text(Manifest()), what, by);
  text.resize(text.rfind("\"xxh3\""));
  return text + "\"xxh3\": \"" + hash_text(content_hash(text.data(), text.size())) + "\"}\n";
}

TEST(ManifestTest, NumbersThatNoIntegerHoldsAreRefused) {
  EXPECT_NO_THROW(parse_manifest(forged("\"steps\":0", "\"steps\":7"), "m"));
  const std::string deep = std::string(300000, '[') + std::string(300000, ']');
  for (const std::string& value : {std::string("1e20"), std::string("0.5"), std::string("-1"),
                                   std::string("9223372036854775808"), std::string("null"), deep}) {
    EXPECT_THROW(parse_manifest(forged("\"steps\":0", "\"steps\":" + value), "m"), c10::Error)
        << value.substr(0, 30);
    EXPECT_THROW(parse_files(R"([{"name":"f","bytes":)" + value + "}]", "m"), c10::Error);
  }
}

// Of what a manifest promises, nothing is believed before the file was looked at.
TEST(ReaderTest, SizesAreComparedWithTheFileBeforeMemoryIsTaken) {
  const std::string folder = ::testing::TempDir() + "/promises";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  SafetensorsWriter writer(folder + "/f", {{"k", at::kFloat, {0}, 0, 0}}, {{"checkpoint", "1"}});
  const uint64_t hash = writer.write(nullptr, 0);
  writer.finish();
  const int64_t huge = int64_t{1} << 62;  // times 4 bytes is 0 in 64 bits
  Manifest m;
  m.id = "1";
  m.parameters = {{"p", {huge / 16}, {1}, at::kByte, 0}};
  m.files = {{"f", writer.bytes(), writer.hash(), {{"k", "p", "master", 0, huge, hash}}}};
  const auto refusal = [&](const std::function<void(CheckpointReader&)>& read) -> std::string {
    std::filesystem::remove(folder + "/" + kManifestName);
    FileWriter manifest(folder + "/" + kManifestName);
    const std::string text = manifest_text(m);
    manifest.write(text.data(), text.size());
    manifest.finish();
    try {
      CheckpointReader reader(folder);
      read(reader);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "accepted";
  };
  const at::Tensor into = at::ones({4});
  const auto expected = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expected(refusal([&](auto& reader) {
             reader.read("master", {{"p", 0, 4}}, {into});
           }),
           "elements of Float, got 0 bytes");
  expected(refusal([&](auto& reader) { reader.read_all(m.parameters[0], "master"); }),
           "elements of Float, got 0 bytes");
  expected(refusal([&](auto& reader) { reader.read_whole(m.parameters[0], "master"); }),
           "elements of Byte, got 0 bytes");
  m.files[0].tensors[0].numel = 0;
  expected(refusal([&](auto& reader) { reader.read_all(m.parameters[0], "master"); }),
           "stored elements for its shape, got 0");
  m.files[0].bytes = huge;
  expected(refusal([&](auto& reader) { reader.read_whole(m.parameters[0], "master"); }),
           "bytes as the manifest says, got");
}

TEST(ReshardTest, EveryWantedElementComesFromItsPlace) {
  std::mt19937 random(6);
  const auto cut_up = [&](int64_t parameter, int64_t numel, std::vector<ParameterRange>& out) {
    for (int64_t at = 0; at < numel;) {
      const int64_t part = std::min<int64_t>(numel - at, 1 + random() % 7);
      out.push_back({parameter, at, part});
      at += part;
    }
  };
  for (int round = 0; round < 300; ++round) {
    std::vector<ParameterRange> stored, wanted;
    for (int64_t p = 0; p < 3; ++p) {
      const int64_t numel = random() % 40;
      cut_up(p, numel, stored);
      cut_up(p, numel, wanted);
    }
    std::shuffle(stored.begin(), stored.end(), random);
    std::shuffle(wanted.begin(), wanted.end(), random);
    std::vector<std::vector<int>> filled(wanted.size());
    for (size_t w = 0; w < wanted.size(); ++w) filled[w].resize(wanted[w].numel);
    int64_t last = -1;
    for (const RangeOverlap& overlap : reshard(stored, wanted)) {
      EXPECT_GE(overlap.stored, last) << "each stored range is read once";
      last = overlap.stored;
      for (int64_t i = 0; i < overlap.numel; ++i) {
        ++filled[overlap.wanted].at(overlap.wanted_begin + i);
        EXPECT_EQ(stored[overlap.stored].parameter, wanted[overlap.wanted].parameter);
        EXPECT_EQ(stored[overlap.stored].begin + overlap.stored_begin,
                  wanted[overlap.wanted].begin + overlap.wanted_begin);
        EXPECT_LE(overlap.stored_begin + overlap.numel, stored[overlap.stored].numel);
      }
    }
    for (const auto& counts : filled) {
      for (int count : counts) EXPECT_EQ(count, 1);
    }
  }
}

TEST(ReshardTest, HolesAndOverlapsAreRefused) {
  EXPECT_THROW(reshard({{0, 0, 4}}, {{0, 2, 4}}), c10::Error);
  EXPECT_THROW(reshard({{0, 0, 4}, {0, 5, 4}}, {{0, 2, 4}}), c10::Error);
  EXPECT_THROW(reshard({{0, 0, 4}, {0, 3, 4}}, {{0, 0, 1}}), c10::Error);
  EXPECT_THROW(reshard({{0, 0, 4}}, {{1, 0, 1}}), c10::Error);
}

}  // namespace
}  // namespace zero
