// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/comm/exchange/changed_row.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

#include "kernels/row_changes.h"

namespace zero {
namespace {

struct Header {
  uint64_t before;
  int64_t changes;
};

uint64_t hash_of(const at::Tensor& row) { return XXH3_64bits(row.const_data_ptr(), row.nbytes()); }

}  // namespace

int64_t max_changed_row_bytes(const at::Tensor& row) {
  return static_cast<int64_t>(sizeof(Header)) +
         kernels::max_changes_bytes(row.scalar_type(), row.numel());
}

ChangedRow encode_changed_row(const at::Tensor& before, const at::Tensor& row) {
  const auto row_bytes = static_cast<int64_t>(row.nbytes());
  at::Tensor message = at::empty({max_changed_row_bytes(row)}, at::kByte);
  uint8_t* bytes = message.mutable_data_ptr<uint8_t>();
  uint8_t* content = bytes + sizeof(Header);
  Header header{hash_of(before),
                kernels::encode_changes(before.const_data_ptr(), row.const_data_ptr(),
                                        row.scalar_type(), row.numel(), content)};
  int64_t content_bytes = header.changes;
  if (header.changes >= row_bytes) {
    header.changes = 0;
    content_bytes = row_bytes;
    std::memcpy(content, row.const_data_ptr(), row.nbytes());
  }
  std::memcpy(bytes, &header, sizeof(header));
  return {message, static_cast<int64_t>(sizeof(header)) + content_bytes};
}

void apply_changed_row(const at::Tensor& message, const std::string& sender,
                       const at::Tensor& row) {
  const uint8_t* bytes = message.const_data_ptr<uint8_t>();
  const uint8_t* content = bytes + sizeof(Header);
  Header header{};
  std::memcpy(&header, bytes, sizeof(header));
  if (header.changes == 0) {
    std::memcpy(row.mutable_data_ptr(), content, row.nbytes());
    return;
  }
  TORCH_CHECK(
      header.before == hash_of(row), sender,
      " sends what has changed in its row, and expected this rank to have the same values "
      "of it before, but they differ: parameters were changed between steps, on some ranks "
      "only. check_replicas() finds which; call refresh_master_parameters() after a change, "
      "or send whole rows with gather_wire(GatherWire::kWhole)");
  const int64_t room = message.numel() - static_cast<int64_t>(sizeof(header));
  TORCH_CHECK(0 <= header.changes && header.changes <= room &&
                  kernels::apply_changes(content, header.changes, row.scalar_type(), row.numel(),
                                         row.mutable_data_ptr()),
              sender, " sent ", header.changes, " bytes that are not the changes of a row of ",
              row.numel(), " values");
}

}  // namespace zero
