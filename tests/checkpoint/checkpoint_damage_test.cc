// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Whatever happens to the bytes of a checkpoint, it is noticed, and the optimizer
// that was to load it is as before.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/files.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

void save(const std::string& folder, int first_step) {
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(Training(), group, 1);
    run.train(first_step, first_step + 2);
    run.optimizer->save_checkpoint(folder, SaveOptions().metadata({{"epoch", "1"}}));
  });
}

std::vector<std::string> files_of(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  return files;
}

// Tries to load on one rank again and again.
class Loader {
 public:
  explicit Loader(const Group& group) : run_(Training(), group, 7), before_(run_.snapshot()) {}

  // What load_checkpoint() throws; empty when it accepts.
  std::string error(const std::string& folder) {
    return error_of([&] { run_.optimizer->load_checkpoint(folder); });
  }
  bool unchanged() { return differing(before_, run_.snapshot()) == 0; }

 private:
  CheckpointRun run_;
  Snapshot before_;
};

void with_loader(const std::function<void(Loader&)>& body) {
  run_ranks(1, [&](const Group& group) {
    Loader loader(group);
    body(loader);
    EXPECT_TRUE(loader.unchanged()) << "a load that failed changed something";
  });
}

TEST(DamageTest, NoFlippedBitIsAccepted) {
  const char* count = std::getenv("ZERO_BIT_FLIPS");
  const int flips = count != nullptr ? std::atoi(count) : 400;
  const std::string folder = fresh_folder("flips") + "/a";
  save(folder, 0);
  std::vector<std::string> contents;
  uint64_t total = 0;
  const std::vector<std::string> files = files_of(folder);
  for (const std::string& file : files) {
    contents.push_back(content(file));
    total += contents.back().size();
  }
  std::mt19937_64 random(20);
  int accepted = 0;
  with_loader([&](Loader& loader) {
    for (int i = 0; i < flips; ++i) {
      // Every second one in the manifest or a header, which are small.
      const bool anywhere = i % 2 == 0;
      size_t f = random() % files.size();
      uint64_t byte = random() % std::min<uint64_t>(contents[f].size(), 3000);
      if (anywhere) {
        byte = random() % total;
        for (f = 0; byte >= contents[f].size(); ++f) byte -= contents[f].size();
      }
      std::string damaged = contents[f];
      damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << (random() % 8)));
      overwrite(files[f], damaged);
      const std::string error = loader.error(folder);
      if (error.empty()) {
        ++accepted;
        ADD_FAILURE() << "accepted a flip of byte " << byte << " of " << files[f];
      }
      EXPECT_EQ(error.find("nlohmann"), std::string::npos) << error;
      overwrite(files[f], contents[f]);
    }
  });
  std::printf("bit flips: %d tried, %d accepted, over %llu bytes in %zu files\n", flips, accepted,
              static_cast<unsigned long long>(total), files.size());
  EXPECT_EQ(accepted, 0);
  EXPECT_NO_THROW(verify_checkpoint(folder)) << "the undamaged files must load";
}

TEST(DamageTest, NoTruncationIsAccepted) {
  const std::string folder = fresh_folder("truncations") + "/a";
  save(folder, 0);
  int tried = 0, accepted = 0;
  with_loader([&](Loader& loader) {
    for (const std::string& file : files_of(folder)) {
      const std::string whole = content(file);
      std::vector<size_t> lengths = {0, 1, 7, 8, 9, whole.size() / 2, whole.size() - 1};
      for (size_t i = 1; i < 50; ++i) lengths.push_back(whole.size() * i / 50);
      for (size_t length : lengths) {
        overwrite(file, whole.substr(0, length));
        ++tried;
        const std::string error = loader.error(folder);
        accepted += error.empty() ? 1 : 0;
        EXPECT_NE(error.find(fs::path(file).filename().string()), std::string::npos) << error;
      }
      overwrite(file, whole + "x");
      accepted += loader.error(folder).empty() ? 1 : 0;
      overwrite(file, whole);
    }
  });
  std::printf("truncations: %d tried, %d accepted\n", tried, accepted);
  EXPECT_EQ(accepted, 0);
}

TEST(DamageTest, AMissingFileAndOneOfAnotherCheckpointAreNamed) {
  const std::string parent = fresh_folder("mixed");
  save(parent + "/a", 0);
  save(parent + "/b", 5);
  with_loader([&](Loader& loader) {
    for (const std::string& file : files_of(parent + "/a")) {
      const std::string name = fs::path(file).filename().string();
      const std::string whole = content(file);
      fs::remove(file);
      EXPECT_NE(loader.error(parent + "/a").find(name + ": No such file"), std::string::npos)
          << loader.error(parent + "/a");
      if (name != "manifest.json") {
        overwrite(file, content(parent + "/b/" + name));
        const std::string error = loader.error(parent + "/a");
        EXPECT_NE(error.find(name), std::string::npos) << error;
        EXPECT_NE(error.find("mixed in from another checkpoint"), std::string::npos) << error;
      }
      overwrite(file, whole);
    }
    // A rank's file under another rank's name.
    const std::string first = parent + "/a/rank-00000.safetensors";
    const std::string second = parent + "/a/rank-00001.safetensors";
    const std::string whole = content(first);
    overwrite(first, content(second));
    EXPECT_FALSE(loader.error(parent + "/a").empty());
    overwrite(first, whole);
  });
}

}  // namespace
}  // namespace zero
