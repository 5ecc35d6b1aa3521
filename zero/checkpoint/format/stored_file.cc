// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/stored_file.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <iterator>
#include <map>
#include <thread>
#include <utility>

#include "zero/base/threads.h"

namespace zero {
namespace {

constexpr uint64_t kHashBytes = 8;

uint64_t blocks_in(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

// As tensors, which are in the byte order of the machine, too.
static_assert(std::endian::native == std::endian::little);

std::string table_of(const std::vector<uint64_t>& hashes) {
  return {reinterpret_cast<const char*>(hashes.data()), hashes.size() * kHashBytes};
}

std::vector<uint64_t> hashes_of(const std::string& table) {
  std::vector<uint64_t> hashes(table.size() / kHashBytes);
  std::copy_n(table.data(), hashes.size() * kHashBytes, reinterpret_cast<char*>(hashes.data()));
  return hashes;
}

uint64_t index_hash(const std::string& beginning, const std::string& table) {
  ContentHash hash;
  hash.add(beginning.data(), beginning.size());
  hash.add(table.data(), table.size());
  return hash.value();
}

// A dtype that safetensors has no name for becomes bytes.
c10::ScalarType stored_dtype(const at::Tensor& tensor) {
  return safetensors_knows(tensor.scalar_type()) ? tensor.scalar_type() : at::kByte;
}

}  // namespace

BlockHashes::BlockHashes(FileToSave& file, const std::string& id) {
  // The order of lay_out_safetensors(), which then changes nothing.
  std::map<size_t, std::vector<TensorToSave>, std::greater<>> by_element_size;
  about_.reserve(file.tensors.size());
  for (TensorToSave& t : file.tensors) {
    about_.push_back(t.about);
    by_element_size[c10::elementSize(stored_dtype(t.tensor))].push_back(std::move(t));
  }
  file.tensors.clear();
  for (auto& [size, tensors] : by_element_size) {
    std::move(tensors.begin(), tensors.end(), std::back_inserter(file.tensors));
  }
  tensors_.reserve(file.tensors.size() + 1);
  uint64_t blocks = 0;
  for (const auto& [of, tensor, bucket] : file.tensors) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    const bool known = stored_dtype(tensor) == tensor.scalar_type();
    tensors_.push_back({tensor_key(of), stored_dtype(tensor),
                        known ? tensor.sizes().vec() : std::vector<int64_t>{bytes}, 0, 0});
    if (is_value(of.kind)) {
      content_.values.push_back({of.owner, of.kind});
      value_blocks_.push_back(blocks);
    }
    blocks += blocks_in(tensor.nbytes());
  }
  tensors_.push_back({kTableKey, at::kByte, {static_cast<int64_t>(blocks * kHashBytes)}, 0, 0});
  beginning_ = lay_out_safetensors(tensors_, {{"checkpoint", id}}, file.name);
  TORCH_INTERNAL_ASSERT(tensors_.back().name == kTableKey, "the table is the last tensor");
  content_.about.name = file.name;
  content_.about.bytes = tensors_.back().end;
  content_.about.blocks = static_cast<int64_t>(blocks);
  tensors_.pop_back();
  hashes_.reserve(blocks);
}

FileBytes BlockHashes::next() const {
  size_t t = tensor_;
  uint64_t done = done_;
  for (; t < tensors_.size() && tensors_[t].begin + done == tensors_[t].end; ++t) done = 0;
  if (t == tensors_.size()) return {};
  const uint64_t begin = tensors_[t].begin + done;
  return {begin, std::min(begin + kBlockBytes, tensors_[t].end)};
}

void BlockHashes::add(const void* data) {
  const FileBytes block = next();
  add_hash(content_hash(data, block.end - block.begin));
}

void BlockHashes::add_hash(uint64_t hash) {
  const FileBytes block = next();
  hashes_.push_back(hash);
  while (block.begin >= tensors_[tensor_].end) ++tensor_;
  done_ = block.end - tensors_[tensor_].begin;
}

std::string BlockHashes::table() const {
  TORCH_INTERNAL_ASSERT(next().end == 0, "all blocks have a hash");
  return table_of(hashes_);
}

FileContent BlockHashes::content() const {
  FileContent result = content_;
  result.tensors = tensors_by_name(about_);
  result.about.hash = index_hash(beginning_, table());
  for (size_t v = 0; v < value_blocks_.size(); ++v) {
    result.values[v].hash = hashes_.at(value_blocks_[v]);
  }
  // Pieces of one parameter mostly have one.
  std::sort(result.values.begin(), result.values.end());
  result.values.erase(std::unique(result.values.begin(), result.values.end()), result.values.end());
  return result;
}

namespace {

at::Tensor in_host_memory(const at::Tensor& tensor) { return tensor.detach().cpu().contiguous(); }

std::vector<uint64_t> hashes_of_blocks(const char* data, uint64_t bytes) {
  std::vector<uint64_t> hashes(blocks_in(bytes));
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    for (uint64_t b = next++; b < hashes.size(); b = next++) {
      const uint64_t begin = b * kBlockBytes;
      hashes[b] = content_hash(data + begin, std::min(kBlockBytes, bytes - begin));
    }
  };
  // A thread takes as long to start as a few blocks to hash.
  constexpr uint64_t kBlocksOfThread = 64;
  const auto count = std::min<uint64_t>(at::get_num_threads(), hashes.size() / kBlocksOfThread);
  std::vector<std::thread> threads;
  threads.reserve(count);
  try {
    while (threads.size() + 1 < count) threads.push_back(start_thread(work, "hash"));
  } catch (const std::exception&) {  // fewer hash all of it, too
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return hashes;
}

}  // namespace

FileContent write_file(FileToSave file, const std::string& path, const std::string& id) {
  FileWriter writer(path);
  BlockHashes hashes(file, id);
  writer.write(hashes.beginning().data(), hashes.beginning().size());
  for (size_t i = 0; i < file.tensors.size(); ++i) {
    const at::Tensor host = in_host_memory(file.tensors[i].tensor);
    const auto* const data = static_cast<const char*>(host.const_data_ptr());
    const FileBytes place = hashes.place(i);
    TORCH_INTERNAL_ASSERT(host.nbytes() == place.end - place.begin);
    // Block by block, so that the copy finds in the cache what was hashed.
    for (uint64_t at = place.begin; at < place.end;) {
      const FileBytes block = hashes.next();
      hashes.add(data + (at - place.begin));
      writer.write(data + (at - place.begin), block.end - block.begin);
      at = block.end;
    }
  }
  const std::string table = hashes.table();
  writer.write(table.data(), table.size());
  writer.finish();
  return hashes.content();
}

FileContent hash_file(FileToSave file, const std::string& id) {
  BlockHashes hashes(file, id);
  for (const TensorToSave& t : file.tensors) {
    const at::Tensor host = in_host_memory(t.tensor);
    const auto* const data = static_cast<const char*>(host.const_data_ptr());
    for (const uint64_t hash : hashes_of_blocks(data, host.nbytes())) hashes.add_hash(hash);
  }
  return hashes.content();
}

StoredFile::StoredFile(std::unique_ptr<StoredBytes> bytes, const ManifestFile& about,
                       const std::string& id)
    : bytes_(std::move(bytes)), has_blocks_(about.blocks >= 0), hash_(about.hash) {
  TORCH_CHECK(bytes_->size() == about.bytes, path(), ": expected ", about.bytes,
              " bytes as the manifest says, got ", bytes_->size(),
              "; the file was truncated or belongs to another checkpoint");
  const std::string beginning = read_safetensors_beginning(*bytes_);
  data_begin_ = beginning.size();
  SafetensorsHeader header = parse_safetensors_header(
      std::string_view(beginning).substr(kSafetensorsLengthBytes), about.bytes, path());
  const std::string& own_id = header.metadata["checkpoint"];
  const std::string& expected = about.id.empty() ? id : about.id;
  TORCH_CHECK(expected.empty() || own_id == expected, path(), ": expected a file of checkpoint ",
              expected, ", got one of checkpoint ", own_id,
              "; it was mixed in from another checkpoint or damaged");
  if (has_blocks_) read_table(beginning, header, about);
  list_tensors(header, about);
}

void StoredFile::read_table(const std::string& beginning, const SafetensorsHeader& header,
                            const ManifestFile& about) {
  const uint64_t table_bytes = static_cast<uint64_t>(about.blocks) * kHashBytes;
  TORCH_CHECK(table_bytes <= about.bytes - data_begin_, path(), ": expected the hashes of ",
              about.blocks, " blocks, got ", about.bytes - data_begin_, " bytes of tensors");
  const std::string table = bytes_->read_text(about.bytes - table_bytes, table_bytes);
  const uint64_t hash = index_hash(beginning, table);
  TORCH_CHECK(hash == hash_, path(), ": expected checksum ", hash_text(hash_),
              " of its header and its hashes, got ", hash_text(hash),
              "; the file is damaged, use another checkpoint");
  const StoredTensor* const stored = header.find(kTableKey);
  TORCH_CHECK(
      stored != nullptr && stored->begin == about.bytes - table_bytes && stored->end == about.bytes,
      path(), ": expected the hashes of ", about.blocks,
      " blocks as the last tensor, got another one");
  hashes_ = hashes_of(table);
  verified_.resize(hashes_.size());
}

void StoredFile::list_tensors(SafetensorsHeader& header, const ManifestFile& about) {
  tensors_.reserve(header.tensors.size());
  size_t block = 0;
  for (StoredTensor& t : header.tensors) {
    if (has_blocks_ && t.name == kTableKey) continue;
    if (!has_blocks_) {
      const auto listed = about.tensor_hashes.find(t.name);
      if (listed == about.tensor_hashes.end()) continue;
      hashes_.push_back(listed->second);
    }
    first_block_.push_back(block);
    block += has_blocks_ ? blocks_in(t.end - t.begin) : 1;
    tensors_.push_back(std::move(t));
  }
  numbers_.reserve(tensors_.size());
  for (const StoredTensor& t : tensors_) numbers_.emplace(t.name, numbers_.size());
  TORCH_CHECK(block == hashes_.size(), path(), ": expected a hash for each of ", block,
              " blocks, got ", hashes_.size());
}

std::vector<FileBytes> StoredFile::index() const {
  if (!has_blocks_) return {{0, data_begin_}};
  return {{0, data_begin_}, {bytes_->size() - hashes_.size() * kHashBytes, bytes_->size()}};
}

const StoredTensor& StoredFile::tensor(const std::string& key) const {
  const auto found = numbers_.find(key);
  TORCH_CHECK(found != numbers_.end(), path(), ": expected tensor ", printable(key),
              " as the manifest says, got none of that name");
  return tensors_[found->second];
}

size_t StoredFile::number(const StoredTensor& tensor) const {
  const auto number = static_cast<size_t>(&tensor - tensors_.data());
  TORCH_INTERNAL_ASSERT(number < tensors_.size(), "a tensor of this file");
  return number;
}

uint64_t StoredFile::block_bytes(const StoredTensor& tensor) const {
  return has_blocks_ ? kBlockBytes : tensor.end - tensor.begin;
}

void StoredFile::check(const StoredTensor& tensor, uint64_t block, uint64_t hash) const {
  const uint64_t expected = hashes_[first_block_[number(tensor)] + block];
  TORCH_CHECK(hash == expected, path(), ": tensor ", printable(tensor.name), ": expected checksum ",
              hash_text(expected), " of its bytes from ", block * block_bytes(tensor), " on, got ",
              hash_text(hash), "; the file is damaged, use another checkpoint");
}

void StoredFile::read_blocks(const StoredTensor& t, uint64_t first, uint64_t last,
                             const StoredBytes::Take& take) {
  if (!has_blocks_) {  // one, which may be of any size
    check(t, 0, bytes_->scan(t.begin, t.end, take));
    return;
  }
  static_assert(StoredBytes::kPart % kBlockBytes == 0, "parts are whole blocks");
  const uint64_t begin = first * kBlockBytes;
  const uint64_t end = std::min(last * kBlockBytes, t.end - t.begin);
  const auto verify = [&](uint64_t at, const char* data, size_t bytes) {
    for (size_t done = 0; done < bytes; done += kBlockBytes) {
      const uint64_t block = (begin + at + done) / kBlockBytes;
      check(t, block, content_hash(data + done, std::min(kBlockBytes, bytes - done)));
      verified_[first_block_[number(t)] + block] = true;
    }
    if (take) take(begin + at, data, bytes);
  };
  bytes_->read_parts(t.begin + begin, t.begin + end, verify);
}

void StoredFile::read(const StoredTensor& tensor, uint64_t begin, uint64_t end,
                      const StoredBytes::Take& take) {
  if (begin >= end) return;
  const uint64_t block = block_bytes(tensor);
  read_blocks(tensor, begin / block, (end - 1) / block + 1, take);
}

void StoredFile::verify_rest(const std::function<bool(size_t block)>& skip) {
  if (!has_blocks_) {
    const uint64_t hash = bytes_->scan(0, bytes_->size());
    TORCH_CHECK(hash == hash_, path(), ": expected checksum ", hash_text(hash_), ", got ",
                hash_text(hash), "; the file is damaged, use another checkpoint");
    return;
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const uint64_t blocks = blocks_in(tensors_[i].end - tensors_[i].begin);
    for (uint64_t first = 0, last = 0; first < blocks; first = last + 1) {
      for (last = first; last < blocks && !(skip && skip(first_block_[i] + last));) ++last;
      read_blocks(tensors_[i], first, last, nullptr);
    }
  }
}

}  // namespace zero
