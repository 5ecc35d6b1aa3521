// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The manifest reader trusts nothing, names what is wrong, and reads what earlier and later
// libraries write.
#include "zero/checkpoint/format/manifest.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/forged_manifest.h"

namespace zero {
namespace {

// A checksum that matches makes nothing else safe.
TEST(ManifestTest, HostileContentWithAMatchingChecksumIsRefused) {
  Manifest m;
  m.id = "1";
  m.files = {{"f", 10, 1, 1}};
  m.tensors = {{"p", {"master"}, {{0, 3, 4}}}};
  const auto refused = [](const Manifest& manifest) {
    EXPECT_THROW(parse_manifest(manifest_text(manifest), "m"), c10::Error);
  };
  EXPECT_NO_THROW(parse_manifest(manifest_text(m), "m"));
  for (const char* name : {"../f", "/etc/passwd", "", ".hidden"}) {
    m.files[0].name = name;
    refused(m);
  }
  m.files[0].name = "f";
  ManifestPiece& piece = m.tensors[0].pieces[0];
  piece.begin = -1;
  refused(m);
  piece.begin = INT64_MAX;
  refused(m);
  piece = {1, 3, 4};  // of a file that is not there
  refused(m);
  piece.file = 0;
  for (const int64_t blocks : {int64_t{-1}, int64_t{2}, INT64_MAX}) {  // 10 bytes hold one hash
    m.files[0].blocks = blocks;
    refused(m);
  }
  m.files[0].blocks = 1;
  m.tensors[0].kinds = {"master", "master"};
  refused(m);
  m.tensors[0].kinds.clear();
  for (size_t k = 0; k <= kKindsLimit; ++k) m.tensors[0].kinds.push_back(std::to_string(k));
  refused(m);
  m.tensors[0].kinds = {"master"};
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

// Two pieces would have one key in their file.
TEST(ManifestTest, AFrozenParameterOrBufferIsOnePieceOfItsSize) {
  for (const char* kind : {"frozen", "buffer"}) {
    Manifest m;
    m.id = "1";
    m.files = {{"f", 10, 1, 1}};
    (kind == std::string("frozen") ? m.frozen : m.buffers) = {{"w", {6}, {}, at::kFloat, 0}};
    const auto error = [&](const std::vector<ManifestPiece>& pieces) {
      m.tensors = {{"w", {kind}, pieces}};
      // What no load takes is not written.
      return error_of([&] { manifest_text(m); });
    };
    EXPECT_EQ(error({{0, 0, 6}}), "");
    const std::vector<std::string> words = {kind, " w: expected one piece of all its elements"};
    for (const auto& pieces : std::vector<std::vector<ManifestPiece>>{
             {{0, 0, 5}}, {{0, 0, 7}}, {{0, 1, 6}}, {{0, 0, 3}, {0, 3, 3}}, {}}) {
      expect_words(error(pieces), words);
    }
  }
}

TEST(ManifestTest, NumbersThatNoIntegerHoldsAreRefused) {
  EXPECT_NO_THROW(parse_manifest(forged("\"steps\":0", "\"steps\":7"), "m"));
  const std::string deep = std::string(300000, '[') + std::string(300000, ']');
  for (const std::string& value : {std::string("1e20"), std::string("0.5"), std::string("-1"),
                                   std::string("9223372036854775808"), std::string("null"), deep}) {
    EXPECT_THROW(parse_manifest(forged("\"steps\":0", "\"steps\":" + value), "m"), c10::Error)
        << value.substr(0, 30);
    EXPECT_THROW(parse_files(R"([{"about":{"name":"f","bytes":)" + value + "}}]", "m"), c10::Error);
  }
}

// ---- Every field, whatever the table holds ----

using nlohmann::ordered_json;
using Pointer = ordered_json::json_pointer;

// A value that no default has in every field.
Manifest full_manifest() {
  Manifest m;
  m.id = "0123";
  m.run = "4567";
  m.saved = 89;
  m.library_version = "0.1";
  m.torch_version = "2";
  m.world_size = 3;
  m.stage = 2;
  m.layout = "contiguous";
  m.bucket_bytes = 4096;
  m.plan_fingerprint = 0xabc;
  m.optimizer = "AdamW";
  m.steps = 5;
  m.skipped_steps = 6;
  m.dynamic_scale = true;
  m.scale = 0.1;
  m.good_steps = 7;
  m.hysteresis_left = 8;
  m.skipped_at_min = 9;
  m.groups = {{{"beta2", 0.999}, {"lr", std::numeric_limits<double>::infinity()}}};
  m.parameters = {{"p", {2, 3}, {1, 2}, at::kBFloat16, 1}};
  m.frozen = {{"f", {2}, {}, at::kHalf, 0}};
  m.buffers = {{"b", {}, {}, at::kLong, 0}};
  m.files = {{"r", 10, ~uint64_t{0}, 1}};
  m.tensors = {{"p", {"master", "exp_avg"}, {{0, 3, 4}}}};
  m.metadata = {{"epoch", "3"}};
  return m;
}

// What versions 1 and 5 have in common.
constexpr char kCommon[] =
    R"("id":"0123","run":"4567","saved":89,)"
    R"("library_version":"0.1","torch_version":"2","metadata":{"epoch":"3"},"steps":5,)"
    R"("skipped_steps":6,"world_size":3,"stage":2,"layout":"contiguous","bucket_bytes":4096,)"
    R"("plan":"0000000000000abc","optimizer":"AdamW","groups":[{"beta2":0.999,"lr":"inf"}],)"
    R"("loss_scale":{"dynamic":true,"scale":0.1,"good_steps":7,"hysteresis_left":8,)"
    R"("skipped_at_min":9},"parameters":[{"name":"p","shape":[2,3],"strides":[1,2],)"
    R"("dtype":"BFloat16","group":1}],"frozen":[{"name":"f","shape":[2],"strides":[],)"
    R"("dtype":"Half","group":0}],"buffers":[{"name":"b","shape":[],"strides":[],)"
    R"("dtype":"Long","group":0}],"files":[{"name":"r","bytes":10,"xxh3":"ffffffffffffffff",)";
constexpr char kVersionOne[] =
    R"("tensors":[{"key":"p[3:7].master","of":"p","kind":"master","begin":3,"numel":4,)"
    R"("xxh3":"0000000000000005"},{"key":"p[3:7].exp_avg","of":"p","kind":"exp_avg","begin":3,)"
    R"("numel":4,"xxh3":"0000000000000006"}]}],)";
constexpr char kVersionFive[] =
    R"("blocks":1}],"tensors":[{"of":"p","kinds":["master","exp_avg"],"pieces":[0,3,4]}],)";

std::string text_of_version(int64_t version, const std::string& end) {
  return signed_again(R"({"format":"zero checkpoint","version":)" + std::to_string(version) + "," +
                      kCommon + end + "\n\"xxh3\": \"\"}\n");
}

// Its text as JSON, and JSON as text with a checksum.
ordered_json fields_of(const Manifest& m) {
  ordered_json root = ordered_json::parse(manifest_text(m));
  root.erase("xxh3");
  return root;
}

std::string text_of(const ordered_json& root) {
  std::string text = root.dump();
  text.back() = ',';
  return signed_again(text + "\n\"xxh3\": \"\"}\n");
}

// All fields of the table: not the options of a group and not metadata, whose names are free.
void visit_fields(const ordered_json& value, const Pointer& at,
                  const std::function<void(const Pointer& field)>& visit) {
  if (value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i) visit_fields(value[i], at / i, visit);
  }
  if (!value.is_object()) return;
  for (const auto& [name, field] : value.items()) {
    visit(at / name);
    if (name != "groups" && name != "metadata") visit_fields(field, at / name, visit);
  }
}

// Calls `visit` with each field in turn, and returns how many there are.
int for_each_field(const std::function<void(const Pointer& field)>& visit) {
  int count = 0;
  visit_fields(fields_of(full_manifest()), Pointer(), [&](const Pointer& field) {
    SCOPED_TRACE(field.to_string());
    ++count;
    visit(field);
  });
  return count;
}

ordered_json without(ordered_json root, const Pointer& field) {
  root[field.parent_pointer()].erase(field.back());
  return root;
}

bool may_be_missing(const Pointer& field) {
  return field.to_string() == "/run" || field.to_string() == "/saved";
}

TEST(ManifestTest, TheBytesOfAVersionAreTheseForEver) {
  EXPECT_EQ(manifest_text(full_manifest()), text_of_version(5, kVersionFive));
  EXPECT_EQ(manifest_text(parse_manifest(manifest_text(full_manifest()), "m")),
            manifest_text(full_manifest()));
}

TEST(ManifestTest, ThatOfVersionOneHasTheSameContent) {
  Manifest m = parse_manifest(text_of_version(1, kVersionOne), "m");
  EXPECT_EQ(m.version, 1);
  EXPECT_EQ(m.files[0].tensor_hashes,
            (std::map<std::string, uint64_t>{{"p[3:7].master", 5}, {"p[3:7].exp_avg", 6}}));
  EXPECT_EQ(m.files[0].blocks, -1);
  m.files[0].blocks = 1;
  EXPECT_EQ(manifest_text(m), manifest_text(full_manifest()));
  // Keys follow from what a tensor holds.
  expect_words(error_of([&] {
                 parse_manifest(text_of_version(1, replaced(kVersionOne, "p[3:7].m", "p[3:8].m")),
                                "m");
               }),
               {"p[3:8].master", "p[3:7].master"});
  expect_words(error_of([&] {
                 parse_manifest(text_of_version(1, replaced(kVersionOne, "\"tensors\"", "\"t\"")),
                                "m");
               }),
               {"the field \"tensors\" of a file, which every file since version 1 has"});
}

// manifest_text() refuses them too, so they are put into its text.
TEST(ManifestTest, PiecesThatNoWriterMakesAreRefusedByTheReader) {
  Manifest m = full_manifest();
  m.tensors.push_back({"f", {"frozen"}, {{0, 0, 2}}});
  const auto error = [&](size_t entry, const std::vector<int64_t>& pieces) {
    ordered_json root = fields_of(m);
    root.at("tensors").at(entry).at("pieces") = pieces;
    return error_of([&] { parse_manifest(text_of(root), "m"); });
  };
  EXPECT_EQ(error(0, {0, 3, 4}), "");
  EXPECT_EQ(error(1, {0, 0, 2}), "");
  expect_words(error(0, {1, 3, 4}), {"p", "file 1"});
  expect_words(error(0, {0, -1, 4}), {"pieces", "whole number from 0"});
  for (const auto& pieces : std::vector<std::vector<int64_t>>{{0, 0, 1}, {0, 1, 2}, {}}) {
    expect_words(error(1, pieces), {"expected one piece of all its elements"});
  }
}

TEST(ManifestTest, TheWriterOfAFileIsTheNumberInItsName) {
  const auto writer = [](const std::string& name) {
    ManifestFile file;
    file.name = name;
    return writer_of(file);
  };
  EXPECT_EQ(writer("rank-00012.safetensors"), 12);
  EXPECT_EQ(writer("frozen.safetensors"), 0);
  EXPECT_EQ(writer("a"), 0);  // of another library, perhaps
  EXPECT_EQ(writer("part7"), 7);
}

TEST(ManifestTest, AFieldThatIsMissingNamesItself) {
  const int count = for_each_field([](const Pointer& field) {
    const std::string text = text_of(without(fields_of(full_manifest()), field));
    const std::string error = error_of([&] { parse_manifest(text, "the/path"); });
    if (may_be_missing(field)) {
      EXPECT_EQ(error, "");
      return;
    }
    const bool before_all = field.back() == "format" || field.back() == "version";
    const char quote = before_all ? '\'' : '"';
    expect_words(error, {"the/path", quote + field.back() + quote});
  });
  EXPECT_EQ(count, 23 + 5 + 3 * 5 + 4 + 3) << "root, loss_scale, parameters, file, tensors";
  expect_words(error_of([&] {
                 parse_manifest(text_of(without(fields_of(full_manifest()), Pointer("/steps"))),
                                "m");
               }),
               {"\"steps\" of the manifest", "since version 1"});
}

TEST(ManifestTest, AFieldOfAnotherTypeNamesItself) {
  for_each_field([](const Pointer& field) {
    ordered_json root = fields_of(full_manifest());
    root[field] = nullptr;
    EXPECT_NE(error_of([&] { parse_manifest(text_of(root), "m"); }), "");
    if (field.to_string() == "/format") return;  // no manifest at all
    expect_words(error_of([&] { parse_manifest(text_of(root), "m"); }), {field.back(), "null"});
  });
}

TEST(ManifestTest, ACountThatNoLoadTakesIsNotWritten) {
  for (int64_t Manifest::*const count : std::initializer_list<int64_t Manifest::*>{
           &Manifest::steps, &Manifest::skipped_steps, &Manifest::good_steps,
           &Manifest::hysteresis_left, &Manifest::skipped_at_min}) {
    Manifest m = full_manifest();
    m.*count = kCountLimit;
    EXPECT_EQ(parse_manifest(manifest_text(m), "m").*count, kCountLimit);
    ++(m.*count);
    expect_words(error_of([&] { manifest_text(m); }), {"expected at most 9007199254740992"});
  }
}

TEST(ManifestTest, AnIdHasNoBlanks) {
  for (const char* id : {"", " ", "a b", "a\nb", "\u00e4"}) {
    Manifest m = full_manifest();
    m.id = id;
    expect_words(error_of([&] { parse_manifest(manifest_text(m), "m"); }),
                 {"id: expected visible characters"});
  }
}

TEST(ManifestTest, TheStrideOfOneElementIsOfNoImportance) {
  const auto order = [](std::vector<int64_t> strides) {
    return memory_order({"conv", {8, 4, 1, 1}, std::move(strides), at::kFloat, 0});
  };
  EXPECT_EQ(order({4, 1, 1, 1}), order({4, 1, 4, 4}));
  EXPECT_NE(order({4, 1, 1, 1}), order({1, 8, 1, 1}));
  EXPECT_EQ(memory_order({"matrix", {2, 3}, {1, 2}, at::kFloat, 0}), (std::vector<size_t>{1, 0}));
}

TEST(ManifestTest, WithoutOptionalFieldsItIsOfAnUnknownRun) {
  ordered_json root = fields_of(full_manifest());
  root.erase("run");
  root.erase("saved");
  const Manifest m = parse_manifest(text_of(root), "m");
  EXPECT_EQ(m.run, "");
  EXPECT_EQ(m.saved, 0);
  Manifest expected = full_manifest();
  expected.run = "";
  expected.saved = 0;
  EXPECT_EQ(manifest_text(m), manifest_text(expected));
}

TEST(ManifestTest, UnknownFieldsAreIgnoredAtEveryLevel) {
  int places = 0;
  for_each_field([&](const Pointer& field) {
    ordered_json root = fields_of(full_manifest());
    root[field.parent_pointer()]["of a later library"] = 7;
    EXPECT_EQ(manifest_text(parse_manifest(text_of(root), "m")), manifest_text(full_manifest()));
    ++places;
  });
  EXPECT_GT(places, 0);
}

TEST(ManifestTest, PartsOfTensorsSayWhereTheyAre) {
  Manifest m = full_manifest();
  m.holders = 4;
  EXPECT_EQ(parse_manifest(manifest_text(m), "m").holders, 4);
  m.parameters = {{"p", {2, 3}, {1, 2}, at::kFloat, 1, {2, 9}, 1, 4}};
  const Manifest back = parse_manifest(manifest_text(m), "m");
  EXPECT_EQ(back.parameters[0].whole, (std::vector<int64_t>{2, 9}));
  EXPECT_EQ(back.parameters[0].dimension, 1);
  EXPECT_EQ(back.parameters[0].from, 4);
  EXPECT_EQ(stored_name(back.parameters[0]), "p{1:4:7}");
  const TensorPart part = part_of(back.parameters[0]);
  EXPECT_EQ(part.boxes.at(0).from, (std::vector<int64_t>{4, 0}));
  EXPECT_EQ(part.boxes.at(0).sizes, (std::vector<int64_t>{3, 2}));
}

TEST(ManifestTest, FormatsOfMomentsAndMastersAreWrittenWhereTheyAreNotFp32) {
  Manifest m = full_manifest();
  EXPECT_EQ(manifest_text(m).find("moments"), std::string::npos);
  m.parameters[0].moments = "int8";
  m.parameters[0].master = "split";
  const Manifest back = parse_manifest(manifest_text(m), "m");
  EXPECT_EQ(back.parameters[0].moments, "int8");
  EXPECT_EQ(back.parameters[0].master, "split");
}

// What a load would refuse is not saved.
TEST(ManifestTest, NamesWithANulAreNotWritten) {
  Manifest m = full_manifest();
  m.parameters[0].name = "a\\u0000b";  // the characters of the escape, and no NUL
  EXPECT_EQ(parse_manifest(manifest_text(m), "m").parameters[0].name, m.parameters[0].name);
  m.parameters[0].name = std::string("a\0b", 3);
  expect_words(error_of([&] { manifest_text(m); }), {"without a NUL", "rename what has it"});
  m = full_manifest();
  m.metadata = {{"key", std::string(1000, 'x') + std::string("a\0b", 3) + std::string(1000, 'y')}};
  const std::string error = error_of([&] { manifest_text(m); });
  expect_words(error, {"without a NUL, got \"xx", "xa\\x00by"});
  EXPECT_LT(error.size(), 250u);
}

TEST(ManifestTest, AveragesOfParametersAreAKindOfTheirOwn) {
  Manifest m = full_manifest();
  EXPECT_FALSE(has_ema(m));
  m.tensors.at(0).kinds.emplace_back(kEmaKind);
  EXPECT_TRUE(has_ema(parse_manifest(manifest_text(m), "m")));
}

// The kinds of a piece go together, and so do the pieces that have the same kinds.
TEST(ManifestTest, TensorsAreListedByNameAndFoundAgain) {
  const std::vector<ManifestTensor> first = {{"a", "master", 0, 4}, {"a", "step", 0, 4},
                                             {"b", "master", 0, 2}, {"a", "master", 6, 1},
                                             {"a", "step", 6, 1},   {".note", "state", 0, 3}};
  const std::vector<ManifestTensor> second = {
      {"a", "master", 4, 2}, {"a", "step", 4, 2}, {"b", "master", 2, 2}, {"b", "step", 2, 2}};
  Manifest m = full_manifest();
  m.files.clear();
  m.tensors.clear();
  add_files({{{"x", 99, 1, 0}, tensors_by_name(first), {{"a", "step", 7}}},
             {{"y", 99, 1, 0}, tensors_by_name(second), {{"a", "step", 7}, {"b", "step", 8}}}},
            m);
  ASSERT_EQ(m.tensors.size(), 4u) << "a, b without a step, the note, b with one";
  std::multiset<std::string> listed, expected;
  for (const ManifestTensors& entry : m.tensors) {
    for (const ManifestPiece& p : entry.pieces) {
      for (const std::string& kind : entry.kinds) {
        listed.insert(std::to_string(p.file) + tensor_key({entry.owner, kind, p.begin, p.numel}));
      }
    }
  }
  for (const ManifestTensor& t : first) expected.insert("0" + tensor_key(t));
  for (const ManifestTensor& t : second) expected.insert("1" + tensor_key(t));
  EXPECT_EQ(listed, expected);
  EXPECT_EQ(listed.count("0.note"), 1u);
  EXPECT_EQ(listed.count("1a[4:6].step"), 1u);
  expect_words(error_of([&] {
                 add_files({{{"z", 99, 1, 0}, {}, {{"b", "step", 8}}},
                            {{"last", 99, 1, 0}, {}, {{"b", "step", 9}}}},
                           m);
               }),
               {"parameter b: expected one step for all its pieces", "in last"});
}

TEST(ManifestTest, PartsOfFusedTensorsHaveSections) {
  Manifest m = full_manifest();
  m.parameters = {{"p", {2, 4}, {4, 1}, at::kFloat, 1, {2, 8}, 1, 4, {2, 6}}};
  const Manifest back = parse_manifest(manifest_text(m), "m");
  EXPECT_EQ(back.parameters[0].sections, (std::vector<int64_t>{2, 6}));
  const auto refused = [&](const std::vector<int64_t>& sections, int64_t from) {
    m.parameters[0].sections = sections;
    m.parameters[0].from = from;
    expect_words(error_of([&] { parse_manifest(manifest_text(m), "m"); }),
                 {"parameter p: expected sections of 8 elements of dimension 1 together"});
  };
  refused({2, 5}, 4);
  refused({3, 5}, 4);
  refused({8, 0}, 4);
  refused({INT64_MAX, 2}, 4);
  refused({2, 6}, 2);
  m.parameters[0].whole.clear();
  EXPECT_NE(error_of([&] { parse_manifest(manifest_text(m), "m"); }), "");
}

TEST(ManifestTest, PartsOutsideOfTheirWholeAreRefused) {
  const ManifestParameter part{"p", {2, 3}, {3, 1}, at::kFloat, 0, {2, 9}, 1, 4};
  std::vector<ManifestParameter> bad(6, part);
  bad[0].from = 7;
  bad[1].dimension = 2;
  bad[2].dimension = 0;
  bad[3].whole = {2};
  bad[4].whole = {3, 9};
  bad[5].from = INT64_MAX;
  for (const ManifestParameter& p : bad) {
    Manifest m;
    m.id = "1";
    m.parameters = {p};
    ordered_json root = fields_of(full_manifest());
    root["version"] = 2;
    root["parameters"][0].update({{"shape", p.shape},
                                  {"strides", p.strides},
                                  {"whole", p.whole},
                                  {"dimension", p.dimension},
                                  {"from", p.from}});
    expect_words(error_of([&] { parse_manifest(text_of(root), "m"); }),
                 {"parameter p: expected a part of a tensor"});
  }
  ordered_json root = fields_of(full_manifest());
  const int64_t huge = int64_t{1} << 40;
  root["parameters"][0].update({{"shape", {huge, 1}},
                                {"strides", {1, 1}},
                                {"whole", {huge, huge}},
                                {"dimension", 1},
                                {"from", 0}});
  expect_words(error_of([&] { parse_manifest(text_of(root), "m"); }), {"bytes fit 63 bits"});
}

TEST(ManifestTest, AnotherVersionIsRefusedWithTheLibraryThatReadsIt) {
  EXPECT_EQ(parse_manifest(manifest_text(full_manifest()), "m").version, kCheckpointVersion);
  for (const int64_t version : {int64_t{0}, kCheckpointVersion + 1, INT64_MAX}) {
    ordered_json root = fields_of(full_manifest());
    root["version"] = version;
    root["library_version"] = "7.5";
    expect_words(error_of([&] { parse_manifest(text_of(root), "m"); }),
                 {"expected format version 1 to " + std::to_string(kCheckpointVersion),
                  "got " + std::to_string(version) + " of library 7.5", "load it with that"});
  }
}

}  // namespace
}  // namespace zero
