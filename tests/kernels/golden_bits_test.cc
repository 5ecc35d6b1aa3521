// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The results of all loops over fixed inputs, as hashes that were written down once: every
// instruction set of every processor gives these bits. .ci/processors runs this file on emulated
// processors; of libtorch it uses libc10 alone. Inputs of arithmetic are finite, since the sign and
// payload of a NaN that an operation makes depend on the processor.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_capability.h"
#include "kernels/detail/bias_correction.h"
#include "kernels/row_changes.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

struct Golden {
  const char* name;
  uint64_t (*hash)(const RangeKernels& kernels);
  uint64_t expected;
};

// FNV-1a.
class Hash {
 public:
  template <class T>
  void add(const T* values, int64_t count) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values);
    for (size_t i = 0; i < static_cast<size_t>(count) * sizeof(T); ++i) {
      value_ = (value_ ^ bytes[i]) * 0x100000001b3U;
    }
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(values.data(), static_cast<int64_t>(values.size()));
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325U;
};

// Less than a vector, a little more than one, and several chunks and blocks with a rest.
constexpr int64_t kNumels[] = {3, 33, 4099};
constexpr ElementType kTypes[] = {ElementType::kFloat, ElementType::kBFloat16, ElementType::kHalf};

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

int64_t bytes_of(ElementType type, int64_t numel) {
  return numel * (type == ElementType::kFloat ? 4 : 2);
}

// Exact in every step, as no distribution of the standard library is: 24 bits times powers of two.
Floats finite(int64_t numel, uint32_t seed, float scale = 1.0F) {
  std::mt19937 generator(seed);
  Floats values(numel);
  for (float& value : values) {
    const uint32_t bits = generator();
    const auto exponent = static_cast<uint32_t>(127 - static_cast<int>(generator() % 12));
    value = static_cast<float>(static_cast<int32_t>(bits) >> 8) * 0x1p-23F *
            std::bit_cast<float>(exponent << 23) * scale;
  }
  return values;
}

Floats positive(int64_t numel, uint32_t seed, float scale) {
  Floats values = finite(numel, seed, scale);
  for (float& value : values) value = value < 0.0F ? -value : value;
  return values;
}

Floats any(int64_t numel, uint32_t seed) {
  Floats values(numel);
  fill_any_bits(values.data(), numel, seed);
  return values;
}

Bytes as(const RangeKernels& kernels, ElementType type, const Floats& values) {
  const auto numel = static_cast<int64_t>(values.size());
  Bytes converted(bytes_of(type, numel));
  kernels.cast_copy(values.data(), ElementType::kFloat, converted.data(), type, numel, nullptr);
  return converted;
}

template <class Body>
uint64_t hash_of_numels(const Body& add) {
  Hash hash;
  for (const int64_t numel : kNumels) add(hash, numel);
  return hash.value();
}

uint64_t hash_of_casts(const RangeKernels& kernels) {
  return hash_of_numels([&](Hash& hash, int64_t numel) {
    for (const ElementType from : kTypes) {
      for (const ElementType to : kTypes) {
        // The bits of floats are those of two numbers of 16 bits too.
        const Floats source = any(numel, 1);
        Bytes destination(bytes_of(to, numel));
        kernels.cast_copy(source.data(), from, destination.data(), to, numel, nullptr);
        hash.add(destination);
      }
    }
  });
}

uint64_t hash_of_rounded_floats(const RangeKernels& kernels) {
  return hash_of_numels([&](Hash& hash, int64_t numel) {
    Floats values = any(numel, 1);
    kernels.round_to_bfloat16(values.data(), numel);
    hash.add(values);
  });
}

uint64_t hash_of_additions(const RangeKernels& kernels) {
  return hash_of_numels([&](Hash& hash, int64_t numel) {
    for (const ElementType from : kTypes) {
      for (const ElementType to : kTypes) {
        const Bytes source = as(kernels, from, finite(numel, 1));
        Bytes destination = as(kernels, to, finite(numel, 2));
        kernels.cast_copy(source.data(), from, destination.data(), to, numel, destination.data());
        hash.add(destination);
      }
    }
  });
}

uint64_t hash_of_sum_rows(const RangeKernels& kernels) {
  return hash_of_numels([&](Hash& hash, int64_t numel) {
    for (const ElementType type : kTypes) {
      for (const int64_t world : {1, 2, 5}) {
        const Bytes received = as(kernels, type, finite(world * numel, 3));
        const Bytes own = as(kernels, type, finite(numel, 4));
        Floats shard = finite(numel, 5);
        for (const bool accumulate : {true, false}) {
          SumRowsRange range{};
          range.received = received.data();
          range.own = own.data();
          range.shard = shard.data();
          range.row_stride = numel;
          range.numel = numel;
          range.world_size = world;
          range.own_rank = world / 2;
          range.type = type;
          range.factor = 1.0F / 3.0F;
          range.accumulate = accumulate;
          kernels.sum_rows(range);
          hash.add(shard);
        }
      }
    }
  });
}

uint64_t hash_of_encoded_blocks(const RangeKernels& kernels) {
  return hash_of_numels([&](Hash& hash, int64_t numel) {
    for (const ElementType type : kTypes) {
      for (const Floats& source : {any(numel, 6), finite(numel, 7)}) {
        const Bytes converted = as(kernels, type, source);
        Floats scales((numel + kInt8Block - 1) / kInt8Block);
        std::vector<int8_t> values(numel);
        kernels.encode_block_int8(converted.data(), type, numel, scales.data(), values.data());
        hash.add(scales);
        hash.add(values);
      }
    }
  });
}

uint64_t hash_of_summed_blocks(const RangeKernels& kernels) {
  return hash_of_numels([&](Hash& hash, int64_t numel) {
    constexpr int64_t kWorld = 3;
    const int64_t blocks = (numel + kInt8Block - 1) / kInt8Block;
    const int64_t row_bytes = (4 * blocks + numel + 3) / 4 * 4;
    std::vector<Floats> rows(kWorld, Floats(row_bytes / 4));
    std::array<const void*, kWorld> addresses{};
    for (int64_t r = 0; r < kWorld; ++r) {
      const Floats source = finite(numel, static_cast<uint32_t>(8 + r));
      kernels.encode_block_int8(source.data(), ElementType::kFloat, numel, rows[r].data(),
                                reinterpret_cast<int8_t*>(rows[r].data() + blocks));
      addresses[r] = rows[r].data();
    }
    Floats shard = finite(numel, 11);
    for (const bool accumulate : {true, false}) {
      SumBlockInt8Range range{};
      range.rows = addresses.data();
      range.shard = shard.data();
      range.row_bytes = row_bytes;
      range.values_begin = 4 * blocks;
      range.end = numel;
      range.world_size = kWorld;
      range.factor = 1.0F / 3.0F;
      range.accumulate = accumulate;
      kernels.sum_block_int8(range);
      hash.add(shard);
    }
  });
}

uint64_t hash_of_exact_sums(const RangeKernels& kernels) {
  return hash_of_numels([&](Hash& hash, int64_t numel) {
    std::vector<int64_t> sum(kExactNumel);
    kernels.add_squares_exactly(finite(numel, 12).data(), numel, sum.data());
    kernels.add_squares_exactly(any(numel, 13).data(), numel, sum.data());
    hash.add(sum);
  });
}

uint64_t hash_of_norms(const RangeKernels& kernels) {
  return hash_of_numels([&](Hash& hash, int64_t numel) {
    const Floats values = finite(numel, 12), bits = any(numel, 13);
    const double sums[] = {kernels.sum_of_squares(values.data(), numel),
                           kernels.sum_of_abs(values.data(), numel)};
    hash.add(sums, 2);
    const int64_t counts[] = {kernels.count_nonfinite(bits.data(), numel),
                              kernels.max_abs_bits(bits.data(), numel)};
    hash.add(counts, 2);
  });
}

// Two updates for each variant, without a working parameter and with one of each type.
template <class Update>
void add_updates(Hash& hash, const Update& update) {
  for (const int64_t numel : kNumels) {
    for (int i = 0; i < 4; ++i) {
      const ElementType type = kTypes[i % 3];
      Floats p = finite(numel, 14), m = finite(numel, 15, 0x1p-7F);
      Floats v = positive(numel, 16, 0x1p-14F), max_v = positive(numel, 17, 0x1p-14F);
      const Floats gradient = finite(numel, 18, 0x1p-5F);
      Bytes working(bytes_of(type, numel));
      for (int step = 0; step < 2; ++step) {
        update(numel, p, m, v, max_v, gradient, i == 3 ? nullptr : working.data(), type);
      }
      for (const Floats* floats : {&p, &m, &v, &max_v}) hash.add(*floats);
      hash.add(working);
    }
  }
}

AdamCoefficients adam_coefficients(bool amsgrad, bool decoupled) {
  return {.decay = 0.999F,
          .weight_decay = 0.01F,
          .beta1 = 0.9F,
          .one_minus_beta1 = 0.1F,
          .beta2 = 0.999F,
          .one_minus_beta2 = 0.001F,
          .eps = 1e-8F,
          .sqrt_bias_correction2 = 0.0836F,
          .negative_step_size = -0.0019F,
          .amsgrad = amsgrad,
          .decoupled = decoupled};
}

constexpr LionCoefficients kLion{.decay = 0.999F,
                                 .beta1 = 0.9F,
                                 .one_minus_beta1 = 0.1F,
                                 .beta2 = 0.99F,
                                 .one_minus_beta2 = 0.01F,
                                 .negative_lr = -0.003F};

uint64_t hash_of_adam(const RangeKernels& kernels) {
  Hash hash;
  for (const int variant : {0, 1, 2, 3}) {
    const AdamCoefficients c = adam_coefficients(variant % 2 != 0, variant / 2 != 0);
    add_updates(hash, [&](int64_t numel, Floats& p, Floats& m, Floats& v, Floats& max_v,
                          const Floats& gradient, void* working, ElementType type) {
      AdamSegment range;
      range.master = p.data();
      range.exp_avg = m.data();
      range.exp_avg_sq = v.data();
      range.max_exp_avg_sq = max_v.data();
      range.gradient = gradient.data();
      range.working = working;
      range.numel = numel;
      kernels.adam(range, c, 0.7F, type);
    });
  }
  return hash.value();
}

uint64_t hash_of_sgd(const RangeKernels& kernels) {
  Hash hash;
  for (const int variant : {0, 1, 2, 3, 4}) {
    const SgdCoefficients c{.negative_lr = -0.1F,
                            .momentum = variant == 0 ? 0.0F : 0.9F,
                            .one_minus_dampening = 0.8F,
                            .weight_decay = variant == 1 ? 0.0F : 0.01F,
                            .nesterov = variant >= 3};
    add_updates(hash, [&](int64_t numel, Floats& p, Floats& m, Floats&, Floats&,
                          const Floats& gradient, void* working, ElementType type) {
      SgdSegment range;
      range.master = p.data();
      range.momentum = m.data();
      range.gradient = gradient.data();
      range.working = working;
      range.numel = numel;
      range.first_step = variant % 2 == 0;
      kernels.sgd(range, c, 0.7F, type);
    });
  }
  return hash.value();
}

uint64_t hash_of_lion(const RangeKernels& kernels) {
  Hash hash;
  add_updates(hash, [&](int64_t numel, Floats& p, Floats& m, Floats&, Floats&,
                        const Floats& gradient, void* working, ElementType type) {
    kernels.lion({p.data(), m.data(), gradient.data(), working, numel}, kLion, 0.7F, type);
  });
  return hash.value();
}

uint64_t hash_of_ema(const RangeKernels& kernels) {
  Hash hash;
  add_updates(hash, [&](int64_t numel, Floats& p, Floats& m, Floats&, Floats&, const Floats&, void*,
                        ElementType) {
    kernels.ema({m.data(), p.data(), numel}, 0.003F);
  });
  return hash.value();
}

// Two updates of stored state for each rule, of a piece in the middle of a parameter. Arrays of all
// types take less than four bytes for each element and eight.
uint64_t hash_of_stored(const RangeKernels& kernels) {
  Hash hash;
  for (const StateType type : {StateType::kBFloat16, StateType::kInt8}) {
    for (const int64_t numel : kNumels) {
      for (int rule = 0; rule < 3; ++rule) {
        Floats p = finite(numel, 20), max_v = positive(numel, 21, 0x1p-14F);
        Floats m(numel + 2), v(numel + 2);
        const Floats gradient = finite(numel, 22, 0x1p-5F);
        Bytes working(bytes_of(ElementType::kBFloat16, numel));
        for (int64_t step = 1; step < 3; ++step) {
          const NoiseStep noise{step, nullptr};
          AdamSegment s;
          s.master = p.data();
          s.exp_avg = m.data();
          s.exp_avg_sq = v.data();
          s.max_exp_avg_sq = max_v.data();
          s.gradient = gradient.data();
          s.working = working.data();
          s.numel = numel;
          s.state_type = type;
          s.parameter = 7;
          s.element = 512;
          if (rule == 0) {
            const AdamCoefficients c = adam_coefficients(numel == 33, numel != 3);
            kernels.stored_adam(s, 0, numel, noise, c, 0.7F, ElementType::kBFloat16);
          } else if (rule == 1) {
            const SgdCoefficients c{.negative_lr = -0.1F,
                                    .momentum = 0.9F,
                                    .one_minus_dampening = 0.8F,
                                    .weight_decay = 0.01F,
                                    .nesterov = numel == 33};
            kernels.stored_sgd({s.master, s.exp_avg, s.gradient, s.working, numel, step == 1,
                                nullptr, type, s.parameter, s.element},
                               0, numel, noise, c, 0.7F, ElementType::kBFloat16);
          } else {
            kernels.stored_lion(
                {s.master, s.exp_avg, s.gradient, s.working, numel, type, s.parameter, s.element},
                0, numel, noise, kLion, 0.7F, ElementType::kBFloat16);
          }
        }
        for (const Floats* floats : {&p, &m, &v, &max_v}) hash.add(*floats);
        hash.add(working);
      }
    }
  }
  return hash.value();
}

uint64_t hash_of_codes(const RangeKernels& kernels) {
  Hash hash;
  for (const bool root : {false, true}) {
    for (const int64_t numel : kNumels) {
      Floats values = finite(numel, 23), stored(numel + 2);
      kernels.encode_codes(root, values.data(), numel, 0, numel, stored.data());
      kernels.decode_codes(root, stored.data(), numel, 0, numel, values.data());
      hash.add(stored);
      hash.add(values);
    }
  }
  return hash.value();
}

uint64_t hash_of_halves(const RangeKernels& kernels) {
  return hash_of_numels([&](Hash& hash, int64_t numel) {
    Floats values = any(numel, 24);
    std::vector<uint16_t> upper(numel);
    std::vector<int16_t> lower(numel);
    kernels.split_halves(values.data(), numel, upper.data(), lower.data());
    kernels.join_halves(upper.data(), lower.data(), numel, values.data());
    hash.add(upper);
    hash.add(lower);
    hash.add(values);
  });
}

// An update of split masters for each rule.
uint64_t hash_of_split_masters(const RangeKernels& kernels) {
  return hash_of_numels([&](Hash& hash, int64_t numel) {
    const Floats p = finite(numel, 25), gradient = finite(numel, 26, 0x1p-5F);
    Floats m = finite(numel, 27, 0x1p-5F), v = positive(numel, 28, 0x1p-14F);
    std::vector<uint16_t> upper(numel);
    std::vector<int16_t> lower(numel);
    kernels.split_halves(p.data(), numel, upper.data(), lower.data());
    AdamSegment s;
    s.exp_avg = m.data();
    s.exp_avg_sq = v.data();
    s.gradient = gradient.data();
    s.working = upper.data();
    s.numel = numel;
    s.remainder = lower.data();
    kernels.adam(s, adam_coefficients(/*amsgrad=*/false, /*decoupled=*/true), 0.7F,
                 ElementType::kBFloat16);
    SgdSegment sgd;
    sgd.momentum = m.data();
    sgd.gradient = gradient.data();
    sgd.working = upper.data();
    sgd.numel = numel;
    sgd.remainder = lower.data();
    kernels.sgd(sgd,
                {.negative_lr = -0.1F,
                 .momentum = 0.9F,
                 .one_minus_dampening = 0.8F,
                 .weight_decay = 0.01F,
                 .nesterov = false},
                0.7F, ElementType::kBFloat16);
    LionSegment lion;
    lion.exp_avg = m.data();
    lion.gradient = gradient.data();
    lion.working = upper.data();
    lion.numel = numel;
    lion.remainder = lower.data();
    kernels.lion(lion, kLion, 0.7F, ElementType::kBFloat16);
    hash.add(upper);
    hash.add(lower);
    hash.add(m);
    hash.add(v);
  });
}

constexpr Golden kGolden[] = {
    {"casts", hash_of_casts, 0xfe0eef71baaf5f74U},
    {"round_to_bfloat16", hash_of_rounded_floats, 0xba376df9bc2adcbfU},
    {"casts with an addend", hash_of_additions, 0x29b1680f5692fd47U},
    {"sum_rows", hash_of_sum_rows, 0x4cbb8c326840bd4aU},
    {"encode_block_int8", hash_of_encoded_blocks, 0xa7d42eebc6386f61U},
    {"sum_block_int8", hash_of_summed_blocks, 0x92cbc96cf994c8b3U},
    {"exact sums", hash_of_exact_sums, 0x65fe5a5f26a91b03U},
    {"norms", hash_of_norms, 0x00c2b39f489e9aa8U},
    {"adam", hash_of_adam, 0x4f8260382ca74f71U},
    {"sgd", hash_of_sgd, 0xf6ff701c12c20f14U},
    {"lion", hash_of_lion, 0x5e8d2c2275ec4c2cU},
    {"ema", hash_of_ema, 0x3151d31e090bea5dU},
    {"stored state", hash_of_stored, 0xd73556382f67dcd9U},
    {"codes", hash_of_codes, 0xc2fdeaa94fda0151U},
    {"halves", hash_of_halves, 0x6079a505adac01f1U},
    {"split masters", hash_of_split_masters, 0x1d3a4e90439a59bfU},
};
constexpr uint64_t kGoldenRowChanges = 0x80d1c76b3404f8e0U;
constexpr uint64_t kGoldenBiasCorrection = 0xbe146ba889b3a627U;

std::string hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "0x%016llxU", static_cast<unsigned long long>(value));
  return text;
}

class GoldenBits : public ::testing::TestWithParam<CpuCapability> {};

TEST_P(GoldenBits, EveryLoopHasTheBitsThatWereWrittenDown) {
  const RangeKernels* const kernels = range_kernels_for(GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "this processor lacks the instruction set";
  for (const Golden& golden : kGolden) {
    EXPECT_EQ(hex(golden.hash(*kernels)), hex(golden.expected)) << golden.name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenBits, ::testing::ValuesIn(kCpuCapabilities),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(GoldenBits, ChangesOfRowsHaveTheBitsThatWereWrittenDown) {
  Hash hash;
  for (const c10::ScalarType dtype :
       {c10::ScalarType::Float, c10::ScalarType::BFloat16, c10::ScalarType::Half}) {
    for (const int64_t numel : kNumels) {
      const Floats before = finite(numel, 19);
      Floats after = before;
      for (int64_t i = 0; i < numel; i += 2) {
        after[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(after[i]) + 0x00030005U);
      }
      Bytes changes(max_changes_bytes(dtype, numel));
      changes.resize(encode_changes(before.data(), after.data(), dtype, numel, changes.data()));
      Floats applied = before;
      ASSERT_TRUE(apply_changes(changes.data(), static_cast<int64_t>(changes.size()), dtype, numel,
                                applied.data()));
      hash.add(changes);
      hash.add(applied);
    }
  }
  EXPECT_EQ(hex(hash.value()), hex(kGoldenRowChanges));
}

// pow() is the one function of the C library in a step, and has variants for processors too.
TEST(GoldenBits, TheBiasCorrectionHasTheBitsThatWereWrittenDown) {
  Hash hash;
  for (const AdamPowers& powers : {AdamPowers{1e-3, 0.9, 0.999}, AdamPowers{3e-4, 0.95, 0.99},
                                   AdamPowers{1e-2, 0.8, 0.9999}}) {
    for (int step = 1; step <= 5000; ++step) {
      AdamCoefficients c{};
      set_bias_correction(powers, step, c);
      const float scalars[] = {c.sqrt_bias_correction2, c.negative_step_size};
      hash.add(scalars, 2);
    }
  }
  EXPECT_EQ(hex(hash.value()), hex(kGoldenBiasCorrection));
}

}  // namespace
}  // namespace zero::kernels
