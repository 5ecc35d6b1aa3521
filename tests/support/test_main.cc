// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The main() of tests that have none of their own.
#include <gtest/gtest.h>

#include "tests/support/end_at_once.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  zero::end_at_once(RUN_ALL_TESTS());
}
