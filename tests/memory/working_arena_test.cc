// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/working_arena.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/flat_model.h"
#include "tests/support/random_tensors.h"

namespace zero {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kPerParameter};

Tensors values(c10::ScalarType dtype) {
  return {random_tensor({3, 5}, 1).to(dtype), random_tensor({7}, 2).to(dtype),
          random_tensor({1}, 3).to(dtype), random_tensor({33}, 4).to(dtype)};
}

struct Arena {
  explicit Arena(const Tensors& initial, Layout layout, int64_t world_size = 2)
      : flat(initial, world_size, {layout, 256}), arena(flat.plan, flat.table, flat.pool) {}
  at::Tensor& parameter(size_t p) { return flat.model.values[p]; }
  void expect_values(const Tensors& expected) {
    for (size_t p = 0; p < expected.size(); ++p) {
      EXPECT_TRUE(at::equal(parameter(p).detach(), expected[p])) << p;
    }
  }
  Tensors broadcasts() const {
    Tensors result;
    for (const WorkingArena::Broadcast& b : arena.broadcasts()) result.push_back(b.tensor);
    return result;
  }
  bool in_the_arena(const at::Tensor& tensor) {
    const at::Tensor whole = broadcasts().at(0);
    const char* begin = static_cast<const char*>(whole.const_data_ptr());
    const char* data = static_cast<const char*>(tensor.const_data_ptr());
    return begin <= data && data < begin + whole.nbytes();
  }

  FlatModel flat;
  WorkingArena arena;
};

TEST(WorkingArenaTest, ParametersBecomeViewsOfOneTensorWithTheirValues) {
  const Tensors initial = values(at::kFloat);
  Arena a(initial, Layout::kContiguous);
  ASSERT_EQ(a.broadcasts().size(), 1u);
  a.expect_values(initial);
  for (size_t p = 0; p < initial.size(); ++p) EXPECT_TRUE(a.in_the_arena(a.parameter(p)));
  // What is written to a row is in the parameter.
  for (int64_t b = 0; b < a.flat.buckets(); ++b) a.arena.rows(b).values().fill_(7);
  for (size_t p = 0; p < initial.size(); ++p) {
    EXPECT_TRUE(at::equal(a.parameter(p), at::full(initial[p].sizes(), 7.0))) << p;
  }
}

TEST(WorkingArenaTest, TheModelKeepsItsStorageInThePerParameterLayout) {
  FlatModel flat(values(at::kFloat), 2, {Layout::kPerParameter, 256});
  std::vector<const void*> before;
  for (const at::Tensor& p : flat.model.values) before.push_back(p.const_data_ptr());
  WorkingArena arena(flat.plan, flat.table, flat.pool);
  for (size_t p = 0; p < before.size(); ++p) {
    EXPECT_EQ(flat.model.values[p].const_data_ptr(), before[p]);
  }
}

TEST(WorkingArenaTest, RowsThatAreGatheredArePublished) {
  for (const int64_t world_size : {1, 2, 3, 4}) {
    for (const Layout layout : kLayouts) {
      Arena a(values(at::kBFloat16), layout, world_size);
      Tensors expected;
      for (const at::Tensor& value : values(at::kBFloat16)) expected.push_back(value * 2);
      for (int64_t b = 0; b < a.flat.buckets(); ++b) {
        const Rows rows = a.arena.rows(b);
        EXPECT_EQ(rows.values().scalar_type(), at::kBFloat16);
        for (int64_t rank = 0; rank < world_size; ++rank) {
          for (const Segment& s : a.flat.plan.segments(b, rank)) {
            rows.row(rank).narrow(0, s.offset, s.numel).copy_(part_of(expected[s.parameter], s));
          }
        }
        a.arena.publish(b, rows);
      }
      a.expect_values(expected);
      EXPECT_EQ(a.flat.pool.peak_bytes() == 0, layout == Layout::kContiguous);
    }
  }
}

TEST(WorkingArenaTest, ARowIsReadInFp32WithZerosForPadding) {
  for (const int64_t world_size : {1, 2, 3, 4}) {
    for (const Layout layout : kLayouts) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        const Tensors initial = values(dtype);
        Arena a(initial, layout, world_size);
        int64_t read = 0;
        for (int64_t b = 0; b < a.flat.buckets(); ++b) {
          for (int64_t rank = 0; rank < world_size; ++rank) {
            at::Tensor expected = at::zeros({a.flat.row_numel(b)});
            for (const Segment& s : a.flat.plan.segments(b, rank)) {
              expected.narrow(0, s.offset, s.numel).copy_(part_of(initial[s.parameter], s));
              read += s.numel;
            }
            const at::Tensor row = at::full_like(expected, 9);
            a.arena.read_row(b, rank, row);
            EXPECT_TRUE(at::equal(row, expected)) << "bucket " << b << " rank " << rank;
          }
        }
        EXPECT_EQ(read, 15 + 7 + 1 + 33);
      }
    }
  }
}

TEST(WorkingArenaTest, AttachTakesBackAParameterThatWasGivenOtherMemory) {
  for (const bool keep_values : {true, false}) {
    const Tensors initial = values(at::kFloat);
    Arena a(initial, Layout::kContiguous);
    const void* place = a.parameter(1).const_data_ptr();
    a.parameter(1).set_data(initial[1] + 1);
    EXPECT_FALSE(a.in_the_arena(a.parameter(1)));
    a.arena.attach(keep_values);
    EXPECT_EQ(a.parameter(1).const_data_ptr(), place);
    EXPECT_TRUE(at::equal(a.parameter(1).detach(), initial[1] + (keep_values ? 1 : 0)));
    a.arena.attach(keep_values);
    EXPECT_EQ(a.parameter(1).const_data_ptr(), place);
  }
}

TEST(WorkingArenaTest, AttachTakesBackATransposedViewOfTheParametersOwnMemory) {
  for (const Layout layout : kLayouts) {
    for (const bool keep_values : {true, false}) {
      const at::Tensor initial = random_tensor({4, 4}, 1);
      Arena a({initial.clone()}, layout);
      a.parameter(0).set_data(a.parameter(0).data().t());
      a.arena.attach(keep_values);
      EXPECT_EQ(a.parameter(0).strides(), at::IntArrayRef({4, 1}));
      const bool kept = keep_values || layout == Layout::kPerParameter;
      EXPECT_TRUE(at::equal(a.parameter(0).detach(), kept ? initial.t() : initial));
    }
  }
}

TEST(WorkingArenaTest, ParametersThatWereExchangedKeepTheirValues) {
  const Tensors initial = {random_tensor({7}, 1), random_tensor({7}, 2), random_tensor({7}, 3)};
  Arena a(initial, Layout::kContiguous);
  const at::Tensor first = a.parameter(0).data();
  a.parameter(0).set_data(a.parameter(1).data());
  a.parameter(1).set_data(a.parameter(2).data());
  a.parameter(2).set_data(first);
  a.expect_values({initial[1], initial[2], initial[0]});
  a.arena.attach();
  a.expect_values({initial[1], initial[2], initial[0]});
}

TEST(WorkingArenaTest, EveryParameterKeepsItsMemoryOrder) {
  const at::Tensor last = random_tensor({2, 3, 4, 5}, 5).contiguous(at::MemoryFormat::ChannelsLast);
  for (const Layout layout : kLayouts) {
    Arena a({last}, layout);
    EXPECT_EQ(a.parameter(0).strides(), last.strides());
    a.expect_values({last});
    // Also after the memory was replaced by one of another order.
    a.parameter(0).set_data(last.contiguous());
    a.arena.attach();
    EXPECT_EQ(a.parameter(0).strides(), last.strides());
    a.expect_values({last});
  }
}

TEST(WorkingArenaTest, MemoryWithGapsNeedsTheContiguousLayout) {
  const at::Tensor gaps = random_tensor({4, 6}, 6);
  for (const Layout layout : kLayouts) {
    FlatModel flat({at::zeros({4, 3})}, 2, {layout, 256});
    flat.model.values[0].set_data(gaps.slice(1, 0, 6, 2));
    const std::string error =
        error_of([&] { const WorkingArena arena(flat.plan, flat.table, flat.pool); });
    if (layout == Layout::kContiguous) {
      EXPECT_EQ(error, "");
      EXPECT_TRUE(at::equal(flat.model.values[0].detach(), gaps.slice(1, 0, 6, 2)));
    } else {
      expect_words(error, {"parameter value0", "expected dense memory", "Layout::kContiguous"});
    }
  }
}

TEST(WorkingArenaTest, BroadcastsReachEveryElementOfEveryParameter) {
  for (const Layout layout : kLayouts) {
    const Tensors initial = values(at::kFloat);
    Arena a(initial, layout);
    for (const at::Tensor& tensor : a.broadcasts()) {
      EXPECT_TRUE(tensor.is_contiguous());
      EXPECT_FALSE(tensor.requires_grad());
      tensor.fill_(3);
    }
    for (size_t p = 0; p < initial.size(); ++p) {
      EXPECT_TRUE(at::equal(a.parameter(p), at::full(initial[p].sizes(), 3.0)));
    }
  }
}

TEST(WorkingArenaTest, OnlyFp32RowsInPlaceAreMasters) {
  EXPECT_TRUE(Arena(values(at::kFloat), Layout::kContiguous).arena.is_master(0));
  EXPECT_FALSE(Arena(values(at::kBFloat16), Layout::kContiguous).arena.is_master(0));
  EXPECT_FALSE(Arena(values(at::kFloat), Layout::kPerParameter).arena.is_master(0));
}

}  // namespace
}  // namespace zero
