// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/hashed_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "tests/support/error_of.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

class HashedFileTest : public ::testing::Test {
 protected:
  HashedFileTest() { fs::remove(path_); }

  uint64_t write(const std::string& content) const {
    FileWriter writer(path_);
    writer.write(content.data(), content.size());
    writer.finish();
    EXPECT_EQ(writer.bytes(), content.size());
    return writer.hash();
  }

  const std::string path_ = ::testing::TempDir() + "/hashed_file";
  // Two parts and a bit.
  const std::string content_ =
      std::string(StoredBytes::kPart, 'a') + std::string(StoredBytes::kPart, 'b') + "c";
};

TEST_F(HashedFileTest, TheHashOfPartsIsThatOfTheWhole) {
  EXPECT_EQ(content_hash("", 0), 0x2d06800538d394c2u);  // from the specification of XXH3
  ContentHash hash;
  hash.add(content_.data(), 5);
  hash.add(content_.data() + 5, 0);
  hash.add(content_.data() + 5, content_.size() - 5);
  EXPECT_EQ(hash.value(), content_hash(content_.data(), content_.size()));
  hash.reset();
  EXPECT_EQ(hash.value(), content_hash("", 0));
}

TEST_F(HashedFileTest, AHashIsSixteenDigits) {
  EXPECT_EQ(hash_text(0x0123456789abcdefu), "0123456789abcdef");
  EXPECT_EQ(parse_hash("0123456789abcdef"), 0x0123456789abcdefu);
  for (const char* text : {"", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF"}) {
    expect_words(error_of([&] { parse_hash(text); }), {"16 hexadecimal digits", text});
  }
}

TEST_F(HashedFileTest, WhatWasWrittenIsReadAndHashedInParts) {
  const uint64_t hash = write(content_);
  EXPECT_EQ(hash, content_hash(content_.data(), content_.size()));
  FileReader reader(path_);
  EXPECT_EQ(reader.size(), content_.size());
  std::string read;
  const auto take = [&](uint64_t at, const char* data, size_t bytes) {
    EXPECT_EQ(at, read.size());
    EXPECT_LE(bytes, StoredBytes::kPart);
    read.append(data, bytes);
  };
  EXPECT_EQ(reader.scan(0, reader.size(), take), hash);
  EXPECT_EQ(read, content_);
  EXPECT_EQ(reader.read_text(StoredBytes::kPart - 1, 2), "ab");
  EXPECT_EQ(reader.bytes_read(), content_.size() + 2);
}

TEST_F(HashedFileTest, NothingIsReadBehindTheEnd) {
  write("abc");
  FileReader reader(path_);
  EXPECT_EQ(reader.read_text(3, 0), "");
  expect_words(error_of([&] { reader.read_text(1, 3); }),
               {path_, "expected 3 bytes at 1", "3 bytes"});
  expect_words(error_of([&] { reader.read_text(4, 0); }), {path_, "expected 0 bytes at 4"});
  fs::resize_file(path_, 2);
  expect_words(error_of([&] { reader.read_text(0, 3); }), {path_, "it was truncated"});
}

TEST_F(HashedFileTest, PathsThatCannotServeAreNamed) {
  expect_words(error_of([&] { FileReader reader(path_); }), {"cannot open " + path_, "errno 2"});
  write("abc");
  expect_words(error_of([&] { FileWriter writer(path_); }), {"cannot create " + path_, "errno 17"});
  const std::string with_nul = path_ + std::string(1, '\0') + "x";
  expect_words(error_of([&] { FileReader reader(with_nul); }), {"without a NUL", "\\x00x"});
  expect_words(error_of([&] { sync_folder(path_ + "/none"); }), {"cannot open folder"});
}

// A daemon may have closed its standard input.
TEST_F(HashedFileTest, AFileMayHaveTheNumberOfStandardInput) {
  const int input = dup(STDIN_FILENO);
  close(STDIN_FILENO);
  const std::string writing = error_of([&] { write("abc"); });
  std::string content;
  const std::string reading = error_of([&] { content = FileReader(path_).read_text(0, 3); });
  if (input >= 0) {
    dup2(input, STDIN_FILENO);
    close(input);
  }
  EXPECT_EQ(writing + reading, "");
  EXPECT_EQ(content, "abc");
}

}  // namespace
}  // namespace zero
