// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: how the update of an optimizer class is launched over segments of all kinds: with fp32
// masters or split ones, and with state in fp32 or stored as stored_state.h says.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/cuda_masters.cuh"
#include "kernels/cuda/cuda_states.cuh"
#include "kernels/cuda/cuda_tiles.cuh"

namespace zero::kernels::cuda {

// Launches the kernels of one class, each over the segments of its kind. Stops at an error, which
// it returns.
//   segment_of     <Kept, State>(given, type): a Segment, without elements if the state or the
//                  master of `given` are of another type
//   update         <W>(W*, launch): launch(kernel, arguments...) for state in fp32 and working
//                  values of W
//   stored_update  <type, split>(launch): the same for other state
//   StoredSegment  a Segment, and where its noise begins: its parameter and its first element there
template <template <class Kept, class State> class Segment,
          template <class Kept> class StoredSegment, class Given, class SegmentOf, class Update,
          class StoredUpdate>
const char* launch_update(const Given* segments, int64_t count, ElementType working_type,
                          void* stream, const SegmentOf& segment_of, const Update& update,
                          const StoredUpdate& stored_update) {
  const auto with_float_state = [&]<class W>(W* working) {
    const auto given = [&](int64_t i) {
      return segment_of.template operator()<KeptOf<W>, float>(segments[i], StateType::kFloat);
    };
    return update(working, [&](auto kernel, const auto&... arguments) {
      return launch_over_tiles<Segment<KeptOf<W>, float>>(count, given, kernel, stream,
                                                          arguments...);
    });
  };
  const char* error = with_device_type(working_type, with_float_state);
  if (error == nullptr) error = with_float_state(static_cast<Split*>(nullptr));
  const auto with_stored_state = [&]<StateType kType, bool kSplit>() {
    using Kept = KeptIf<kSplit>;
    const bool any = std::any_of(segments, segments + count, [](const Given& s) {
      return s.state_type == kType && is_kept_as<Kept>(s);
    });
    if (error != nullptr || !any) return;
    const auto given = [&](int64_t i) {
      const Given& s = segments[i];
      return StoredSegment<Kept>{segment_of.template operator()<Kept, void>(s, kType), s.parameter,
                                 s.element};
    };
    const auto launch = [&](auto kernel, const auto&... arguments) {
      return launch_over_tiles<StoredSegment<Kept>>(count, given, kernel, stream, arguments...);
    };
    error = stored_update.template operator()<kType, kSplit>(launch);
  };
  with_stored_state.template operator()<StateType::kBFloat16, false>();
  with_stored_state.template operator()<StateType::kBFloat16, true>();
  with_stored_state.template operator()<StateType::kInt8, false>();
  with_stored_state.template operator()<StateType::kInt8, true>();
  return error;
}

}  // namespace zero::kernels::cuda
