// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/memory/segment_tensors.h: elements in the memory order of a master, and back.
#include "zero/memory/segment_tensors.h"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

namespace zero {
namespace {

TEST(SegmentTensorsTest, ElementsAreInTheOrderOfTheMaster) {
  const at::Tensor values = at::arange(120, at::kFloat).view({2, 3, 4, 5});
  const at::Tensor master = values.contiguous(at::MemoryFormat::ChannelsLast);
  // A state that has the master's order, and one that has another.
  for (const at::Tensor& state : {master, values}) {
    const at::Tensor elements = elements_of(state, master);
    ASSERT_EQ(elements.dim(), 1);
    EXPECT_EQ(elements.data_ptr() == state.data_ptr(), state.is_same(master));
    EXPECT_EQ(elements[1].item<float>(), values[0][1][0][0].item<float>());
    const at::Tensor back = in_shape_of(elements, master);
    EXPECT_EQ(back.data_ptr(), elements.data_ptr());
    EXPECT_EQ(back.strides(), master.strides());
    EXPECT_TRUE(back.equal(values));
  }
}

TEST(SegmentTensorsTest, PiecesScalarsAndNothing) {
  const at::Tensor piece = at::arange(7, at::kFloat);
  EXPECT_TRUE(elements_of(piece, piece).equal(piece));
  const at::Tensor scalar = piece[3];
  EXPECT_EQ(elements_of(scalar, scalar).sizes(), at::IntArrayRef({1}));
  EXPECT_EQ(in_shape_of(elements_of(scalar, scalar), scalar).dim(), 0);
  const at::Tensor none = piece.narrow(0, 2, 0);
  EXPECT_EQ(elements_of(none, none).numel(), 0);
}

}  // namespace
}  // namespace zero
