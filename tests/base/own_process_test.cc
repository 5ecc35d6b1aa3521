// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/own_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>

#include "tests/support/error_of.h"

namespace zero {
namespace {

// What `body` returns in a forked child.
bool in_a_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 1 : 0);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status) == 1;
}

TEST(OwnProcessTest, OnlyTheProcessThatMadeItIsItsOwn) {
  const OwnProcess process;
  EXPECT_TRUE(process.here());
  process.check("broadcast");
  EXPECT_FALSE(in_a_child([&] { return process.here(); }));
  EXPECT_TRUE(in_a_child([&] {
    const std::string text = error_of([&] { process.check("broadcast"); });
    return text.find("broadcast: expected process " + std::to_string(getppid())) == 0 &&
           text.find("got its forked child " + std::to_string(getpid())) != std::string::npos;
  }));
  EXPECT_TRUE(in_a_child([] { return OwnProcess().here(); }));
}

struct Counted {
  explicit Counted(int* ended) : ended(ended) {}
  ~Counted() { ++*ended; }
  int* ended;
};

TEST(OwnProcessTest, AChildDoesNotDestroyWhatItsParentOwns) {
  int ended = 0;
  auto object = make_owned<Counted>(&ended);
  EXPECT_TRUE(in_a_child([&] {
    object.reset();
    return ended == 0;
  }));
  EXPECT_EQ(ended, 0);
  object.reset();
  EXPECT_EQ(ended, 1);
}

}  // namespace
}  // namespace zero
