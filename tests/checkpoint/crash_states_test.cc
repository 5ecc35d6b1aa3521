// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Every state that a crash of the machine can leave of saves: real saves run and their system
// calls are recorded, then each state is built in a folder of its own, from which the library must
// find the last checkpoint whose save returned, and save again.
//
// What is on disk is taken to be as little as POSIX allows. A file's content is there after fsync()
// of the file, and before it is nothing, all, or half with zeros behind. Names in a folder are
// there after fsync() of that folder; before it any first part of their changes may be, or any
// subset, and each folder has an order of its own. A state of a file system with an ordered journal
// is one of these.
//
// This file's own functions take the place of the C library's in the whole program.
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/own_mounts.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "tests/support/warnings.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint_options.h"
#include "zero/zero_optimizer.h"

namespace {

namespace fs = std::filesystem;

constexpr int kNone = -1;
constexpr int kRoot = 0;

// Names of one folder that change in one call: what each is from then on.
using Names = std::map<std::string, int>;

// Contents of files by number; 0 is that of an empty one.
struct Contents {
  std::vector<std::string> texts = {""};
  std::map<std::string, int> numbers = {{"", 0}};
  std::map<int, int> torn;

  int number_of(const std::string& text) {
    const auto [found, is_new] = numbers.emplace(text, static_cast<int>(texts.size()));
    if (is_new) texts.push_back(text);
    return found->second;
  }
  // With zeros in the second half.
  int torn_of(int number) {
    if (torn.count(number) == 0) {
      std::string text = texts[number];
      std::fill(text.begin() + static_cast<ptrdiff_t>(text.size() / 2), text.end(), '\0');
      torn[number] = number_of(text);
    }
    return torn[number];
  }
};
Contents& contents() {
  static auto* contents = new Contents;
  return *contents;
}

struct Event {
  enum Kind { kMake, kNames, kContent, kSync, kReturn };
  Kind kind;
  int node = kNone;     // the folder whose names change; the file or folder otherwise
  Names change = {};    // kNames
  bool folder = false;  // kMake: whether it is one
  int content = 0;      // kContent: of all of the file
  int64_t steps = 0;    // kReturn: of the checkpoint whose save has returned
};

struct Node {
  bool folder = true;
  Names names, names_on_disk;
  std::vector<Names> pending;            // the changes between the two
  int content = 0, content_on_disk = 0;  // numbers
};

// Which syncs have no effect: to see that the test fails without them.
struct Faults {
  bool no_sync_of_files = false;
  bool no_sync_of_folders = false;
};

void change(Names& names, const Names& by) {
  for (const auto& [name, node] : by) {
    if (node == kNone) {
      names.erase(name);
    } else {
      names[name] = node;
    }
  }
}

// What programs see, and what of it is on disk.
struct Disk {
  std::vector<Node> nodes = {{}};
  int64_t returned = -1;  // the steps of the last checkpoint whose save has returned

  int find(const fs::path& path) const {
    int node = kRoot;
    for (const fs::path& part : path) {
      if (node == kNone || part == "." || part.empty()) continue;
      const auto found = nodes[node].names.find(part.string());
      node = found == nodes[node].names.end() ? kNone : found->second;
    }
    return node;
  }

  void apply(const Event& event, const Faults& faults = {}) {
    if (event.kind == Event::kMake) {
      nodes.emplace_back().folder = event.folder;
      return;
    }
    if (event.kind == Event::kReturn) {
      returned = event.steps;
      return;
    }
    Node& node = nodes[event.node];
    if (event.kind == Event::kContent) node.content = event.content;
    if (event.kind == Event::kNames) {
      change(node.names, event.change);
      node.pending.push_back(event.change);
    }
    if (event.kind == Event::kSync && !node.folder && !faults.no_sync_of_files) {
      node.content_on_disk = node.content;
    }
    if (event.kind == Event::kSync && node.folder && !faults.no_sync_of_folders) {
      node.names_on_disk = node.names;
      node.pending.clear();
    }
  }
};

// ---- Recording ----

struct Recorder {
  std::recursive_mutex mutex;
  std::string root;  // what happens below it is recorded; empty: nothing
  bool has_exchange = true;
  Disk disk;
  std::vector<Event> events;

  void add(Event event) {
    disk.apply(event);
    events.push_back(std::move(event));
  }
  // The rest of a path behind the root, "." for the root itself, or nothing.
  std::string below(const std::string& path) const {
    const std::string plain = fs::path(path).lexically_normal().string();
    if (root.empty() || plain.compare(0, root.size(), root) != 0) return "";
    if (plain.size() == root.size()) return ".";
    return plain[root.size()] == '/' ? plain.substr(root.size() + 1) : "";
  }
  void change_names(const std::string& folder, Names names) {
    const int node = disk.find(folder);
    ASSERT_NE(node, kNone) << folder;
    add({.kind = Event::kNames, .node = node, .change = std::move(names)});
  }
  void make(const fs::path& path, bool folder) {
    add({.kind = Event::kMake, .folder = folder});
    change_names(path.parent_path(), {{path.filename(), static_cast<int>(disk.nodes.size()) - 1}});
  }
  void remove(const fs::path& path) {
    change_names(path.parent_path(), {{path.filename(), kNone}});
  }
  void rename(const fs::path& from, const fs::path& to, bool exchange) {
    ASSERT_EQ(from.parent_path(), to.parent_path()) << "the model knows one folder at a time";
    change_names(from.parent_path(), {{from.filename(), exchange ? disk.find(to) : kNone},
                                      {to.filename(), disk.find(from)}});
  }
};
Recorder& recorder() {
  static auto* recorder = new Recorder;
  return *recorder;
}

std::string path_of(int file) {
  char path[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(file);
  const ssize_t size = readlink(link.c_str(), path, sizeof(path));
  return {path, size > 0 ? static_cast<size_t>(size) : 0};
}

// Makes a call and records what it did, if it succeeded and its path is below the root.
template <typename Call, typename Record>
auto recorded(const std::string& path, const Call& call, const Record& record) {
  const std::lock_guard<std::recursive_mutex> guard(recorder().mutex);
  const auto result = call();
  const int error = errno;
  const std::string inside = recorder().below(path);
  if (result >= 0 && !inside.empty()) record(inside);
  errno = error;
  return result;
}

int removed(int folder, const char* name, int flags) {
  const std::string path =
      folder == AT_FDCWD || name[0] == '/' ? name : path_of(folder) + "/" + name;
  return recorded(
      path, [&] { return static_cast<int>(syscall(SYS_unlinkat, folder, name, flags)); },
      [](const std::string& inside) { recorder().remove(inside); });
}

int renamed(const char* from, const char* to, unsigned int flags) {
  return recorded(
      from,
      [&] {
        if (flags != 0 && !recorder().has_exchange) {
          errno = EINVAL;
          return -1;
        }
        return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags));
      },
      [&](const std::string& inside) {
        recorder().rename(inside, recorder().below(to), (flags & RENAME_EXCHANGE) != 0);
      });
}

// The content is read back, so that the ways to write need not be understood.
template <typename Call>
ssize_t written(int file, const Call& call) {
  return recorded(recorder().root.empty() ? "" : path_of(file), call, [](const std::string& path) {
    const int node = recorder().disk.find(path);
    if (node == kNone) return;
    std::ifstream stream(recorder().root + "/" + path, std::ios::binary);
    recorder().add({.kind = Event::kContent,
                    .node = node,
                    .content = contents().number_of({std::istreambuf_iterator<char>(stream), {}})});
  });
}

// Does nothing but record: the machine does not crash.
int synced(int file) {
  return recorded(
      path_of(file), [] { return 0; },
      [](const std::string& path) {
        const int node = recorder().disk.find(path);
        if (node != kNone) recorder().add({.kind = Event::kSync, .node = node});
      });
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const unsigned int mode = (flags & O_CREAT) != 0 ? va_arg(arguments, unsigned int) : 0;
  va_end(arguments);
  const auto call = [&] {
    return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
  };
  if ((flags & O_CREAT) == 0) return call();
  return recorded(path, call, [](const std::string& inside) {
    if (recorder().disk.find(inside) == kNone) recorder().make(inside, false);
  });
}
int mkdir(const char* path, mode_t mode) noexcept {
  return recorded(
      path, [&] { return static_cast<int>(syscall(SYS_mkdirat, AT_FDCWD, path, mode)); },
      [](const std::string& inside) { recorder().make(inside, true); });
}
ssize_t write(int file, const void* data, size_t bytes) {
  return written(file, [&] { return syscall(SYS_write, file, data, bytes); });
}
ssize_t pwrite(int file, const void* data, size_t bytes, off_t place) {
  return written(file, [&] { return syscall(SYS_pwrite64, file, data, bytes, place); });
}
int fsync(int file) { return synced(file); }
int fdatasync(int file) { return synced(file); }
int rename(const char* from, const char* to) noexcept { return renamed(from, to, 0); }
int renameat2(int, const char* from, int, const char* to, unsigned int flags) noexcept {
  return renamed(from, to, flags);
}
int unlink(const char* path) noexcept { return removed(AT_FDCWD, path, 0); }
int rmdir(const char* path) noexcept { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int folder, const char* name, int flags) noexcept {
  return removed(folder, name, flags);
}
int remove(const char* path) noexcept {
  struct stat status {};
  const bool folder = lstat(path, &status) == 0 && S_ISDIR(status.st_mode);
  return removed(AT_FDCWD, path, folder ? AT_REMOVEDIR : 0);
}

}  // extern "C"

namespace zero {
namespace {

// ---- States ----

// What of each node's changes is on disk: of a folder, whether each pending change is; of a file,
// whether its new content is, and whether its second half is zeros.
using Choice = std::map<int, std::vector<bool>>;

// One state: the names and contents that are on disk.
class State {
 public:
  State(const Disk& disk, const Choice& choice) : disk_(disk), choice_(choice) {}

  Names names(int folder) const {
    Names result = disk_.nodes[folder].names_on_disk;
    const std::vector<bool>& chosen = choice_.at(folder);
    for (size_t i = 0; i < chosen.size(); ++i) {
      if (chosen[i]) change(result, disk_.nodes[folder].pending[i]);
    }
    return result;
  }
  int content(int file) const {
    const Node& node = disk_.nodes[file];
    const std::vector<bool>& chosen = choice_.at(file);
    if (!chosen[0]) return node.content_on_disk;
    return chosen[1] ? contents().torn_of(node.content) : node.content;
  }
  // Equal for equal states; as a shape, for those that differ in nothing but tags and bytes.
  std::string text(bool shape = false, int node = kRoot) const {
    if (!disk_.nodes[node].folder) {
      const int number = content(node);
      return shape ? std::to_string(contents().texts[number].size()) : "#" + std::to_string(number);
    }
    std::string result = "{";
    for (const auto& [name, child] : names(node)) {
      result +=
          (shape ? std::regex_replace(name, kTag, "*") : name) + "=" + text(shape, child) + ",";
    }
    return result + "}";
  }
  void build(const std::string& path, int node = kRoot) const {
    if (!disk_.nodes[node].folder) {
      std::ofstream(path, std::ios::binary) << contents().texts[content(node)];
      return;
    }
    fs::create_directory(path);
    for (const auto& [name, child] : names(node)) build(path + "/" + name, child);
  }

 private:
  inline static const std::regex kTag{"[0-9a-f]{16}"};
  const Disk& disk_;
  const Choice& choice_;
};

// The nodes that a state may show.
void find_reachable(const Disk& disk, int node, std::set<int>& found) {
  if (!found.insert(node).second) return;
  const auto follow = [&](const Names& names) {
    for (const auto& [name, child] : names) {
      if (child != kNone) find_reachable(disk, child, found);
    }
  };
  follow(disk.nodes[node].names_on_disk);
  for (const Names& names : disk.nodes[node].pending) follow(names);
}

// All choices for one node; only those that show its last change where that is `new`.
std::vector<std::vector<bool>> first_parts(const Node& node, bool is_new) {
  if (!node.folder) {
    if (node.content == node.content_on_disk) return {{false, false}};
    if (is_new) return {{true, false}, {true, true}};
    return {{false, false}, {true, false}, {true, true}};
  }
  const size_t count = node.pending.size();
  std::vector<std::vector<bool>> result;
  for (size_t first = is_new ? count : 0; first <= count; ++first) {
    result.emplace_back(count);
    std::fill_n(result.back().begin(), first, true);
  }
  return result;
}

using Visit = std::function<void(const State& state)>;

// Visits the states that a crash right behind `last` can leave, and one before it cannot.
void visit_states(const Disk& disk, const Event& last, const Visit& visit) {
  const bool all = last.kind == Event::kReturn;  // more is promised than before
  if (!all && last.kind != Event::kNames && last.kind != Event::kContent) return;
  std::set<int> reachable;
  find_reachable(disk, kRoot, reachable);
  if (!all && reachable.count(last.node) == 0) return;
  const auto is_new = [&](int node) { return !all && node == last.node; };
  // Any first part of the changes of each.
  std::map<int, std::vector<std::vector<bool>>> parts;
  Choice none, every;
  for (const int node : reachable) {
    parts[node] = first_parts(disk.nodes[node], is_new(node));
    every[node] = first_parts(disk.nodes[node], true)[0];
    none[node] = std::vector<bool>(every[node].size());
  }
  Choice choice;
  const std::function<void(std::set<int>::const_iterator)> choose = [&](auto next) {
    if (next == reachable.end()) return visit(State(disk, choice));
    const int node = *next++;
    for (const std::vector<bool>& part : parts[node]) {
      choice[node] = part;
      choose(next);
    }
  };
  choose(reachable.begin());
  // Any subset of the changes of one folder.
  for (const int node : reachable) {
    const size_t count = disk.nodes[node].pending.size();
    ASSERT_LT(count, 12u) << "a folder that nothing brings to disk";
    for (size_t bits = 0; count > 1 && bits < size_t{1} << count; ++bits) {
      if (is_new(node) && bits >> (count - 1) == 0) continue;
      for (const Choice* others : {&none, &every}) {
        if (others == &none && !all && !is_new(node)) continue;
        choice = *others;
        for (size_t i = 0; i < count; ++i) choice[node][i] = (bits >> i & 1) != 0;
        visit(State(disk, choice));
      }
    }
  }
}

// The smallest training whose checkpoint has a file beside its manifest.
struct TinyRun {
  explicit TinyRun(const Group& group)
      : model(2, 1, at::kCPU),
        optimizer(*model, std::make_unique<torch::optim::SGD>(model->parameters(), 0.1), group) {}
  void train() {
    optimizer.backward(model->forward(at::ones({1, 2})).sum());
    optimizer.step();
  }
  Affine model;
  ZeroOptimizer optimizer;
};

// In memory if the kernel permits: thousands of folders are made and removed. The first call is on
// the thread that starts the others.
const std::string& test_folder() {
  static const auto* folder = new std::string([] {
    // As /proc/self/fd names it, also where a link leads to it.
    const std::string path = fs::canonical(fresh_folder("crash_states")).string();
    const std::string problem = why_not_mounted(path);
    if (!problem.empty()) std::printf("on a disk: %s\n", problem.c_str());
    return path;
  }());
  return *folder;
}

// ---- What must hold ----

struct Counts {
  int kills = 0;
  int crashes = 0;
  int states = 0;
  int different = 0;
  int losses = 0;
};

class CrashStates {
 public:
  explicit CrashStates(const Group& group) : group_(group), next_(group) {}

  using Body = std::function<void(TinyRun& run)>;

  // Runs `body` in an empty folder, or after the crash of a process that has left `disk`.
  std::vector<Event> record(const Body& body, const Disk& disk = {}) {
    // A save tries the file system of a folder that it has not seen, which is recorded too; of the
    // one that a dead process has left, that process did.
    if (disk.nodes.size() == 1) {
      root_ = test_folder() + "/run" + std::to_string(++roots_);
    } else {
      for (const auto& entry : fs::directory_iterator(folder())) fs::remove_all(entry.path());
    }
    Choice all;
    for (size_t n = 0; n < disk.nodes.size(); ++n) {
      all[static_cast<int>(n)] = first_parts(disk.nodes[n], true)[0];
    }
    State(disk, all).build(root_);
    auto run = std::make_unique<TinyRun>(group_);
    recorder().disk = disk;
    recorder().events.clear();
    recorder().root = root_;
    body(*run);
    run.reset();  // with its thread that removes
    recorder().root.clear();
    check_tree(root_, kRoot);
    return recorder().events;
  }

  // Tries a crash behind each event, up to a few losses; with `faults` one is enough, and expected.
  void crash(const std::vector<Event>& events, Disk disk = {}, const Faults* faults = nullptr) {
    const int enough = faults == nullptr ? 5 : 1;
    for (const Event& event : events) {
      disk.apply(event, faults == nullptr ? Faults() : *faults);
      ++counts.crashes;
      visit_states(disk, event, [&](const State& state) {
        if (counts.losses >= enough) return;
        ++counts.states;
        const std::string text = state.text();
        auto known = outcomes_.find(text);
        if (known == outcomes_.end()) {
          ++counts.different;
          known = outcomes_.emplace(text, outcome_of(state)).first;
        }
        const auto& [steps, problem] = known->second;
        if (problem.empty() && steps >= disk.returned) return;
        ++counts.losses;
        if (faults == nullptr) {
          ADD_FAILURE() << "after a save of step " << disk.returned << ", found " << steps << " in "
                        << text << "\n"
                        << problem;
        }
      });
      if (counts.losses >= enough) return;
    }
  }

  // A process is killed behind each change of a name that begins with `name`, another one runs
  // `next`, and then the machine crashes.
  void kill_and_crash(const std::vector<Event>& events, const std::string& name, const Body& next) {
    Disk disk;
    for (const Event& event : events) {
      disk.apply(event);
      if (!std::any_of(event.change.begin(), event.change.end(),
                       [&](const auto& change) { return change.first.starts_with(name); })) {
        continue;
      }
      ++counts.kills;
      crash(record(next, disk), disk);
    }
  }

  // Saves step by step as training does; each save that has returned is an event. Without an
  // exchange, which replaces a checkpoint, the number of steps makes the name a new one.
  void save(TinyRun& run, const std::string& name, bool async = false) {
    run.train();
    const auto options = SaveOptions().overwrite(recorder().has_exchange);
    const std::string number =
        recorder().has_exchange ? "" : "-" + std::to_string(run.optimizer.stats().steps);
    const std::string target = folder() + "/" + name + number;
    if (async) {
      run.optimizer.save_checkpoint_async(target, options)->finish();
    } else {
      run.optimizer.save_checkpoint(target, options);
    }
    const std::lock_guard<std::recursive_mutex> guard(recorder().mutex);
    recorder().add({.kind = Event::kReturn, .steps = run.optimizer.stats().steps});
  }

  std::string folder() const { return root_ + "/run"; }

  Counts counts;

 private:
  // The model's names are the real ones.
  void check_tree(const std::string& path, int node) {
    size_t count = 0;
    for (const auto& entry : fs::directory_iterator(path)) {
      const Names& names = recorder().disk.nodes[node].names;
      const auto found = names.find(entry.path().filename().string());
      ASSERT_NE(found, names.end()) << entry.path();
      if (entry.is_directory()) check_tree(entry.path(), found->second);
      ++count;
    }
    EXPECT_EQ(count, recorder().disk.nodes[node].names.size()) << path;
  }

  // The steps of the newest checkpoint, -1 without one, and what does not work.
  std::pair<int64_t, std::string> outcome_of(const State& state) {
    fs::remove_all(copy_);
    state.build(copy_);
    const std::string folder = copy_ + "/run";
    const std::string current = folder + (recorder().has_exchange ? "/current" : "/next");
    int64_t steps = -1;
    const std::string problem = error_of([&] {
      const auto newest = latest(folder);
      if (newest) verify_checkpoint(*newest);
      if (newest) steps = describe_checkpoint(*newest).steps;
      if (!shapes_.insert(state.text(/*shape=*/true)).second) return;
      keep_last(folder, 1);
      TORCH_CHECK(latest(folder) == newest, "keep_last() has removed the newest checkpoint");
      if (newest) verify_checkpoint(*newest);
      next_.optimizer.save_checkpoint(current, SaveOptions().overwrite(true));
      keep_last(folder, 1);
      TORCH_CHECK(latest(folder) == current, "the next save is not the latest");
      for (const auto& entry : fs::directory_iterator(folder)) {
        TORCH_CHECK(entry.path() == current, entry.path().string(), " is left for ever");
      }
    });
    return {steps, problem};
  }

  const Group& group_;
  std::string root_;
  inline static int roots_ = 0;
  const std::string copy_ = test_folder() + "/state";
  TinyRun next_;  // the run that goes on after a crash
  std::map<std::string, std::pair<int64_t, std::string>> outcomes_;
  std::set<std::string> shapes_;  // of states in which the next save was tried
};

void on_one_rank(const std::function<void(CrashStates&)>& body) {
  test_folder();
  run_ranks(1, [&](const Group& group) {
    Warnings silent;  // of a file system without an exchange
    CrashStates states(group);
    body(states);
    const auto& [kills, crashes, all, different, losses] = states.counts;
    std::printf("%d kills, %d crash points, %d states, %d of them different, %d losses\n", kills,
                crashes, all, different, losses);
  });
}

CrashStates::Body overwrites(CrashStates& states, int count, bool async = false) {
  return [&states, count, async](TinyRun& run) {
    for (int i = 0; i < count; ++i) states.save(run, "current", async);
  };
}

CrashStates::Body new_names(CrashStates& states) {
  return [&states](TinyRun& run) {
    for (const char* name : {"a", "b", "c"}) {
      states.save(run, name);
      keep_last(states.folder(), 1);
    }
  };
}

// What a job does that starts again.
CrashStates::Body resume(CrashStates& states, const std::string& name) {
  return [&states, name](TinyRun& run) {
    keep_last(states.folder(), 1);
    if (const auto newest = latest(states.folder())) run.optimizer.load_checkpoint(*newest);
    states.save(run, name);
    keep_last(states.folder(), 1);
  };
}

class CrashStatesTest : public ::testing::TestWithParam<bool> {
 protected:
  CrashStatesTest() { recorder().has_exchange = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Exchange, CrashStatesTest, ::testing::Bool());

TEST_P(CrashStatesTest, OverwritesLoseNothing) {
  on_one_rank([](CrashStates& states) { states.crash(states.record(overwrites(states, 3))); });
}

TEST_P(CrashStatesTest, AsynchronousOverwritesLoseNothing) {
  on_one_rank(
      [](CrashStates& states) { states.crash(states.record(overwrites(states, 2, true))); });
}

TEST_P(CrashStatesTest, NewNamesAndKeepLastLoseNothing) {
  on_one_rank([](CrashStates& states) { states.crash(states.record(new_names(states))); });
}

TEST_P(CrashStatesTest, AKillAndThenACrashLoseNothing) {
  on_one_rank([](CrashStates& states) {
    states.kill_and_crash(states.record(overwrites(states, 2)), "current",
                          resume(states, "current"));
    states.kill_and_crash(states.record(new_names(states)), "b", resume(states, "d"));
  });
}

TEST_P(CrashStatesTest, WithoutEitherKindOfSyncCheckpointsAreLost) {
  on_one_rank([](CrashStates& states) {
    const std::vector<Event> events = states.record(overwrites(states, 1));
    for (const Faults& faults : {Faults{.no_sync_of_files = true, .no_sync_of_folders = false},
                                 Faults{.no_sync_of_files = false, .no_sync_of_folders = true}}) {
      states.counts.losses = 0;
      states.crash(events, {}, &faults);
      EXPECT_GT(states.counts.losses, 0);
    }
  });
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 2); }
