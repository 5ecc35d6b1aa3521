// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/format/stored_file.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

namespace zero {
namespace {

constexpr uint64_t kHashBytes = 8;

uint64_t blocks_in(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

std::string table_of(const std::vector<uint64_t>& hashes) {
  std::string table;
  table.reserve(hashes.size() * kHashBytes);
  for (const uint64_t hash : hashes) {
    for (uint64_t i = 0; i < kHashBytes; ++i) table += static_cast<char>(hash >> (8 * i));
  }
  return table;
}

std::vector<uint64_t> hashes_of(const std::string& table) {
  std::vector<uint64_t> hashes(table.size() / kHashBytes);
  for (size_t i = 0; i < hashes.size() * kHashBytes; ++i) {
    hashes[i / kHashBytes] |= uint64_t{static_cast<uint8_t>(table[i])} << (8 * (i % kHashBytes));
  }
  return hashes;
}

uint64_t index_hash(const std::string& beginning, const std::string& table) {
  ContentHash hash;
  hash.add(beginning.data(), beginning.size());
  hash.add(table.data(), table.size());
  return hash.value();
}

// The entry of a tensor in a file without its place there. A dtype that safetensors has no name for
// becomes bytes.
StoredTensor stored_as(const TensorToSave& t) {
  const bool known = safetensors_knows(t.tensor.scalar_type());
  const auto bytes = static_cast<int64_t>(t.tensor.nbytes());
  return {tensor_key(t.about), known ? t.tensor.scalar_type() : at::kByte,
          known ? t.tensor.sizes().vec() : std::vector<int64_t>{bytes}, 0, 0};
}

}  // namespace

BlockHashes::BlockHashes(const FileToSave& file, const std::string& id) : name_(file.name) {
  uint64_t blocks = 0;
  for (const TensorToSave& t : file.tensors) {
    about_.push_back(t.about);
    tensors_.push_back(stored_as(t));
    blocks += blocks_in(t.tensor.nbytes());
  }
  tensors_.push_back({kTableKey, at::kByte, {static_cast<int64_t>(blocks * kHashBytes)}, 0, 0});
  beginning_ = lay_out_safetensors(tensors_, {{"checkpoint", id}}, name_);
  TORCH_INTERNAL_ASSERT(tensors_.back().name == kTableKey, "the table is the last tensor");
  file_bytes_ = tensors_.back().end;
  tensors_.pop_back();
  std::unordered_map<std::string, size_t> by_key;
  for (size_t p = 0, first = 0; p < tensors_.size(); ++p) {
    by_key[tensors_[p].name] = p;
    first_block_.push_back(first);
    first += blocks_in(tensors_[p].end - tensors_[p].begin);
  }
  for (const ManifestTensor& about : about_) place_of_.push_back(by_key.at(tensor_key(about)));
  hashes_.reserve(blocks);
}

FileBytes BlockHashes::place(size_t i) const {
  const StoredTensor& t = tensors_[place_of_.at(i)];
  return {t.begin, t.end};
}

std::vector<size_t> BlockHashes::order() const {
  std::vector<size_t> result(place_of_.size());
  for (size_t i = 0; i < place_of_.size(); ++i) result[place_of_[i]] = i;
  return result;
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
  hashes_.push_back(content_hash(data, block.end - block.begin));
  while (block.begin >= tensors_[tensor_].end) ++tensor_;
  done_ = block.end - tensors_[tensor_].begin;
}

std::string BlockHashes::table() const {
  TORCH_INTERNAL_ASSERT(next().end == 0, "all blocks have a hash");
  return table_of(hashes_);
}

FileContent BlockHashes::content() const {
  FileContent result;
  result.about.name = name_;
  result.about.bytes = file_bytes_;
  result.about.hash = index_hash(beginning_, table());
  result.about.blocks = static_cast<int64_t>(hashes_.size());
  result.tensors = tensors_by_name(about_);
  std::set<std::tuple<std::string, std::string, uint64_t>> values;
  for (size_t i = 0; i < about_.size(); ++i) {
    if (!is_value(about_[i].kind)) continue;
    values.emplace(about_[i].owner, about_[i].kind, hashes_.at(first_block_[place_of_[i]]));
  }
  for (const auto& [owner, kind, hash] : values) result.values.push_back({owner, kind, hash});
  return result;
}

namespace {

// Hashes a file, and writes it if there is a writer.
FileContent hash_and_write(const FileToSave& file, const std::string& id, FileWriter* writer) {
  BlockHashes hashes(file, id);
  const auto write = [&](const char* data, size_t bytes) {
    if (writer != nullptr) writer->write(data, bytes);
  };
  write(hashes.beginning().data(), hashes.beginning().size());
  for (const size_t i : hashes.order()) {
    const at::Tensor host = file.tensors[i].tensor.detach().cpu().contiguous();
    const auto* const data = static_cast<const char*>(host.const_data_ptr());
    const FileBytes place = hashes.place(i);
    TORCH_INTERNAL_ASSERT(host.nbytes() == place.end - place.begin);
    // Block by block, so that the copy finds in the cache what was hashed.
    for (uint64_t at = place.begin; at < place.end;) {
      const FileBytes block = hashes.next();
      hashes.add(data + (at - place.begin));
      write(data + (at - place.begin), block.end - block.begin);
      at = block.end;
    }
  }
  const std::string table = hashes.table();
  write(table.data(), table.size());
  return hashes.content();
}

}  // namespace

FileContent write_file(const FileToSave& file, const std::string& path, const std::string& id) {
  FileWriter writer(path);
  FileContent content = hash_and_write(file, id, &writer);
  writer.finish();
  return content;
}

FileContent hash_file(const FileToSave& file, const std::string& id) {
  return hash_and_write(file, id, nullptr);
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
  if (has_blocks_) {
    const uint64_t table_bytes = static_cast<uint64_t>(about.blocks) * kHashBytes;
    TORCH_CHECK(table_bytes <= about.bytes - data_begin_, path(), ": expected the hashes of ",
                about.blocks, " blocks, got ", about.bytes - data_begin_, " bytes of tensors");
    const std::string table = bytes_->read_text(about.bytes - table_bytes, table_bytes);
    const uint64_t hash = index_hash(beginning, table);
    TORCH_CHECK(hash == hash_, path(), ": expected checksum ", hash_text(hash_),
                " of its header and its hashes, got ", hash_text(hash),
                "; the file is damaged, use another checkpoint");
    const StoredTensor* const stored = header.find(kTableKey);
    TORCH_CHECK(stored != nullptr && stored->begin == about.bytes - table_bytes &&
                    stored->end == about.bytes,
                path(), ": expected the hashes of ", about.blocks,
                " blocks as the last tensor, got another one");
    hashes_ = hashes_of(table);
    verified_.resize(hashes_.size());
  }
  size_t block = 0;
  for (StoredTensor& t : header.tensors) {
    const uint64_t bytes = t.end - t.begin;
    if (has_blocks_ && t.name == kTableKey) continue;
    const auto listed = about.tensor_hashes.find(t.name);
    if (!has_blocks_ && listed == about.tensor_hashes.end()) continue;
    if (!has_blocks_) hashes_.push_back(listed->second);
    entries_.emplace(t.name, Entry{t, block, has_blocks_ ? kBlockBytes : bytes});
    block += has_blocks_ ? blocks_in(bytes) : 1;
  }
  TORCH_CHECK(block == hashes_.size(), path(), ": expected a hash for each of ", block,
              " blocks, got ", hashes_.size());
}

std::vector<FileBytes> StoredFile::index() const {
  if (!has_blocks_) return {{0, data_begin_}};
  return {{0, data_begin_}, {bytes_->size() - hashes_.size() * kHashBytes, bytes_->size()}};
}

const StoredFile::Entry& StoredFile::entry(const std::string& key) const {
  const auto found = entries_.find(key);
  TORCH_CHECK(found != entries_.end(), path(), ": expected tensor ", printable(key),
              " as the manifest says, got none of that name");
  return found->second;
}

void StoredFile::check(const Entry& entry, uint64_t block, uint64_t hash) const {
  const uint64_t expected = hashes_[entry.first_block + block];
  TORCH_CHECK(hash == expected, path(), ": tensor ", printable(entry.tensor.name),
              ": expected checksum ", hash_text(expected), " of its bytes from ",
              block * entry.block_bytes, " on, got ", hash_text(hash),
              "; the file is damaged, use another checkpoint");
}

void StoredFile::read_blocks(const Entry& entry, uint64_t first, uint64_t last,
                             const StoredBytes::Take& take) {
  const StoredTensor& t = entry.tensor;
  if (!has_blocks_) {  // one, which may be of any size
    check(entry, 0, bytes_->scan(t.begin, t.end, take));
    return;
  }
  constexpr uint64_t kAtOnce = StoredBytes::kPart / kBlockBytes;
  if (!buffer_) buffer_ = std::make_unique<char[]>(StoredBytes::kPart);
  for (uint64_t b = first; b < last; b += kAtOnce) {
    const uint64_t begin = b * kBlockBytes;
    const uint64_t end = std::min(std::min(last, b + kAtOnce) * kBlockBytes, t.end - t.begin);
    bytes_->read(t.begin + begin, buffer_.get(), end - begin);
    for (uint64_t at = begin; at < end; at += kBlockBytes) {
      const uint64_t block = at / kBlockBytes;
      check(entry, block,
            content_hash(buffer_.get() + (at - begin), std::min(kBlockBytes, end - at)));
      verified_[entry.first_block + block] = true;
    }
    if (take) take(begin, buffer_.get(), end - begin);
  }
}

void StoredFile::read(const StoredTensor& tensor, uint64_t begin, uint64_t end,
                      const StoredBytes::Take& take) {
  const Entry& of = entry(tensor.name);
  if (begin >= end) return;
  read_blocks(of, begin / of.block_bytes, (end - 1) / of.block_bytes + 1, take);
}

void StoredFile::verify_rest(const std::function<bool(size_t block)>& skip) {
  if (!has_blocks_) {
    const uint64_t hash = bytes_->scan(0, bytes_->size());
    TORCH_CHECK(hash == hash_, path(), ": expected checksum ", hash_text(hash_), ", got ",
                hash_text(hash), "; the file is damaged, use another checkpoint");
    return;
  }
  std::vector<const Entry*> in_order;  // of the file
  for (const auto& [key, entry] : entries_) in_order.push_back(&entry);
  std::sort(in_order.begin(), in_order.end(),
            [](const Entry* a, const Entry* b) { return a->first_block < b->first_block; });
  for (const Entry* of : in_order) {
    const uint64_t blocks = blocks_in(of->tensor.end - of->tensor.begin);
    for (uint64_t first = 0, last = 0; first < blocks; first = last + 1) {
      for (last = first; last < blocks && !(skip && skip(of->first_block + last));) ++last;
      read_blocks(*of, first, last, nullptr);
    }
  }
}

void StoredFile::release() {
  buffer_.reset();
  bytes_->release();
}

}  // namespace zero
