// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The program that launch_test starts: launch_program <ranks> <scene> [prefix]

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "zero/launch.h"
#include "zero/process_group.h"

namespace {

int forks_left = INT_MAX;

}  // namespace

// In place of the C library's, for a process that can start no more.
extern "C" pid_t fork() noexcept {
  if (forks_left-- > 0) return reinterpret_cast<pid_t (*)()>(dlsym(RTLD_NEXT, "fork"))();
  errno = EAGAIN;
  return -1;
}

namespace {

zero::Group init(std::chrono::milliseconds timeout) {
  zero::InitOptions options;
  options.timeout = timeout;
  return zero::init_process_group(options);
}

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

// All ranks talk over two communicators of one name and two inits.
int scene_ok() {
  for (int round = 0; round < 2; ++round) {
    const zero::Group group = init(std::chrono::seconds(20));
    const auto first = group.make_communicator("data", zero::Purpose::kData);
    const auto second = group.make_communicator("data", zero::Purpose::kData);
    std::string all;
    for (const std::string& text :
         second->all_gather_text(std::to_string(group.rank() * group.rank()), "squares")) {
      all += text + " ";
    }
    say("round " + std::to_string(round) + " of rank " + std::to_string(group.rank()) + ": " + all);
  }
  const char* threads = std::getenv("OMP_NUM_THREADS");
  say(std::string("threads ") + (threads == nullptr ? "unset" : threads));
  return 0;
}

// Rank 1 ends as `how` says after all have met; the others would go on for a minute.
int scene_fail(const std::string& how) {
  const zero::Group group = init(std::chrono::seconds(20));
  group.make_communicator("data", zero::Purpose::kControl)->all_gather_text("", "start");
  if (group.rank() == 1) {
    if (how == "code") return 7;
    if (how == "signal") raise(SIGKILL);
    if (how == "stubborn") return 9;
    throw std::runtime_error("this is what rank 1 throws");
  }
  if (how == "stubborn") std::signal(SIGTERM, SIG_IGN);
  std::this_thread::sleep_for(std::chrono::minutes(1));
  return 0;
}

// Rank 1 does not come to the rendezvous.
int scene_late() {
  if (std::string(std::getenv("RANK")) == "1") {
    std::this_thread::sleep_for(std::chrono::minutes(1));
    return 0;
  }
  init(std::chrono::seconds(3));
  return 0;
}

// Two processes call themselves rank 1.
int scene_twice() {
  if (std::string(std::getenv("RANK")) == "2") setenv("RANK", "1", 1);
  init(std::chrono::minutes(10));
  return 0;
}

// Meets the others, trains as long as the file HOLD is there, a minute at most, and meets them once
// more, when it has left that group, if there are to be two MEETINGS. Forks a child in between that
// ends at once, if it FORKS.
int scene_hold() {
  const auto meet = [] {
    zero::Group group = init(std::chrono::seconds(30));
    group.make_communicator("data", zero::Purpose::kControl)->all_gather_text("", "start");
    say("rank " + std::to_string(group.rank()) + " of " + std::to_string(group.world_size()) +
        " has met the others");
    return group;
  };
  std::optional<zero::Group> group = meet();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (access(std::getenv("HOLD"), F_OK) == 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  group.reset();
  if (std::getenv("FORKS") != nullptr) {
    if (fork() == 0) std::exit(0);
    wait(nullptr);
  }
  if (std::string(std::getenv("MEETINGS")) == "2") meet();
  return 0;
}

// Prints as a progress bar does, and goes on without a line feed.
int scene_bar() {
  std::printf("\r10%%\r20%%\rdone\r\nnext\r\n\nlast\rhalf\r");
  std::fflush(stdout);
  std::this_thread::sleep_for(std::chrono::minutes(1));
  return 0;
}

// More than its reader has room for.
int scene_flood() {
  say("pid " + std::to_string(getpid()));
  for (int line = 0; line < 20000; ++line) say(std::string(100, 'x'));
  std::this_thread::sleep_for(std::chrono::minutes(1));
  return 0;
}

int scene_sleep() {
  say("pid " + std::to_string(getpid()));
  std::this_thread::sleep_for(std::chrono::minutes(1));
  return 0;
}

// Rank 1 fails before it has met rank 0, and what replaces it comes when rank 0 has ended, too.
int scene_early() {
  const std::string rank = std::getenv("RANK");
  if (rank == "1") return 7;
  if (rank == "2") std::this_thread::sleep_for(std::chrono::seconds(3));
  init(std::chrono::seconds(60));
  return 0;
}

// A Ctrl-C ends rank 0 alone.
int scene_interrupt() {
  if (std::string(std::getenv("RANK")) == "1") {
    std::signal(SIGINT, [](int) { (void)!write(STDOUT_FILENO, "interrupted\n", 12); });
  }
  return scene_sleep();
}

// Saves for a second after SIGTERM and ends with 0. With "save_fail" rank 1 ends with 7 instead,
// and the other does not end by itself; with "save_without" rank 1 has died before.
int scene_save(const std::string& how) {
  const bool fails = how == "save_fail";
  const bool is_rank1 = std::string(std::getenv("RANK")) == "1";
  static volatile std::sig_atomic_t signalled = 0;
  std::signal(SIGTERM, [](int) { signalled = 1; });
  say("pid " + std::to_string(getpid()));
  if (how == "save_without" && is_rank1) raise(SIGKILL);
  while (signalled == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (fails && is_rank1) return 7;
  std::this_thread::sleep_for(fails ? std::chrono::minutes(1) : std::chrono::seconds(1));
  return 0;
}

// Rank 1 fails, and so does what replaces it; the others wait for the second replacement.
int scene_replace() {
  const zero::Group group = init(std::chrono::seconds(20));
  if (group.joins()) {
    say("joined as " + std::to_string(group.rank()) + " on device " + std::getenv("LOCAL_RANK"));
    try {
      group.make_communicator("data", zero::Purpose::kControl);
    } catch (const c10::Error& error) {
      say(error.what_without_backtrace());
    }
    group.store()->set("seen " + std::to_string(group.rank()), std::string("1"));
    return 5;
  }
  group.make_communicator("data", zero::Purpose::kControl)->all_gather_text("", "start");
  if (group.rank() == 1) return 7;
  group.store()->wait({"seen 4"});
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  return 0;
}

// Rank 1 fails when rank 0 has ended well, and rank 2 ends behind both.
int scene_after() {
  const zero::Group group = init(std::chrono::seconds(20));
  const auto store = group.store();
  const int rank = group.rank();
  store->set("pid of " + std::to_string(rank), std::to_string(getpid()));
  store->wait({"pid of 0", "pid of 1", "pid of 2"});
  if (rank == 0) return 0;
  const int before = std::stoi(store->get_to_str("pid of " + std::to_string(rank - 1)));
  while (kill(before, 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return rank == 1 ? 7 : 0;
}

constexpr std::array<int, 4> kSignals{SIGINT, SIGTERM, SIGHUP, SIGCHLD};

std::array<void (*)(int), kSignals.size()> handlers() {
  std::array<void (*)(int), kSignals.size()> result{};
  for (size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action = {};
    sigaction(kSignals[i], nullptr, &action);
    result[i] = action.sa_handler;
  }
  return result;
}

// As launch_local(), in the way of a program that goes on behind it.
int launch(int ranks, const std::function<int()>& body, const zero::LaunchOptions& options) {
  const bool is_rank = std::getenv("RANK") != nullptr;  // its scene may have handlers of its own
  const auto before = handlers();
  try {
    const int code = zero::launch_local(ranks, body, options);
    if (is_rank || handlers() == before) return code;
    say("the handlers of signals are not those of before");
    return 99;
  } catch (const c10::Error& error) {
    say(error.what_without_backtrace());
    return 4;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const std::string scene = argv[2];
  zero::LaunchOptions options;
  options.prefix_lines = argc > 3;
  const bool short_grace = scene == "stubborn" || scene.starts_with("save");
  options.grace = std::chrono::milliseconds(short_grace ? 300 : 10000);
  if (scene.starts_with("save")) options.signal_grace = std::chrono::minutes(1);
  if (scene == "save") options.signal_grace = std::chrono::milliseconds::max();
  if (scene == "interrupt") options.signal_grace = std::chrono::milliseconds(300);
  if (scene == "no_third") forks_left = 2;
  const bool replaces_one = scene == "early" || scene == "interrupt" || scene == "after";
  options.replacements = scene == "replace" ? 2 : replaces_one ? 1 : 0;
  options.survivors_go_on = options.replacements > 0 || scene == "save_without";
  return launch(
      std::atoi(argv[1]),
      [&] {
        if (scene == "ok") return scene_ok();
        if (scene == "late") return scene_late();
        if (scene == "twice") return scene_twice();
        if (scene == "hold") return scene_hold();
        if (scene == "bar") return scene_bar();
        if (scene == "flood") return scene_flood();
        if (scene == "sleep" || scene == "no_third") return scene_sleep();
        if (scene == "after") return scene_after();
        if (scene == "early") return scene_early();
        if (scene == "interrupt") return scene_interrupt();
        if (scene == "replace") return scene_replace();
        if (scene.starts_with("save")) return scene_save(scene);
        return scene_fail(scene);
      },
      options);
}
