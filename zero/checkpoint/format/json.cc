// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/json.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "zero/base/json_text.h"
#include "zero/checkpoint/format/hashed_file.h"

namespace zero {

bool LimitedJson::count() {
  TORCH_CHECK(++values_ <= kValuesLimit, "expected at most ", kValuesLimit, " values, got more");
  return true;
}

// The library's own conversions and destructors recurse, so that what is nested a hundred thousand
// deep would overflow the stack.
bool LimitedJson::descend() {
  TORCH_CHECK(++depth_ <= deepest_, "expected at most ", deepest_,
              " levels, got one nested deeper");
  return count();
}

bool LimitedJson::start_object(std::size_t) {
  if (++open_ > names_.size()) names_.emplace_back();
  return descend();
}

bool LimitedJson::key(string_t& name) {
  Names& names = names_[open_ - 1];
  names.text += name;
  names.ends.push_back(names.text.size());
  return true;
}

bool LimitedJson::end_object() {
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
  return ascend();
}

nlohmann::json parse_limited_json(std::string_view text, int deepest) {
  LimitedJson limit(deepest);
  nlohmann::json::sax_parse(text.begin(), text.end(), &limit);
  return parse_json(text);
}

}  // namespace zero
