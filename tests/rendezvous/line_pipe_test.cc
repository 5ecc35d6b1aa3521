// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/rendezvous/line_pipe.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <list>
#include <memory>
#include <string>
#include <utility>

namespace zero {
namespace {

// A child's stream and the terminal behind it, both of this process.
class LinePipeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(pipe2(child.data(), O_CLOEXEC | O_NONBLOCK), 0);
    ASSERT_EQ(pipe2(terminal.data(), O_CLOEXEC | O_NONBLOCK), 0);
  }
  void TearDown() override {
    for (const int file : {child[1], terminal[0], terminal[1]}) close(file);
  }
  void print(const std::string& text) const {
    ASSERT_EQ(write(child[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  std::string shown() const {
    std::string text;
    std::array<char, 4096> part;
    for (ssize_t count; (count = read(terminal[0], part.data(), part.size())) > 0;) {
      text.append(part.data(), static_cast<size_t>(count));
    }
    return text;
  }

  std::array<int, 2> child, terminal;
};

TEST_F(LinePipeTest, LinesPassWithTheirPrefixOnceTheyAreWhole) {
  LinePipe lines(child[0], std::make_shared<LineTarget>(terminal[1]), "[1] ");
  lines.drain();
  EXPECT_EQ(shown(), "");
  print("loss 3\nlo");
  lines.drain();
  EXPECT_EQ(shown(), "[1] loss 3\n");
  print("ss 2\n\nend");
  lines.drain();
  EXPECT_EQ(shown(), "[1] loss 2\n[1] \n");
  lines.close_now();
  EXPECT_EQ(shown(), "[1] end\n");
  EXPECT_FALSE(lines.open());
}

TEST_F(LinePipeTest, AProgressBarBecomesLines) {
  LinePipe lines(child[0], std::make_shared<LineTarget>(terminal[1]), "");
  print("\r 10 %\r 20 %\r\ndone\r\n");
  lines.drain();
  EXPECT_EQ(shown(), " 10 %\n 20 %\ndone\n");
  lines.close_now();
}

TEST_F(LinePipeTest, ALineWithoutEndIsPassedOnInParts) {
  constexpr size_t kPart = 64 << 10;
  ASSERT_GT(fcntl(child[1], F_SETPIPE_SZ, 4 * kPart), 0);
  ASSERT_GT(fcntl(terminal[1], F_SETPIPE_SZ, 4 * kPart), 0);
  LinePipe lines(child[0], std::make_shared<LineTarget>(terminal[1]), "> ");
  print(std::string(kPart + 10, 'x'));
  lines.drain();
  EXPECT_EQ(shown(), "> " + std::string(kPart, 'x') + "\n");
  lines.close_now();
  EXPECT_EQ(shown(), "> " + std::string(10, 'x') + "\n");
}

// As another program may leave a terminal.
TEST_F(LinePipeTest, AFullTerminalThatDoesNotBlockLosesNoLine) {
  ASSERT_GT(fcntl(terminal[1], F_SETPIPE_SZ, 4096), 0);
  LinePipe lines(child[0], std::make_shared<LineTarget>(terminal[1]), "> ");
  std::string printed, expected, seen;
  for (int line = 0; line < 2000; ++line) {
    printed += std::to_string(line) + "\n";
    expected += "> " + std::to_string(line) + "\n";
  }
  print(printed);
  for (int tries = 0; seen.size() < expected.size() && tries < 5000; ++tries) {
    lines.drain();
    seen += shown();
  }
  EXPECT_EQ(seen, expected);
}

// The launcher has other ranks, and signals to pass on.
TEST_F(LinePipeTest, AReaderThatStallsIsNotWaitedFor) {
  ASSERT_EQ(fcntl(terminal[1], F_SETFL, 0), 0);  // it blocks, as most do
  ASSERT_GT(fcntl(terminal[1], F_SETPIPE_SZ, 4096), 0);
  const auto target = std::make_shared<LineTarget>(terminal[1]);
  LinePipe lines(child[0], target, "> ");
  const std::string line(3000, 'x');
  for (int i = 0; i < 5; ++i) print(line + "\n");
  lines.drain();
  EXPECT_TRUE(target->full());
  print("more\n");
  lines.drain();
  std::array<char, 8> left;
  EXPECT_EQ(read(child[0], left.data(), left.size()), 5) << "the child waits, too";
  print("last");
  lines.close_now();
  target->add("of another\n");
  std::string seen;
  for (int tries = 0; target->full() && tries < 5000; ++tries) {
    seen += shown();
    target->write_out();
  }
  seen += shown();
  std::string expected;
  for (int i = 0; i < 5; ++i) expected += "> " + line + "\n";
  EXPECT_EQ(seen, expected + "> last\nof another\n");
}

// It is writable with room for one byte. A test that hangs ends by SIGALRM.
TEST_F(LinePipeTest, ATerminalThatStallsIsNotWaitedFor) {
  const int reader = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_EQ(grantpt(reader) + unlockpt(reader), 0);
  const int blocking = open(ptsname(reader), O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_GE(blocking, 0);
  const auto target = std::make_shared<LineTarget>(blocking);
  alarm(30);
  std::string expected;
  for (int line = 0; line < 2000; ++line) {
    target->add("line " + std::to_string(line) + " of a rank\n");
    expected += "line " + std::to_string(line) + " of a rank\r\n";
  }
  alarm(0);
  EXPECT_TRUE(target->full());
  EXPECT_EQ(fcntl(blocking, F_GETFL) & O_NONBLOCK, 0) << "it is shared with other programs";
  ASSERT_EQ(fcntl(reader, F_SETFL, O_NONBLOCK), 0);
  std::string seen;
  std::array<char, 4096> part;
  for (int tries = 0; seen.size() < expected.size() && tries < 5000; ++tries) {
    for (ssize_t count; (count = read(reader, part.data(), part.size())) > 0;) {
      seen.append(part.data(), static_cast<size_t>(count));
    }
    target->write_out();
  }
  EXPECT_EQ(seen, expected);
  close(blocking);
  close(reader);
}

// What is passed on comes back, as from a child that prints all the time.
TEST_F(LinePipeTest, AStreamThatIsNeverEmptyKeepsNobodyElseWaiting) {
  LinePipe lines(child[0], std::make_shared<LineTarget>(child[1]), "");
  print("more\n");
  lines.drain();
  EXPECT_TRUE(lines.open());
}

// As where the child cannot be started.
TEST_F(LinePipeTest, ItsEndClosesTheStreamOnce) {
  {
    std::list<LinePipe> pipes;
    pipes.emplace_back(child[0], std::make_shared<LineTarget>(terminal[1]), "");
    const std::list<LinePipe> moved = std::move(pipes);
    EXPECT_NE(fcntl(child[0], F_GETFD), -1);
    print("last");
  }
  EXPECT_EQ(fcntl(child[0], F_GETFD), -1);
  EXPECT_EQ(shown(), "");
}

TEST_F(LinePipeTest, TheEndOfTheStreamClosesIt) {
  LinePipe lines(child[0], std::make_shared<LineTarget>(terminal[1]), "");
  print("last");
  close(child[1]);
  lines.drain();
  EXPECT_EQ(shown(), "last\n");
  EXPECT_FALSE(lines.open());
  EXPECT_EQ(fcntl(child[0], F_GETFD), -1);
  child[1] = -1;
}

}  // namespace
}  // namespace zero
