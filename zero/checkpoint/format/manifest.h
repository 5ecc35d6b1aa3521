// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The last file of a checkpoint to be written: what the run was, which files belong to it, and
// which piece of which tensor is in which of them. The hashes of their bytes are in the files
// (stored_file.h); the manifest has one hash of those hashes for each file, so that it grows
// with the pieces of parameters and not with their bytes. A folder without a valid one is no
// checkpoint.
//
// It is JSON. Its last line holds the XXH3 of all bytes before, so that a
// changed or missing byte anywhere in it is noticed.
//
// Versions. The field "version" is that of the format. A library of version N writes at most N and
// reads every version from 1 to N; it refuses a later one and names the library to use.
// manifest_fields.cc lists all fields, each with the version that introduced it:
//   required   every manifest of that version or a later one has it, or is refused by the field's
//              name. A manifest of an earlier version gets the member's initial value.
//   optional   any manifest may lack it, and gets the member's initial value.
//   unknown    a reader ignores a field that its list lacks, at any level, whatever it holds
//              within the limits of json.h. So a new optional field needs no new version:
//              earlier libraries load what has it, and this one loads what they wrote.
// A new version is for a change that an earlier library must not ignore: a new required field, or
// another meaning of an old one. What is saved today can be loaded for ever.
//
// The limits below hold for writing too, so that what is saved can be loaded.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/part_ranges.h"
#include "zero/checkpoint.h"

namespace zero {

inline constexpr char kManifestName[] = "manifest.json";
// See "Versions" above: the last, which is written, and the oldest that is read. Version 2 has
// parts of tensors, 3 parts of fused ones, 4 averages of parameters; until then a file listed its
// tensors with a hash for each. Since version 5 tensors are listed by name, and files have their
// hashes.
inline constexpr int64_t kCheckpointVersion = 5;
inline constexpr int64_t kVersionOfBlocks = 5;
inline constexpr int64_t kOldestCheckpointVersion = 1;

// No parameter or buffer of a module has a name that begins with a dot.
inline constexpr char kStatePrefix = '.';
// The kind of an included object's state that is equal on all ranks.
inline constexpr char kSharedState[] = "state";

inline constexpr uint64_t kManifestLimit = uint64_t{1} << 30;  // bytes
inline constexpr int64_t kEntriesLimit = 100'000;  // parameter groups; entries of metadata
inline constexpr size_t kKindsLimit = 1000;        // of tensors of one name
// The limit of steps and of counters of the loss scale, so that no sum of them overflows.
inline constexpr int64_t kCountLimit = int64_t{1} << 53;

// A tensor of a file: elements [begin, begin + numel) of `owner` in its memory
// order. `kind` is "master", kEmaKind, the name of a state tensor ("exp_avg"), "frozen" or
// "buffer"; or, for one value that stands for all elements, "step", and for classes of
// optimizers that are not torch's, "value:<name>" or "scalar:<name>". The state of an object that
// the save included is a tensor of bytes: `owner` is kStatePrefix and its name, and `kind` "state",
// or "state of rank 3" where each rank has its own.
struct ManifestTensor {
  std::string owner;
  std::string kind;
  int64_t begin = 0;
  int64_t numel = 0;
};

// Its name in the file: "<owner>[<begin>:<end>].<kind>" of a piece, and "<owner>" of what is whole:
// frozen parameters, buffers and states of objects.
std::string tensor_key(const ManifestTensor& tensor);

bool is_value(const std::string& kind);
// Whether it is "frozen" or "buffer": what is stored as one tensor, of its own dtype.
bool is_held_whole(const std::string& kind);

// Before the kind of a tensor of a whole parameter that has a size of its own, and is never cut:
// its range is [0, its elements).
inline constexpr char kUncutPrefix[] = "uncut:";
bool is_uncut(const std::string& kind);

// The kind of a parameter's average (ZeroOptions::ema), which is no state of the inner optimizer.
// Since version 4.
inline constexpr char kEmaKind[] = "zero.ema";

struct ManifestFile {
  std::string name;
  uint64_t bytes = 0;
  uint64_t hash = 0;    // of its index, see stored_file.h; before version 5 of all its bytes
  int64_t blocks = -1;  // that it has hashes of; before version 5 it has none
  int64_t disk = 0;     // optional: the one it was written to, see CheckpointFacts::disk
  // Optional: of the checkpoint that it was written for, if an earlier one has the same file.
  std::string id = {};
  // Before version 5 only: the hash of each tensor, by key.
  std::map<std::string, uint64_t> tensor_hashes = {};
};

// Elements [begin, begin + numel) of a tensor, which are in one file of the manifest.
struct ManifestPiece {
  int64_t file = 0;
  int64_t begin = 0;
  int64_t numel = 0;
};

// What is stored under one name: of each piece a tensor of each kind. Pieces of which other kinds
// are stored are an entry of their own.
struct ManifestTensors {
  std::string owner;
  std::vector<std::string> kinds;
  std::vector<ManifestPiece> pieces;
};

// The rank that wrote a file, by its name.
int64_t writer_of(const ManifestFile& file);

struct ManifestParameter {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // of the memory order; empty for frozen ones and buffers
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t group = 0;
  // For a tensor-parallel part, since version 2: the shape of the whole, in which this part begins
  // at index `from` of dimension `dimension`. Parts of one tensor have one name. Empty: no part.
  std::vector<int64_t> whole = {};
  int64_t dimension = 0;
  int64_t from = 0;
  // Of a part of a fused tensor, since version 3: the sizes along `dimension` of what the whole has
  // one behind the other, such as q, k and v. n equal parts have an n-th of each. Empty: not fused.
  std::vector<int64_t> sections = {};
  // Optional, for people, since a checkpoint has all of them in fp32: how a managed parameter's
  // moments and master were kept, "bfloat16" or "int8", and "split". Empty: in fp32.
  std::string moments = {};
  std::string master = {};
};

int64_t numel(const ManifestParameter& parameter);
inline bool is_part(const ManifestParameter& parameter) { return !parameter.whole.empty(); }
// Throws c10::Error where it says it is a part that no whole can have.
void check_part(const ManifestParameter& parameter);
const std::vector<int64_t>& whole_shape(const ManifestParameter& parameter);
// The `owner` of its tensors: the name, and of a part "<name>{<dimension>:<from>:<end>}".
std::string stored_name(const ManifestParameter& parameter);
// The dimensions, the slowest in memory first; those of frozen ones and buffers are row-major.
// Equal for two tensors of one shape whose elements have one order, since their memory has no
// holes.
std::vector<size_t> memory_order(const ManifestParameter& parameter);
// In memory order.
TensorPart part_of(const ManifestParameter& parameter);

// The options of parameter groups, by name.
using OptionGroups = std::vector<std::vector<std::pair<std::string, double>>>;

// Its `version` is that of the file that was read, and no field of the list; its `id` is in its
// files too, see ManifestFile::id. `run` and `saved` are optional, see RunIdentity; so is `disk`,
// since copies of one manifest on several disks are equal otherwise.
struct Manifest : CheckpointFacts {
  Manifest() { version = kCheckpointVersion; }

  uint64_t plan_fingerprint = 0;
  // Optional: how many sets of ranks held parameters of their own. 1: all ranks held the same.
  int64_t holders = 1;

  bool dynamic_scale = false;
  double scale = 1.0;
  int64_t good_steps = 0;
  int64_t hysteresis_left = 1;
  int64_t skipped_at_min = 0;

  std::vector<ManifestParameter> parameters;
  std::vector<ManifestParameter> frozen;
  std::vector<ManifestParameter> buffers;
  std::vector<ManifestFile> files;
  std::vector<ManifestTensors> tensors;
};

// Returns whether any parameter has an average.
bool has_ema(const Manifest& manifest);

// The bytes of a value that stands for a whole parameter.
struct StoredValue {
  std::string owner;
  std::string kind;
  uint64_t hash = 0;
  auto operator<=>(const StoredValue&) const = default;
};

// A file that was written, for the manifest.
struct FileContent {
  ManifestFile about;
  std::vector<ManifestTensors> tensors;  // the `file` of each piece is 0
  std::vector<StoredValue> values;       // each once
};

// Returns the tensors of one file by name.
std::vector<ManifestTensors> tensors_by_name(const std::vector<ManifestTensor>& tensors);
// Adds files and their tensors. Throws c10::Error unless the pieces of each parameter have the same
// values.
void add_files(const std::vector<FileContent>& files, Manifest& manifest);

// Returns the text of the file, checksum included. Throws c10::Error for text that is
// not UTF-8, and beyond the limits.
std::string manifest_text(const Manifest& manifest);
// What was read is no manifest, or a damaged one.
class DamagedManifest : public c10::Error {
  using c10::Error::Error;
};
// `path` is for errors. Throws DamagedManifest for anything that manifest_text()
// cannot have written: numbers, shapes, strides and file names of the result are
// safe to calculate with, although a file need not hold what they say. Throws another c10::Error
// for a manifest of a later version.
Manifest parse_manifest(const std::string& text, const std::string& path);
// From a checkpoint's folder. Throws when it is none, and what is no DamagedManifest where the file
// cannot be read. Nothing of a file's size is allocated before its checksum was found right.
Manifest read_manifest(const std::string& folder);
// The same without `tensors`, which are most of the text and are not looked at: for what compares
// checkpoints or asks for their files.
Manifest read_manifest_without_tensors(const std::string& folder);
// The text of the whole, as it was written.
std::string read_manifest_text(const std::string& folder);
// Returns whether the file is in `folder`, with its size. Throws where that cannot be seen.
bool has_size(const std::string& folder, const ManifestFile& file);
// Returns whether `folder` has its disk's files of the sizes that its manifest says. Throws like
// has_size().
bool has_files(const std::string& folder, const Manifest& manifest);
// Returns whether `folder` has a manifest, and its disk's files of the sizes it says. Never throws.
bool is_complete_checkpoint(const std::string& folder);

// A rank's files as text, for rank 0 to put into the manifest.
std::string files_text(const std::vector<FileContent>& files);
std::vector<FileContent> parse_files(const std::string& text, const std::string& origin);

// What ranks tell each other about the tensors that they hold, before a checkpoint is written:
// never in a file. The ranks of a set share the work; each tensor of each set is described once.
struct HeldTensor {
  ManifestParameter about;  // `group` is the number in the set
  int64_t index = 0;        // in the set's order
  int64_t first_rank = 0;   // of the set
  int64_t norm_copies = 1;  // sets that hold a parameter; 0: another set counts it in the norm
  uint64_t hash = 0;        // of a frozen parameter's bytes
  // For a tensor-parallel part: its number, of how many, and the dimension along which they are
  // cut.
  int64_t part = 0;
  int64_t parts = 1;
  int64_t dimension = 0;
  std::vector<int64_t> sections = {};  // as in ManifestParameter
};

struct HeldTensors {
  std::vector<HeldTensor> parameters;
  std::vector<HeldTensor> frozen;
  std::vector<HeldTensor> buffers;
  OptionGroups groups;  // of the first rank of a set; empty on other ranks
};

// For sending. The first throws c10::Error for names that are not UTF-8.
std::string held_text(const HeldTensors& held);
HeldTensors parse_held(const std::string& text, const std::string& origin);

}  // namespace zero
