// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// JSON that others may have written. It is refused while it is parsed where it is made to exhaust
// the stack or memory, or to say different things to different readers: a checksum that matches
// makes nothing safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace zero {

// Bounds memory: an empty object in a list has three bytes of text and a hundred of memory. A
// manifest reaches it with 22 million pieces: 10,000 ranks with 2,000 buckets have fewer.
inline constexpr int64_t kValuesLimit = int64_t{1} << 26;

// A reader of JSON as events that keeps no value. Throws c10::Error beyond `deepest` levels, beyond
// kValuesLimit of the values that it counts, each in the function that it calls for it, and at the
// end of an object that has a name twice. Not the callback of json::parse(), which searches all
// that was read of a list or an object whenever an entry of it ends.
class LimitedJson : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit LimitedJson(int deepest) : deepest_(deepest) {}

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("boolean"); }
  bool number_integer(number_integer_t) override { return value("number"); }
  bool number_unsigned(number_unsigned_t) override { return value("number"); }
  bool number_float(number_float_t, const string_t&) override { return value("number"); }
  bool binary(binary_t&) override { return value("binary"); }
  bool string(string_t&) override { return value("string"); }
  bool key(string_t& name) override;
  bool start_object(std::size_t) override;
  bool start_array(std::size_t) override { return descend(); }
  bool end_object() override;
  bool end_array() override { return ascend(); }
  // json::sax_parse() returns false then.
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 protected:
  int depth() const { return depth_; }  // objects and lists that are open
  // Whatever is no object and no list.
  virtual bool value(const char* /*kind*/) { return count(); }

 private:
  struct Names {
    std::string text;          // of all names, one after the other
    std::vector<size_t> ends;  // of each of them
  };

  bool count();
  bool descend();
  bool ascend() {
    --depth_;
    return true;
  }

  const int deepest_;
  int depth_ = 0;
  int64_t values_ = 0;
  std::vector<Names> names_;  // by level of the object; kept for the next object of that level
  size_t open_ = 0;           // objects
};

// Returns the values of `text`. Throws nlohmann::json::exception for what is not JSON, and
// c10::Error as LimitedJson does.
nlohmann::json parse_limited_json(std::string_view text, int deepest);

}  // namespace zero
