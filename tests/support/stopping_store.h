// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A store that stops its rank at a call of the test's choice.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace zero {

// Passes all calls on. After the `last`th one that writes or reads a value it calls stop(), which
// ends or stops the process or does not return; wait() and check() do not count, since how often
// they are called is a matter of time.
class StoppingStore : public c10d::Store {
 public:
  StoppingStore(c10::intrusive_ptr<c10d::Store> store, int last, std::function<void()> stop)
      : store_(std::move(store)), left_(last), stop_(std::move(stop)) {}

  using Store::compareSet;
  using Store::set;
  c10::intrusive_ptr<c10d::Store> clone() override { return store_->clone(); }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    store_->set(key, value);
    count();
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    auto held = store_->compareSet(key, expected, desired);
    count();
    return held;
  }
  std::vector<uint8_t> get(const std::string& key) override {
    auto value = store_->get(key);
    count();
    return value;
  }
  int64_t add(const std::string& key, int64_t value) override {
    const int64_t sum = store_->add(key, value);
    count();
    return sum;
  }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return store_->check(keys); }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { store_->wait(keys); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    store_->wait(keys, timeout);
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    store_->append(key, value);
    count();
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    auto values = store_->multiGet(keys);
    count();
    return values;
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override {
    store_->multiSet(keys, values);
    count();
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }

 private:
  void count() {
    if (--left_ == 0) stop_();
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::atomic<int> left_;
  const std::function<void()> stop_;
};

}  // namespace zero
