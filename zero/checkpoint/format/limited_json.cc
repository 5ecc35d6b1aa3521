// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/limited_json.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "zero/checkpoint/format/hashed_file.h"
#include "zero/checkpoint/format/manifest.h"

namespace zero {
namespace {

using nlohmann::json;
// {"files": [{"tensors": [{...}]}]} has six levels with the values in it.
constexpr int kDeepest = 6;

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

// The library's own conversions and destructors recurse, so that what is nested a hundred thousand
// deep would overflow the stack.
bool DepthLimit::descend() {
  TORCH_CHECK(++depth_ <= deepest_, "expected at most ", deepest_,
              " levels, got one nested deeper");
  return true;
}

bool UniqueNames::start_object(std::size_t size) {
  if (++open_ > names_.size()) names_.emplace_back();
  return DepthLimit::start_object(size);
}

bool UniqueNames::key(string_t& name) {
  Names& names = names_[open_ - 1];
  names.text += name;
  names.ends.push_back(names.text.size());
  return true;
}

bool UniqueNames::end_object() {
  Names& names = names_[--open_];
  std::vector<std::string_view> list;
  list.reserve(names.ends.size());
  size_t begin = 0;
  for (const size_t end : names.ends) {
    list.push_back(std::string_view(names.text).substr(begin, end - begin));
    begin = end;
  }
  // As most writers have them.
  if (!std::is_sorted(list.begin(), list.end())) std::sort(list.begin(), list.end());
  const auto twice = std::adjacent_find(list.begin(), list.end());
  TORCH_CHECK(twice == list.end(), "expected each name once in an object, got \"",
              printable(std::string(*twice)), "\" twice");
  names.text.clear();
  names.ends.clear();
  return DepthLimit::end_object();
}

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
