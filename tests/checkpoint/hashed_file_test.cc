// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/hashed_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

class HashedFileTest : public ::testing::Test {
 protected:
  HashedFileTest() { fs::remove(path_); }

  void write(const std::string& content) const {
    FileWriter writer(path_);
    writer.write(content.data(), content.size());
    writer.finish();
    EXPECT_EQ(writer.bytes(), content.size());
  }

  // From an address that is `shift` bytes behind a multiple of 4096.
  void write_from(const std::string& content, size_t part, size_t shift) const {
    const std::unique_ptr<char, void (*)(void*)> memory(
        static_cast<char*>(std::aligned_alloc(4096, (content.size() + shift + 4095) / 4096 * 4096)),
        std::free);
    content.copy(memory.get() + shift, content.size());
    FileWriter writer(path_);
    for (size_t at = 0; at < content.size(); at += part) {
      writer.write(memory.get() + shift + at, std::min(part, content.size() - at));
      EXPECT_EQ(writer.bytes(), std::min(at + part, content.size()));
    }
    writer.finish();
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
}

TEST_F(HashedFileTest, AHashIsSixteenDigits) {
  EXPECT_EQ(hash_text(0x0123456789abcdefu), "0123456789abcdef");
  EXPECT_EQ(parse_hash("0123456789abcdef"), 0x0123456789abcdefu);
  for (const char* text : {"", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF"}) {
    expect_words(error_of([&] { parse_hash(text); }), {"16 hexadecimal digits", text});
  }
}

// Else its descriptor would stay open, and a file system of a network would keep a file that is
// removed.
TEST_F(HashedFileTest, AFileIsNotOpenedWithoutMemoryToWriteIt) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &limit), 0);
  const rlimit none{0, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &none), 0);
  std::vector<void*> taken;  // what the heap has still
  do {
    taken.push_back(std::aligned_alloc(4096, StoredBytes::kPart));
  } while (taken.back() != nullptr);
  std::string error;
  error.reserve(4096);
  error = error_of([&] { FileWriter writer(path_); });
  for (void* const memory : taken) std::free(memory);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  expect_words(error, {"cannot write", "hashed_file"});
  EXPECT_FALSE(fs::exists(path_));
}

TEST_F(HashedFileTest, WhatWasWrittenIsReadAndHashedInParts) {
  write(content_);
  const uint64_t hash = content_hash(content_.data(), content_.size());
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

std::string letters(size_t bytes) {
  std::string content(bytes, ' ');
  for (size_t i = 0; i < bytes; ++i) content[i] = static_cast<char>('a' + i * 2654435761u % 26);
  return content;
}

// 4 MiB are collected before they are written; a disk's blocks have 4 KiB at most.
TEST_F(HashedFileTest, AFileOfAnySizeHasTheBytesThatWereWrittenInParts) {
  constexpr size_t kCollected = size_t{4} << 20;
  for (const size_t bytes : {kCollected - 1, kCollected, kCollected + 1, kCollected + 4096,
                             2 * kCollected, 2 * kCollected + 4096 + 5}) {
    fs::remove(path_);
    const std::string content = letters(bytes);
    FileWriter writer(path_);
    for (size_t at = 0; at < bytes; at += 1000003) {
      writer.write(content.data() + at, std::min(size_t{1000003}, bytes - at));
    }
    writer.finish();
    FileReader reader(path_);
    ASSERT_EQ(reader.size(), bytes);
    EXPECT_TRUE(reader.read_text(0, bytes) == content) << bytes;
  }
}

// Whether what this process writes to `path`, which it has open, passes by the page cache.
bool is_direct(const std::string& path) {
  for (const auto& link : fs::directory_iterator("/proc/self/fd")) {
    std::error_code not_a_file;
    if (!fs::equivalent(link.path(), path, not_a_file)) continue;
    return (fcntl(std::stoi(link.path().filename()), F_GETFL) & O_DIRECT) != 0;
  }
  ADD_FAILURE() << path << " is not open";
  return false;
}

TEST_F(HashedFileTest, ALargeFileIsWrittenPastThePageCacheWhereThatIsPossible) {
  constexpr size_t kPart = FileWriter::kPart;
  constexpr size_t kAlign = 4096;
  const std::unique_ptr<char, void (*)(void*)> memory(
      static_cast<char*>(std::aligned_alloc(kAlign, 2 * kPart)), std::free);
  std::fill_n(memory.get(), 2 * kPart, 'a');
  const int probe = open(path_.c_str(), O_WRONLY | O_CREAT | O_DIRECT, 0644);
  const bool possible = probe >= 0 && ::write(probe, memory.get(), kAlign) == kAlign;
  if (probe >= 0) close(probe);
  if (!possible) GTEST_SKIP() << "a file system without O_DIRECT";
  for (const size_t shift : {0, 8}) {
    fs::remove(path_);
    FileWriter writer(path_);
    writer.write(memory.get() + shift, kPart - 1);
    EXPECT_FALSE(is_direct(path_)) << "small files gain nothing";
    writer.write(memory.get() + shift, kPart + 1);
    EXPECT_TRUE(is_direct(path_)) << shift;
    writer.finish();
  }
}

// From any address and in any parts, though only some of them are written without a copy.
TEST_F(HashedFileTest, AFileHasTheBytesOfAnyParts) {
  constexpr size_t kLarge = FileWriter::kPart;
  for (const size_t bytes : {size_t{0}, size_t{5}, kLarge - 1, kLarge, 2 * kLarge + 4096 + 5}) {
    const std::string content = letters(bytes);
    for (const size_t part : {kLarge, kLarge + 512, size_t{1000003}}) {
      for (const size_t shift : {0, 8, 512}) {
        fs::remove(path_);
        write_from(content, part, shift);
        FileReader reader(path_);
        ASSERT_EQ(reader.size(), bytes) << part << " " << shift;
        EXPECT_TRUE(reader.read_text(0, bytes) == content) << bytes << " " << part << " " << shift;
      }
    }
  }
}

TEST_F(HashedFileTest, AClosedFileHasItsContent) {
  FileWriter writer(path_);
  writer.write("abc", 3);
  writer.close();
  EXPECT_EQ(FileReader(path_).read_text(0, 3), "abc");
}

// In the middle of what passes by the page cache, off the blocks of a disk.
TEST_F(HashedFileTest, AFileSizeLimitIsAnErrorAndNotASignal) {
  struct rlimit before {};
  getrlimit(RLIMIT_FSIZE, &before);
  struct rlimit small = before;
  small.rlim_cur = (6u << 20) + 100;
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = error_of([&] { write(letters(size_t{12} << 20)); });
  setrlimit(RLIMIT_FSIZE, &before);
  expect_words(error, {"cannot write " + path_, "errno 27"});
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
