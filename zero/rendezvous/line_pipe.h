// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Passes on the output of a child process line by line.
#pragma once

#include <string>
#include <utility>

namespace zero {

// One of a child's output streams. A progress bar ends its lines by a carriage return. It becomes a
// line feed: the next line may be another rank's, and must not overwrite this one. A line longer
// than 64 KiB is passed on in parts, so that a child that ends none takes no more memory.
class LinePipe {
 public:
  // Reads `from`, which must not block and is this object's own, and writes to `to` with `prefix`
  // before each line.
  LinePipe(int from, int to, std::string prefix)
      : from_(from), to_(to), prefix_(std::move(prefix)) {}
  // Closes `from`, and passes nothing on.
  ~LinePipe();
  LinePipe(LinePipe&& other) noexcept;
  LinePipe& operator=(LinePipe&&) = delete;
  int descriptor() const { return from_; }
  bool open() const { return from_ >= 0; }

  // Passes on the lines that have arrived, without blocking for more.
  void drain();
  // Passes on the rest, also of a line that has no end, and closes `from`.
  void close_now();

 private:
  void pass_on_lines();

  int from_;
  const int to_;
  std::string prefix_;
  std::string text_;
  bool returned_ = false;  // the last line ended with a carriage return
};

}  // namespace zero
