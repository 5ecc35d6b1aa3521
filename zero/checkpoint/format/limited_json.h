// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The JSON of a manifest or of a header as values, refused while it is parsed where it is made
// to exhaust memory, time or the stack: a checksum that matches makes nothing safe.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace zero {

// Throws nlohmann::json::exception for what is not JSON, and c10::Error beyond six
// levels, beyond kEntriesLimit parameter groups or entries of metadata, and for a NUL
// outside of metadata.
nlohmann::json parse_limited_json(const std::string& text);

// A reader of JSON as events that keeps no value. Throws c10::Error beyond `deepest` levels. Not
// the callback of json::parse(), which searches all that was read of a list or an object whenever
// an entry of it ends.
class DepthLimit : public nlohmann::json_sax<nlohmann::json> {
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
  // json::sax_parse() returns false then.
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 protected:
  int depth() const { return depth_; }  // objects and lists that are open

 private:
  bool descend();
  bool ascend() {
    --depth_;
    return true;
  }

  const int deepest_;
  int depth_ = 0;
};

// Throws c10::Error, too, at the end of an object that has a name twice, which readers take for
// different things.
class UniqueNames : public DepthLimit {
 public:
  using DepthLimit::DepthLimit;

  bool key(string_t& name) override;
  bool start_object(std::size_t size) override;
  bool end_object() override;

 private:
  struct Names {
    std::string text;          // of all names, one after the other
    std::vector<size_t> ends;  // of each of them
  };

  std::vector<Names> names_;  // by level of the object; kept for the next object of that level
  size_t open_ = 0;           // objects
};

// The same for any text. Returns a discarded value for what is not JSON, and throws c10::Error
// as UniqueNames does.
nlohmann::json parse_json_of_depth(std::string_view text, int deepest);

}  // namespace zero
