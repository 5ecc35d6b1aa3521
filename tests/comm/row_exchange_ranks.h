// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Ranks that exchange rows, over every transport and in two levels.
#pragma once

#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/transports.h"

namespace zero {

class RowExchangeTest : public WireTest {};

INSTANTIATE_TEST_SUITE_P(Wires, RowExchangeTest, ::testing::ValuesIn(wire_cases()),
                         [](const auto& info) { return wire_case_name(info); });

inline at::Tensor serial_sum(const std::vector<at::Tensor>& rows) {
  at::Tensor sum = rows.at(0).to(at::kFloat);
  for (size_t i = 1; i < rows.size(); ++i) sum = sum + rows[i].to(at::kFloat);
  return sum;
}

}  // namespace zero
