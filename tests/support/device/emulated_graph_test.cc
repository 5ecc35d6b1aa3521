// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Graphs of the emulated device repeat what was captured, and a capture finds what CUDA forbids in
// one.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/device/emulated_device.h"
#include "zero/base/streams.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

const at::Device kFirst(kEmulated, 0);

// What a program has that captures, on a stream of its own.
struct Program {
  Program() : guard(new_stream(kFirst)) { values.zero_(); }
  ~Program() { EmulatedDevice::finish(); }
  // On another stream that the capture has.
  void there(const std::function<void()>& work) {
    make_wait(other, current_torch_stream(kFirst));
    const c10::StreamGuard there(other);
    work();
  }
  void join() { make_wait(current_torch_stream(kFirst), other); }

  const c10::StreamGuard guard;
  const c10::Stream other = new_stream(kFirst);
  const c10::Stream third = new_stream(kFirst);
  at::Tensor values = at::empty({4}, kFirst);
  at::Tensor kept;
  EmulatedGraph graph;
};

TEST(EmulatedGraphTest, AReplayRunsWhatWasCapturedAndTheCaptureNothing) {
  Program run;
  const at::Tensor factor = at::full({4, 4}, 0.5, kFirst);
  run.graph.capture_begin();
  EXPECT_TRUE(is_capturing(kFirst));
  run.there([&] { run.values.add_(1); });
  run.join();
  run.values.copy_(at::mm(factor, run.values.view({4, 1})).view({4}) * 2);
  run.graph.capture_end();
  EXPECT_FALSE(is_capturing(kFirst));
  EXPECT_EQ(run.values.sum().item<float>(), 0);
  float expected = 0;
  for (int i = 0; i < 3; ++i) {
    run.graph.replay();
    expected = (expected + 1) * 4;
    EXPECT_TRUE(at::equal(run.values.cpu(), at::full({4}, expected)));
  }
  run.values.fill_(3);
  run.graph.replay();
  EXPECT_EQ(run.values[0].item<float>(), 16);
  EXPECT_TRUE(EmulatedDevice::take_violations().empty());
}

// As where state is made in the first step that is captured.
TEST(EmulatedGraphTest, MemoryOfACaptureKeepsNothingFromOneReplayToTheNext) {
  Program run;
  run.graph.capture_begin();
  run.kept = at::empty({4}, kFirst);
  run.values.copy_(run.kept);
  run.kept.fill_(1);
  at::Tensor freed = run.kept + 1;
  const at::Tensor read = freed.view({2, 2});
  freed.reset();
  run.graph.capture_end();
  for (int i = 0; i < 2; ++i) {
    run.graph.replay();
    EXPECT_TRUE(run.values.isnan().all().item<bool>());
    EXPECT_TRUE(at::equal(run.kept.cpu(), at::ones({4})));
  }
  EXPECT_TRUE(EmulatedDevice::take_violations().empty());
}

struct Fault {
  std::string name;
  std::string found;  // in the text of the violation
  // What is captured, with the fault or without it.
  std::function<void(Program&, bool fault)> captured;
  std::function<void(Program&, bool fault)> before = [](Program&, bool) {};
  std::function<void(Program&, bool fault)> after = [](Program&, bool) {};
};

std::ostream& operator<<(std::ostream& stream, const Fault& fault) { return stream << fault.name; }

std::vector<Fault> faults() {
  static std::optional<c10::Event> event;
  const auto record = [](Program&, bool) {
    event.emplace(kEmulated);
    event->record(current_torch_stream(kFirst));
  };
  const auto add = [](Program& run, bool) { run.values.add_(1); };
  return {
      {"AWaitForAnEventFromOutside", "from outside of it",
       [](Program& run, bool fault) {
         if (fault) event->block(current_torch_stream(kFirst));
         run.values.add_(1);
       },
       record},
      {"AWaitForACapturedEventFromOutside", "capture that has ended",
       [=](Program& run, bool fault) {
         record(run, fault);
         run.values.add_(1);
       },
       [](Program&, bool) {},
       [](Program& run, bool fault) {
         if (fault) event->block(run.third);
       }},
      {"AQueryOfACapturedEvent", "an event of a capture",
       [=](Program& run, bool fault) { record(run, fault); }, [](Program&, bool) {},
       [](Program&, bool fault) {
         if (fault) event->query();
       }},
      {"WorkOnAStreamWithoutTheCapture", "does not have",
       [](Program& run, bool fault) {
         const c10::StreamGuard guard(fault ? run.third : current_torch_stream(kFirst));
         run.values.add_(1);
       }},
      {"AHostWaitForAStream", "waits for a stream of device 0 during a capture",
       [](Program& run, bool fault) {
         run.values.add_(1);
         if (fault) run.third.synchronize();
       }},
      {"AHostWaitForAnEvent", "waits for device 0 during a capture",
       [](Program&, bool fault) {
         if (fault) event->synchronize();
       },
       record},
      {"AQueryThatIsNotRelaxed", "asks device 0 during a capture",
       [](Program&, bool fault) { fault ? event->query() : is_complete(*event); }, record},
      {"AHostWaitForTheDevice", "waits for device 0 during a capture",
       [](Program&, bool fault) {
         if (fault) c10::impl::getDeviceGuardImpl(kEmulated)->synchronizeDevice(0);
       }},
      {"AValueThatTheHostReads", "reads a value",
       [](Program& run, bool fault) {
         run.values.add_(1);
         if (fault) run.values[0].item<float>();
       }},
      {"AnUnjoinedStream", "was not joined",
       [](Program& run, bool fault) {
         run.there([&] { run.values.add_(1); });
         if (!fault) run.join();
       }},
      {"AnUnjoinedStreamThatOnlyWaits", "was not joined",
       [](Program& run, bool fault) {
         run.values.add_(1);
         run.there([] {});
         if (!fault) run.join();
       }},
      {"AnAllocationFromOutsideThatIsFreedMeanwhile", "written after it was freed",
       [](Program& run, bool fault) {
         run.kept.fill_(2);
         if (fault) run.kept.reset();
       },
       [](Program& run, bool) { run.kept = at::ones({4}, kFirst); },
       [](Program&, bool) {
         EmulatedDevice::finish();
         EmulatedDevice::check_freed_memory();
       }},
      {"HostMemoryThatDies", "was freed",
       [](Program& run, bool fault) {
         run.values.copy_(run.kept, /*non_blocking=*/true);
         if (fault) run.kept.reset();
       },
       [](Program& run, bool) {
         run.kept = at::ones({4}, at::TensorOptions().pinned_memory(true));
       }},
      {"TheDefaultStream", "on the default stream", add},
  };
}

class EmulatedGraphFault : public ::testing::TestWithParam<Fault> {};

INSTANTIATE_TEST_SUITE_P(Faults, EmulatedGraphFault, ::testing::ValuesIn(faults()),
                         [](const auto& info) { return info.param.name; });

TEST_P(EmulatedGraphFault, IsFound) {
  const Fault& fault = GetParam();
  for (const bool planted : {true, false}) {
    {
      Program run;
      fault.before(run, planted);
      std::optional<c10::StreamGuard> on_default;
      if (planted && fault.name == "TheDefaultStream") {
        run.guard.original_stream().synchronize();
        on_default.emplace(run.guard.original_stream());
      }
      run.graph.capture_begin();
      fault.captured(run, planted);
      run.graph.capture_end();
      run.graph.replay();
      fault.after(run, planted);
    }
    EmulatedDevice::finish();
    std::string text;
    for (const std::string& violation : EmulatedDevice::take_violations()) {
      text += "\n  " + violation;
    }
    if (planted) {
      EXPECT_NE(text.find(fault.found), std::string::npos) << text;
    } else {
      EXPECT_EQ(text, "");
    }
  }
}

}  // namespace
}  // namespace zero
