// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A store whose calls hang for as long as a test wants, as those of a stopped process do.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace zero {

class FrozenStore : public c10d::HashStore {
 public:
  void freeze(bool frozen) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      frozen_ = frozen;
    }
    changed_.notify_all();
  }
  using HashStore::compareSet;
  using HashStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    gate();
    HashStore::set(key, value);
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    gate();
    return HashStore::compareSet(key, expected, desired);
  }
  // The first get() of `key` returns so much later what the key held.
  void pause_after(const std::string& key, std::chrono::milliseconds pause) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pause_key_ = key;
    pause_ = pause;
  }
  // Whether it was called.
  bool paused() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pause_key_.empty();
  }
  std::vector<uint8_t> get(const std::string& key) override {
    gate();
    std::vector<uint8_t> value = HashStore::get(key);
    std::unique_lock<std::mutex> lock(mutex_);
    if (key == pause_key_) {
      pause_key_.clear();
      lock.unlock();
      std::this_thread::sleep_for(pause_);
    }
    return value;
  }
  int64_t add(const std::string& key, int64_t value) override {
    gate();
    return HashStore::add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    gate();
    return HashStore::deleteKey(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    gate();
    return HashStore::check(keys);
  }
  int64_t getNumKeys() override {
    gate();
    return HashStore::getNumKeys();
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    gate();
    HashStore::append(key, value);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    gate();
    return HashStore::multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override {
    gate();
    HashStore::multiSet(keys, values);
  }

 private:
  void gate() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !frozen_; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool frozen_ = false;
  std::string pause_key_;
  std::chrono::milliseconds pause_{};
};

}  // namespace zero
