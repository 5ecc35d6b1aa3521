// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Files whose every error carries path and errno, and the hash of what is in them. What they throw
// is c10::Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

namespace zero {

// XXH3 (64 bits) of bytes that come in parts.
class ContentHash {
 public:
  ContentHash();
  ~ContentHash();
  void add(const void* data, size_t bytes);
  uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

uint64_t content_hash(const void* data, size_t bytes);
// 16 hexadecimal digits, and back. parse_hash() throws for anything else.
inline constexpr size_t kHashDigits = 16;
std::string hash_text(uint64_t hash);
bool is_hash_text(const std::string& text);
uint64_t parse_hash(const std::string& text);

// `text` for an error: "\\x00" and so on in place of control characters, at which some
// readers of errors stop.
std::string printable(const std::string& text);
// Throws for a NUL, at which the system's calls would cut the path off.
void check_path(const std::string& path);

// A new file. Nothing is in it for sure before close(), and nothing on disk before finish().
//
// Bytes are collected, unless they are many at an address that is a multiple of 4096, and go to the
// disk past the page cache where the file system can do that (O_DIRECT): what is written once and
// hardly ever read again costs the processor a tenth then, and pushes nothing out of the cache.
class FileWriter {
 public:
  // Throws when `path` exists.
  explicit FileWriter(std::string path);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  // A file-size limit is an error, here or later, and not a signal.
  void write(const void* data, size_t bytes);
  // Of so many bytes nothing is collected.
  static constexpr size_t kPart = size_t{4} << 20;
  // Waits until the content is on disk, and closes.
  void finish();
  // Only closes: others see the content, which a crash of the machine may lose.
  void close();

  uint64_t bytes() const { return bytes_; }

 private:
  // Writes what is collected.
  void flush();
  void write_out(const char* data, size_t bytes);
  // Whether writes pass by the page cache from now on, if the file system can do that.
  void set_direct(bool direct);

  const std::string path_;
  int descriptor_ = -1;
  bool direct_ = false;
  bool small_ = true;  // no whole part has been written
  uint64_t bytes_ = 0;
  std::unique_ptr<char, void (*)(void*)> collected_;
  size_t collected_bytes_ = 0;
};

// The bytes of a file, wherever they are kept.
class StoredBytes {
 public:
  StoredBytes(std::string path, uint64_t size) : path_(std::move(path)), size_(size) {}
  virtual ~StoredBytes() = default;
  StoredBytes(const StoredBytes&) = delete;
  StoredBytes& operator=(const StoredBytes&) = delete;

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  // Throws when the file ends before.
  virtual void read(uint64_t offset, void* data, size_t bytes) = 0;
  std::string read_text(uint64_t offset, size_t bytes);
  // Gives [begin, end) to `take` in parts of at most kPart bytes. `at` counts from `begin`.
  static constexpr size_t kPart = size_t{1} << 20;
  using Take = std::function<void(uint64_t at, const char* data, size_t bytes)>;
  void read_parts(uint64_t begin, uint64_t end, const Take& take);
  // The same, and returns the hash of it all.
  uint64_t scan(uint64_t begin, uint64_t end, const Take& take = nullptr);

  // Gives back what the next read can get again: memory, and a descriptor.
  virtual void release() { buffer_.reset(); }

  // The bytes of all reads so far.
  uint64_t bytes_read() const { return bytes_read_; }

 protected:
  const std::string path_;
  uint64_t size_ = 0;
  uint64_t bytes_read_ = 0;

 private:
  std::unique_ptr<char[]> buffer_;
};

// Reads parts of a file, without mapping it: a file that shrinks or a disk that
// fails is then an error and not a signal, and memory is this class's buffer.
class FileReader final : public StoredBytes {
 public:
  // Throws, at once, for anything but a file: folders, pipes, devices.
  explicit FileReader(std::string path);
  ~FileReader() override;

  void read(uint64_t offset, void* data, size_t bytes) override;
  // Closes the file. The next read opens it again, and throws if its size is another one.
  void release() override;

 private:
  // Returns the size.
  uint64_t open_file();

  int descriptor_ = -1;
};

// Waits until the names in a folder are on disk.
void sync_folder(const std::string& path);

// "text: No space left on device (errno 28)".
[[noreturn]] void throw_errno(const std::string& text, int error);
// Returns whether `error` says that there is no such file.
bool is_not_there(const std::error_code& error);

}  // namespace zero
