// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// JSON that others may have written, and structs as objects of JSON. JSON is refused while it is
// parsed where it is made to exhaust the stack or memory, or to say different things to different
// readers: a checksum that matches makes nothing safe.
#pragma once

#include <c10/util/Exception.h>

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

  bool null() override { return count(); }
  bool boolean(bool) override { return count(); }
  bool number_integer(number_integer_t) override { return count(); }
  bool number_unsigned(number_unsigned_t) override { return count(); }
  bool number_float(number_float_t, const string_t&) override { return count(); }
  bool binary(binary_t&) override { return count(); }
  bool string(string_t&) override { return count(); }
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

// A struct as an object of JSON: one function lists its fields, to write them and to read them, so
// that the two directions cannot differ. A line says a field's name, its member, and which version
// of the format introduced it:
//
//   template <>
//   struct JsonFields<Point> {
//     static constexpr char kWhat[] = "a point";  // in errors
//     static void list(auto& fields, auto& point) {
//       fields.required("x", point.x);
//       fields.required("y", point.y, /*since=*/2);
//       fields.optional("label", point.label);
//     }
//     // Throws where values do not go together; may be left out.
//     static void check(const Point& point);
//   };
//
// A member that a file does not fill keeps the value that a new struct has. Fields that the list
// does not have are ignored. What is read throws c10::Error for JSON that was not written so, and
// names the field.
template <typename Object>
struct JsonFields;

// How a value becomes JSON and back: of objects by JsonFields, and specialised for other types. A
// type with the same two functions may take its place for a field.
template <typename Value>
struct JsonForm;

class FieldWriter {
 public:
  // Appends the fields to an object, in the order of the list.
  explicit FieldWriter(nlohmann::ordered_json& into) : into_(into) {}

  // Every file of version `since` or later has the field.
  template <typename Value, typename Form = JsonForm<Value>>
  void required(const char* name, const Value& value, int64_t /*since*/ = 1, Form = {}) {
    into_[name] = Form::write(value);
  }
  // Files of any version may lack it: it is written only where it is needed, so that files without
  // a use for it stay as they are.
  template <typename Value, typename Form = JsonForm<Value>>
  void optional(const char* name, const Value& value, bool needed = true, Form = {}) {
    if (needed) into_[name] = Form::write(value);
  }
  // Members of the same struct as an object of their own. `list` gets the fields to go on with.
  template <typename List>
  void section(const char* name, const List& list) {
    FieldWriter fields(into_[name] = nlohmann::ordered_json::object());
    list(fields);
  }

 private:
  nlohmann::ordered_json& into_;
};

class FieldReader {
 public:
  FieldReader(const char* what, const nlohmann::json& object, int64_t version)
      : what_(what), object_(object), version_(version) {
    TORCH_CHECK(object.is_object(), "expected ", what, " as an object, got another ",
                object.type_name());
  }

  template <typename Value, typename Form = JsonForm<Value>>
  void required(const char* name, Value& value, int64_t since = 1, Form = {}) {
    if (const auto* field = find(name, since)) value = Form::read(*field, name, version_);
  }
  template <typename Value, typename Form = JsonForm<Value>>
  void optional(const char* name, Value& value, bool /*needed*/ = true, Form = {}) {
    const auto field = object_.find(name);
    if (field != object_.end()) value = Form::read(*field, name, version_);
  }
  template <typename List>
  void section(const char* name, const List& list) {
    FieldReader fields(name, *find(name, 1), version_);
    list(fields);
  }

 private:
  // Null for a field of a later version than the file's.
  const nlohmann::json* find(const char* name, int64_t since) const {
    const auto field = object_.find(name);
    if (field != object_.end()) return &*field;
    TORCH_CHECK(version_ < since, "expected the field \"", name, "\" of ", what_,
                ", which every file since version ", since, " has, got none");
    return nullptr;
  }

  const char* const what_;
  const nlohmann::json& object_;
  const int64_t version_;
};

template <typename Object>
struct JsonForm {
  static nlohmann::ordered_json write(const Object& object) {
    nlohmann::ordered_json result = nlohmann::ordered_json::object();
    FieldWriter fields(result);
    JsonFields<Object>::list(fields, object);
    return result;
  }
  static Object read(const nlohmann::json& value, const char* /*name*/, int64_t version) {
    Object object;
    FieldReader fields(JsonFields<Object>::kWhat, value, version);
    JsonFields<Object>::list(fields, object);
    if constexpr (requires { JsonFields<Object>::check(object); }) {
      JsonFields<Object>::check(object);
    }
    return object;
  }
};

template <typename Item>
struct JsonForm<std::vector<Item>> {
  static nlohmann::ordered_json write(const std::vector<Item>& items) {
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (const Item& item : items) list.push_back(JsonForm<Item>::write(item));
    return list;
  }
  static std::vector<Item> read(const nlohmann::json& list, const char* name, int64_t version) {
    TORCH_CHECK(list.is_array(), name, ": expected a list, got another ", list.type_name());
    std::vector<Item> items;
    for (const nlohmann::json& item : list) {  // without reserve(): it may be hostile
      items.push_back(JsonForm<Item>::read(item, name, version));
    }
    return items;
  }
};

}  // namespace zero
