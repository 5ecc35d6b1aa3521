// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Passes on the output of a child process line by line.
#pragma once

#include <memory>
#include <string>
#include <utility>

namespace zero {

// Where lines go, whole ones of all pipes one after the other. Its reader may stall: what it does
// not take is kept, and nothing here waits for it.
class LineTarget {
 public:
  // Writes to `to`, which stays the caller's and may block.
  explicit LineTarget(int to);
  ~LineTarget();
  LineTarget(const LineTarget&) = delete;
  LineTarget& operator=(const LineTarget&) = delete;
  int descriptor() const { return own_ >= 0 ? own_ : to_; }
  // Whether the reader has yet to take something.
  bool full() const { return !waiting_.empty(); }
  // Whether it has taken nothing although poll() found room, as a terminal with too little for a
  // line feed.
  bool refused() const { return refused_; }

  void add(const std::string& text);
  // Writes what the reader takes.
  void write_out();

 private:
  const int to_;
  int own_ = -1;  // what `to_` writes to, without blocking; -1: there is none
  std::string waiting_;
  bool refused_ = false;
};

// One of a child's output streams. A progress bar ends its lines by a carriage return. It becomes a
// line feed: the next line may be another rank's, and must not overwrite this one. A line longer
// than 64 KiB is passed on in parts, so that a child that ends none takes no more memory. While the
// target is full the child's stream is not read, so that a child waits for a reader that stalls.
class LinePipe {
 public:
  // Reads `from`, which must not block and is this object's own, and writes to `to` with `prefix`
  // before each line.
  LinePipe(int from, std::shared_ptr<LineTarget> to, std::string prefix)
      : from_(from), to_(std::move(to)), prefix_(std::move(prefix)) {}
  // Closes `from`, and passes nothing on.
  ~LinePipe();
  LinePipe(const LinePipe&) = delete;
  LinePipe& operator=(const LinePipe&) = delete;
  int descriptor() const { return from_; }
  bool open() const { return from_ >= 0; }
  LineTarget& target() const { return *to_; }

  // Passes on the lines that have arrived, as far as the target takes them.
  void drain();
  // Passes on what has arrived, also of a line that has no end, and closes `from`. The target keeps
  // what its reader does not take.
  void close_now();

 private:
  void read_on(bool while_full);
  void pass_on_lines();
  void end();

  int from_;
  const std::shared_ptr<LineTarget> to_;
  const std::string prefix_;
  std::string text_;
  bool returned_ = false;  // the last line ended with a carriage return
};

}  // namespace zero
