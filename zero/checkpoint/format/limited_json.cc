// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/limited_json.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/manifest.h"

namespace zero {
namespace {

using nlohmann::json;
// {"files": [{"tensors": [{...}]}]} has six levels with the values in it.
constexpr int kDeepest = 6;

// Reads the text without keeping it. Not the callback of json::parse(), which searches all
// that was read of a list or an object whenever an entry of it ends.
class DepthLimit : public nlohmann::json_sax<json> {
 public:
  explicit DepthLimit(int deepest) : deepest_(deepest) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool key(string_t&) override { return true; }
  bool start_object(std::size_t) override { return descend(); }
  bool start_array(std::size_t) override { return descend(); }
  bool end_object() override { return ascend(); }
  bool end_array() override { return ascend(); }

  // json::parse() explains a text that is no JSON.
  bool parse_error(std::size_t, const std::string&, const json::exception&) override {
    return false;
  }

 protected:
  int depth() const { return depth_; }  // objects and lists that are open

 private:
  // The library's own conversions and destructors recurse, so that what is nested a
  // hundred thousand deep would overflow the stack.
  bool descend() {
    TORCH_CHECK(++depth_ <= deepest_, "expected at most ", deepest_,
                " levels, got one nested deeper");
    return true;
  }
  bool ascend() {
    --depth_;
    return true;
  }

  const int deepest_;
  int depth_ = 0;
};

class UniqueNames : public DepthLimit {
 public:
  using DepthLimit::DepthLimit;

  bool key(string_t& name) override {
    TORCH_CHECK(names_.back().insert(name).second, "expected each name once in an object, got \"",
                printable(name), "\" twice");
    return true;
  }
  bool start_object(std::size_t size) override {
    names_.emplace_back();
    return DepthLimit::start_object(size);
  }
  bool end_object() override {
    names_.pop_back();
    return DepthLimit::end_object();
  }

 private:
  std::vector<std::unordered_set<std::string>> names_;  // of each object that is open
};

class ManifestLimits : public DepthLimit {
 public:
  ManifestLimits() : DepthLimit(kDeepest) {}

  bool string(string_t& text) override { return check_text(text); }
  bool key(string_t& name) override {
    if (depth() == 1) {
      section_ = name;
      entries_ = 0;
    }
    if (depth() == 2 && section_ == "metadata") count();
    return check_text(name);
  }
  bool start_object(std::size_t size) override {
    if (depth() == 2 && section_ == "groups") count();
    return DepthLimit::start_object(size);
  }

 private:
  void count() {
    TORCH_CHECK(++entries_ <= kEntriesLimit, section_, ": expected at most ", kEntriesLimit,
                " entries, got more");
  }
  bool check_text(const std::string& text) const {
    TORCH_CHECK(section_ == "metadata" || text.find('\0') == std::string::npos,
                "expected text without a NUL, got \"", printable(text), "\"");
    return true;
  }

  std::string section_;  // the field of the root that is being read
  int64_t entries_ = 0;
};

}  // namespace

json parse_limited_json(const std::string& text) {
  ManifestLimits limits;
  json::sax_parse(text, &limits);
  return json::parse(text);
}

json parse_json_of_depth(std::string_view text, int deepest) {
  UniqueNames limit(deepest);
  json::sax_parse(text.begin(), text.end(), &limit);
  return json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
}

}  // namespace zero
