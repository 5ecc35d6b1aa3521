// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A struct as an object of JSON: one table of its fields writes it and reads it, so that the two
// directions cannot differ. A line of a table says a field's name, the member it fills, the form of
// its value, whether a file may lack it, and which version of the format introduced it:
//
//   JsonFields<Point> fields("a point",
//                            {
//                                {"x", &Point::x, whole(), kRequired, 1},
//                                {"label", &Point::label, text(), kOptional, 1},
//                            },
//                            /*check=*/nullptr);
//
// A member that a file does not fill keeps the value that a new struct has.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

namespace zero {

// kRequired: every file of version `since` or later has the field. kOptional: files of any version
// may lack it.
enum Presence { kRequired, kOptional };

// How a value becomes JSON, and back. `read` throws c10::Error for JSON that `write` cannot have
// written, and names the field.
template <typename Value>
struct JsonForm {
  std::function<nlohmann::ordered_json(const Value&)> write;
  std::function<Value(const nlohmann::json&, const char* name, int64_t version)> read;
};

template <typename Object>
struct JsonField {
  template <typename Value>
  JsonField(const char* field, Value Object::*member, const JsonForm<Value>& form, Presence when,
            int64_t version)
      : name(field),
        presence(when),
        since(version),
        write([=](const Object& object) { return form.write(object.*member); }),
        read([=](const nlohmann::json& value, int64_t file_version, Object& object) {
          object.*member = form.read(value, field, file_version);
        }) {}
  JsonField() = default;

  // Writes the field only where `needed` says so, so that files without a use for it stay as they
  // are.
  JsonField where(std::function<bool(const Object&)> needed) && {
    presence = kOptional;
    writes = std::move(needed);
    return std::move(*this);
  }

  const char* name = "";
  Presence presence = kRequired;
  int64_t since = 1;
  std::function<nlohmann::ordered_json(const Object&)> write;
  std::function<void(const nlohmann::json&, int64_t version, Object&)> read;
  std::function<bool(const Object&)> writes = nullptr;  // null: always
};

template <typename Object>
class JsonFields {
 public:
  using Check = std::function<void(const Object&)>;

  // `what` names the object in errors. `check`, if any, runs on what was read and throws for values
  // that do not go together.
  JsonFields(const char* what, std::vector<JsonField<Object>> fields, Check check)
      : what_(what), fields_(std::move(fields)), check_(std::move(check)) {}

  // Appends the fields to an object, in the table's order.
  void write(const Object& object, nlohmann::ordered_json& into) const {
    for (const JsonField<Object>& field : fields_) {
      if (!field.writes || field.writes(object)) into[field.name] = field.write(object);
    }
  }

  // Fields that the table does not have are ignored. Throws c10::Error.
  void read(const nlohmann::json& value, int64_t version, Object& into) const {
    TORCH_CHECK(value.is_object(), "expected ", what_, " as an object, got another ",
                value.type_name());
    for (const JsonField<Object>& field : fields_) {
      const auto found = value.find(field.name);
      if (found != value.end()) {
        field.read(*found, version, into);
        continue;
      }
      TORCH_CHECK(field.presence == kOptional || version < field.since, "expected the field \"",
                  field.name, "\" of ", what_, ", which every file since version ", field.since,
                  " has, got none");
    }
    if (check_) check_(into);
  }

 private:
  const char* const what_;
  const std::vector<JsonField<Object>> fields_;
  const Check check_;
};

// An object. `fields` must live as long as the form.
template <typename Object>
JsonForm<Object> object_of(const JsonFields<Object>& fields) {
  return {[&fields](const Object& object) {
            nlohmann::ordered_json value = nlohmann::ordered_json::object();
            fields.write(object, value);
            return value;
          },
          [&fields](const nlohmann::json& value, const char*, int64_t version) {
            Object object;
            fields.read(value, version, object);
            return object;
          }};
}

template <typename Value>
JsonForm<std::vector<Value>> list_of(const JsonForm<Value>& form) {
  return {[form](const std::vector<Value>& values) {
            nlohmann::ordered_json list = nlohmann::ordered_json::array();
            for (const Value& value : values) list.push_back(form.write(value));
            return list;
          },
          [form](const nlohmann::json& list, const char* name, int64_t version) {
            TORCH_CHECK(list.is_array(), name, ": expected a list, got another ", list.type_name());
            std::vector<Value> values;
            for (const nlohmann::json& value : list) {  // without reserve(): it may be hostile
              values.push_back(form.read(value, name, version));
            }
            return values;
          }};
}

// Of objects. `fields` must live as long as the form.
template <typename Object>
JsonForm<std::vector<Object>> list_of(const JsonFields<Object>& fields) {
  return list_of(object_of(fields));
}

// Members of one struct as an object of their own within its JSON. `fields` must live as long.
template <typename Object>
JsonField<Object> section(const char* name, const JsonFields<Object>& fields, Presence presence,
                          int64_t since) {
  JsonField<Object> field;
  field.name = name;
  field.presence = presence;
  field.since = since;
  field.write = object_of(fields).write;
  field.read = [&fields](const nlohmann::json& value, int64_t version, Object& object) {
    fields.read(value, version, object);
  };
  return field;
}

}  // namespace zero
