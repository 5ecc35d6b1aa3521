// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "zero/checkpoint_options.h"

namespace zero {

// An object that a save includes.
struct Note : Stateful {
  explicit Note(std::string content = {}) : text(std::move(content)) {}
  std::string state() const override { return text; }
  void set_state(const std::string& state) override { text = state; }
  std::string text;
};

}  // namespace zero
