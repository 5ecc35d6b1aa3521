// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Files for plain torch and Python. One of optimizer state has tensors
// "state.<parameter>.<name of torch>", and in its metadata the class and the groups by the names
// that torch.optim of Python gives them.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zero {

inline constexpr char kPlainOptimizer[] = "optimizer";
inline constexpr char kPlainGroups[] = "param_groups";

// The key of a state tensor; `kind` is without a prefix of the checkpoint and has no dot.
std::string plain_state_key(const std::string& parameter, const std::string& kind);
// The inverse, {parameter, kind}. Throws c10::Error for another key; `path` is for errors.
std::pair<std::string, std::string> parse_plain_state_key(const std::string& key,
                                                          const std::string& path);

// The name of a class without "zero::", since Python has some of them too: "Muon + AdamW".
std::string plain_class_name(const std::string& optimizer);

// The shape of Adafactor's row_var and col_var for a parameter of that shape; none for other state,
// which has the parameter's own.
std::optional<std::vector<int64_t>> factor_shape(const std::string& kind, c10::IntArrayRef shape);

}  // namespace zero
