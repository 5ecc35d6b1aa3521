// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/step_timeline.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "examples/train_gpt/svg.h"

namespace zero::examples {

namespace {

constexpr double kWidth = 1140, kLeft = 80, kRow = 22, kBox = 18;
constexpr const char* kStep = "train_gpt::step";

struct Range {
  std::string name;
  double begin = 0, end = 0;  // microseconds
};
using Threads = std::map<std::string, std::vector<Range>>;

// "pack" of "zero::pack bucket 3"; empty for operations of torch.
std::string kind_of(const std::string& name) {
  for (const std::string prefix : {"zero::", "train_gpt::"}) {
    if (!name.starts_with(prefix)) continue;
    const std::string rest = name.substr(prefix.size());
    return rest.substr(0, rest.find_first_of(" :"));
  }
  return {};
}

const std::map<std::string, std::string>& colours() {
  static const std::map<std::string, std::string> all = {
      {"forward", "#4f86a8"}, {"pack", "#e0a458"},   {"reduce", "#c8553d"}, {"clip", "#8f6bb3"},
      {"norm", "#b28fd0"},    {"update", "#4f9d69"}, {"gather", "#1f6f8b"}};
  return all;
}

std::string colour_of(const std::string& kind) {
  const auto found = colours().find(kind);
  return found != colours().end() ? found->second : kGrey;
}

Threads read_ranges(const std::string& trace) {
  std::ifstream file(trace);
  TORCH_CHECK(file.good(), "cannot read ", trace);
  Threads threads;
  const nlohmann::json content = nlohmann::json::parse(file);
  for (const auto& event : content.at("traceEvents")) {
    if (event.value("ph", "") != "X") continue;
    const std::string category = event.value("cat", "");
    if (category != "cpu_op" && category != "user_annotation") continue;
    const double begin = event.at("ts").get<double>();
    threads[event.at("tid").dump()].push_back(
        {event.at("name").get<std::string>(), begin, begin + event.at("dur").get<double>()});
  }
  for (auto& [thread, ranges] : threads) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
    });
  }
  return threads;
}

// Draws ranges between two times.
class Picture {
 public:
  Picture(double begin, double end) : begin_(begin), end_(end) {}

  // One row with the times of operations, and one for each depth of named ranges.
  void add_thread(const std::string& name, const std::vector<Range>& ranges) {
    body_ += "<text x=\"" + fixed(kLeft - 8, 0) + "\" y=\"" + fixed(y_ + 13, 0) +
             "\" text-anchor=\"end\">" + name + "</text>\n";
    add_operations(ranges);
    std::vector<double> open;  // ends of the ranges that hold the next one
    size_t depth = 0;
    for (const Range& range : ranges) {
      if (range.name == kStep || kind_of(range.name).empty()) continue;
      if (range.begin >= end_ || range.end <= begin_) continue;
      while (!open.empty() && range.begin >= open.back()) open.pop_back();
      open.push_back(range.end);
      depth = std::max(depth, open.size());
      add_box(range, static_cast<double>(open.size()), colour_of(kind_of(range.name)),
              range.name + ": " + fixed((range.end - range.begin) / 1e3, 3) + " ms");
    }
    y_ += kRow * static_cast<double>(depth + 1) + 12;
  }

  std::string finish() {
    double x = kLeft;
    for (const auto& [kind, colour] : colours()) {
      add_legend(x, kind, colour);
      x += 90;
    }
    add_legend(x, "operations and autograd", "#d5dade");
    body_ += "<text x=\"" + fixed(kWidth - 10, 0) + "\" y=\"" + fixed(y_ + 10, 0) +
             "\" text-anchor=\"end\" font-weight=\"bold\">from end to end " +
             fixed((end_ - begin_) / 1e3, 1) + " ms</text>\n";
    return "<svg xmlns=\"http://www.w3.org/2000/svg\" id=\"timeline\" viewBox=\"0 0 " +
           fixed(kWidth, 0) + " " + fixed(y_ + 22, 0) + "\" role=\"img\">\n" + body_ + "</svg>\n";
  }

 private:
  // The outermost operations, joined where there is nearly nothing between them.
  void add_operations(const std::vector<Range>& ranges) {
    std::vector<Range> joined;
    for (const Range& range : ranges) {
      if (!kind_of(range.name).empty() || range.begin >= end_ || range.end <= begin_) continue;
      if (!joined.empty() && range.begin - joined.back().end < (end_ - begin_) / 2000) {
        joined.back().end = std::max(joined.back().end, range.end);
      } else {
        joined.push_back({"operations and autograd", range.begin, range.end});
      }
    }
    for (const Range& range : joined) add_box(range, 0, "#d5dade", range.name);
  }

  void add_box(const Range& range, double row, const std::string& colour,
               const std::string& title) {
    const double scale = (kWidth - kLeft - 10) / (end_ - begin_);
    const double from = std::max(range.begin, begin_), to = std::min(range.end, end_);
    body_ += "<rect data-range=\"" + escape(range.name) + "\" x=\"" +
             fixed(kLeft + (from - begin_) * scale, 2) + "\" y=\"" + fixed(y_ + row * kRow, 0) +
             "\" width=\"" + fixed(std::max((to - from) * scale, 0.8), 2) + "\" height=\"" +
             fixed(kBox, 0) + "\" fill=\"" + colour + "\"><title>" + escape(title) +
             "</title></rect>\n";
  }

  void add_legend(double x, const std::string& name, const std::string& colour) {
    body_ += "<rect x=\"" + fixed(x, 0) + "\" y=\"" + fixed(y_, 0) +
             "\" width=\"12\" height=\"12\" fill=\"" + colour + "\"/>\n<text x=\"" +
             fixed(x + 17, 0) + "\" y=\"" + fixed(y_ + 10, 0) + "\">" + name + "</text>\n";
  }

  const double begin_, end_;
  double y_ = 4;
  std::string body_;
};

}  // namespace

std::string draw_step(const std::string& trace) {
  const Threads threads = read_ranges(trace);
  const Range* step = nullptr;
  std::string training;  // the thread of the steps
  for (const auto& [thread, ranges] : threads) {
    for (const Range& range : ranges) {
      if (range.name != kStep || (step != nullptr && range.begin < step->begin)) continue;
      step = &range;
      training = thread;
    }
  }
  if (step == nullptr) return {};
  Picture picture(step->begin, step->end);
  picture.add_thread("training", threads.at(training));
  for (const auto& [thread, ranges] : threads) {
    // Others than ours are of OpenMP, or of torch.
    const bool ours = std::any_of(ranges.begin(), ranges.end(), [&](const Range& range) {
      return !kind_of(range.name).empty() && range.begin < step->end && range.end > step->begin;
    });
    if (thread != training && ours) picture.add_thread("worker", ranges);
  }
  return picture.finish();
}

}  // namespace zero::examples
