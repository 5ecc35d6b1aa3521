// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/descriptors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

bool inherited(int descriptor) { return (fcntl(descriptor, F_GETFD) & FD_CLOEXEC) == 0; }

struct Pipe {
  Pipe() { EXPECT_EQ(pipe(ends.data()), 0); }
  ~Pipe() {
    for (const int end : ends) close(end);
  }
  bool inherited() const { return zero::inherited(ends[0]) && zero::inherited(ends[1]); }
  std::array<int, 2> ends{};
};

struct Epoll {
  Epoll() : descriptor(epoll_create1(0)) {}
  ~Epoll() { close(descriptor); }
  void watch(int other) {
    epoll_event event{};
    EXPECT_EQ(epoll_ctl(descriptor, EPOLL_CTL_ADD, other, &event), 0);
  }
  const int descriptor;
};

TEST(NewDescriptorsTest, WhatAnEpollInstanceWatchesIsClosedOnExec) {
  Epoll old;
  const NewDescriptors descriptors;
  Epoll made;
  const Pipe watched, other;
  made.watch(watched.ends[0]);
  old.watch(other.ends[0]);
  EXPECT_EQ(descriptors.watched(), std::vector<int>{watched.ends[0]});
  descriptors.close_watched_on_exec();
  EXPECT_FALSE(inherited(made.descriptor));
  // The end that is written to as well.
  EXPECT_FALSE(inherited(watched.ends[0]) || inherited(watched.ends[1]));
  EXPECT_TRUE(other.inherited());
  EXPECT_TRUE(inherited(old.descriptor));
}

// As where another thread has closed what it looked at.
TEST(NewDescriptorsTest, ANumberThatIsGivenAgainIsNew) {
  const Pipe watched;
  const int closed = open("/proc/self/fd", O_RDONLY | O_DIRECTORY);
  const NewDescriptors descriptors;
  close(closed);
  Epoll made;
  ASSERT_EQ(made.descriptor, closed);
  made.watch(watched.ends[0]);
  EXPECT_EQ(descriptors.watched(), std::vector<int>{watched.ends[0]});
}

TEST(NewDescriptorsTest, NewPipesWithBothEndsHereAreClosedOnExec) {
  const Pipe old;
  const NewDescriptors descriptors;
  const Pipe made;
  Pipe half;
  close(half.ends[1]);
  const Epoll epoll;
  descriptors.close_pipes_on_exec();
  EXPECT_FALSE(inherited(made.ends[0]) || inherited(made.ends[1]));
  EXPECT_TRUE(inherited(half.ends[0]));
  EXPECT_TRUE(old.inherited());
  EXPECT_TRUE(inherited(epoll.descriptor));
  half.ends[1] = -1;
}

TEST(DescriptorRoomTest, ALowSoftLimitIsRaisedAndALowHardOneIsAnError) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 64;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_EQ(make_room_for_descriptors(4), "");
  rlimit now{};
  getrlimit(RLIMIT_NOFILE, &now);
  EXPECT_EQ(now.rlim_cur, 64u);
  EXPECT_EQ(make_room_for_descriptors(100), "");
  getrlimit(RLIMIT_NOFILE, &now);
  EXPECT_EQ(now.rlim_cur, before.rlim_max);
  expect_words(make_room_for_descriptors(2000000000),
               {"too few file descriptors", "2000000000 are needed", "ulimit -n"});
  setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace zero
