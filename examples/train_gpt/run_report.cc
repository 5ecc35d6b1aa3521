// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/run_report.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>

#include "examples/train_gpt/step_timeline.h"
#include "examples/train_gpt/svg.h"

namespace zero::examples {

namespace {

constexpr const char* kStyle = R"(
body { font: 15px/1.5 system-ui, sans-serif; color: #24292e; background: #f4f6f7; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 10px; }
section { background: white; border-radius: 8px; padding: 18px 20px; margin-top: 18px;
          box-shadow: 0 1px 3px rgba(0, 0, 0, .12); }
.tiles, .charts { display: grid; gap: 14px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); margin-top: 18px; }
.tiles div { background: white; border-radius: 8px; padding: 12px 16px;
             box-shadow: 0 1px 3px rgba(0, 0, 0, .12); }
.tiles b { display: block; font-size: 23px; }
.tiles span, .note { color: #5b6770; font-size: 13px; }
.charts { grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); }
svg { width: 100%; height: auto; font: 12.5px system-ui, sans-serif; }
table { border-collapse: collapse; font-size: 14px; }
td, th { padding: 3px 12px; text-align: right; border: 1px solid white; }
td:first-child, th:first-child { text-align: left; }
#facts td { text-align: left; } #options { columns: 4; }
pre { background: #f4f6f7; border-radius: 6px; padding: 12px; overflow-x: auto; margin: 4px 0 14px;
      font-size: 13px; }
)";

double megabytes(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

using Value = std::function<double(const StepMetrics&)>;

Curve curve_of(const RunReport& report, const std::string& name, const char* colour,
               const Value& value) {
  Curve curve{name, colour, {}};
  for (const StepMetrics& step : report.steps) {
    curve.points.emplace_back(static_cast<double>(step.step), value(step));
  }
  return curve;
}

double tokens_per_second(const StepMetrics& step) {
  return static_cast<double>(step.tokens) / std::max(step.seconds, 1e-9);
}

std::string section(const std::string& title, const std::string& body) {
  return "<section>\n<h2>" + escape(title) + "</h2>\n" + body + "</section>\n";
}

std::string charts(const RunReport& report) {
  Curve validation{"validation", kRed, {}, /*dots=*/true};
  Curve averaged{"averaged", kGreen, {}, /*dots=*/true};
  std::vector<double> skipped;
  for (const StepMetrics& step : report.steps) {
    const auto at = static_cast<double>(step.step);
    if (step.validation_loss) validation.points.emplace_back(at, *step.validation_loss);
    if (step.ema_loss) averaged.points.emplace_back(at, *step.ema_loss);
    if (step.skipped) skipped.push_back(at);
  }
  const auto curve = [&](const std::string& name, const Value& value) {
    return curve_of(report, name, kBlue, value);
  };
  std::string body = "<div class=\"charts\">\n";
  std::vector<Curve> losses{curve("training", [](const StepMetrics& s) { return s.loss; }),
                            validation};
  if (!averaged.points.empty()) losses.push_back(averaged);
  body += draw_chart({"loss, nats per byte", std::move(losses)});
  body += draw_chart({"gradient norm before clipping",
                      {curve("norm", [](const StepMetrics& s) { return s.gradient_norm; })},
                      /*from_zero=*/true,
                      skipped,
                      "x: skipped"});
  body += draw_chart({"learning rate",
                      {curve("rate", [](const StepMetrics& s) { return s.learning_rate; })},
                      /*from_zero=*/true});
  body += draw_chart({"tokens per second",
                      {curve("tokens", tokens_per_second)},
                      /*from_zero=*/true});
  return section("Curves", body + "</div>\n");
}

Bar bar_of(const std::string& name, const MemoryReport& memory, bool averages) {
  Bar bar{name,
          {{"parameters", megabytes(memory.working_parameters)},
           {"master parameters", megabytes(memory.master_parameters)},
           {"optimizer state", megabytes(memory.optimizer_state)},
           {"gradients", megabytes(memory.gradient_shards + memory.full_gradients)},
           {"buckets", megabytes(memory.buckets)}}};
  if (averages) bar.parts.push_back({"average", megabytes(memory.ema)});
  return bar;
}

std::string memory_section(const RunReport& report) {
  const bool averages = report.memory.ema > 0;
  return section("Memory at the end of the last backward pass",
                 draw_bars({bar_of("rank 0", report.memory, averages),
                            bar_of("one process alone", report.unsharded, averages)}));
}

// "blocks.0" of "blocks.0.attention_out.weight": a model's part that a person knows.
std::string part_of(const std::string& name) {
  const size_t first = name.find('.');
  if (first == std::string::npos) return name;
  const bool numbered = name.find_first_of("0123456789", first) == first + 1;
  return name.substr(0, numbered ? name.find('.', first + 1) : first);
}

// Elements of each part of the model on each rank, in the order of the model.
std::vector<std::pair<std::string, std::vector<int64_t>>> owned_elements(const RunReport& report) {
  const int64_t world_size = report.plan.arenas.at(0).world_size;
  std::vector<std::pair<std::string, std::vector<int64_t>>> parts;
  std::vector<size_t> part_of_parameter;
  for (const NamedSize& parameter : report.parameters) {
    const std::string part = part_of(parameter.name);
    if (parts.empty() || parts.back().first != part) {
      parts.emplace_back(part, std::vector<int64_t>(static_cast<size_t>(world_size)));
    }
    part_of_parameter.push_back(parts.size() - 1);
  }
  for (int64_t bucket = 0; bucket < static_cast<int64_t>(report.plan.buckets.size()); ++bucket) {
    for (int64_t rank = 0; rank < world_size; ++rank) {
      for (const Segment& segment : report.plan.segments(bucket, rank)) {
        parts[part_of_parameter.at(static_cast<size_t>(segment.parameter))]
            .second[static_cast<size_t>(rank)] += segment.numel;
      }
    }
  }
  return parts;
}

std::string owners_section(const RunReport& report) {
  constexpr size_t kMostRanks = 16;
  const auto parts = owned_elements(report);
  const auto world_size = static_cast<size_t>(report.plan.arenas.at(0).world_size);
  const size_t shown = std::min(world_size, kMostRanks);
  std::ostringstream table;
  table << "<table id=\"owners\">\n<tr><th>elements</th>";
  for (size_t rank = 0; rank < shown; ++rank) table << "<th>rank " << rank << "</th>";
  table << "</tr>\n";
  for (const auto& [part, owned] : parts) {
    int64_t all = 0;
    for (const int64_t numel : owned) all += numel;
    table << "<tr><td>" << escape(part) << "</td>";
    for (size_t rank = 0; rank < shown; ++rank) {
      const double share =
          all > 0 ? static_cast<double>(owned[rank]) / static_cast<double>(all) : 0;
      table << "<td style=\"background: rgba(31, 111, 139, " << fixed(0.75 * share, 3) << ")\">"
            << owned[rank] << "</td>";
    }
    table << "</tr>\n";
  }
  table << "<tr><th>sharded MB</th>";
  for (size_t rank = 0; rank < shown; ++rank) {
    const MemoryReport memory =
        expected_memory(report.plan, static_cast<int64_t>(rank), report.memory_options);
    table << "<th>"
          << fixed(megabytes(memory.master_parameters + memory.optimizer_state +
                             memory.gradient_shards),
                   2)
          << "</th>";
  }
  table
      << "</tr>\n</table>\n<p class=\"note\">Each rank updates the elements that it owns. The last "
         "line is their masters, optimizer state and gradients by the plan, padding included"
      << (shown < world_size ? "; ranks above " + std::to_string(shown - 1) + " are left out" : "")
      << ".</p>\n";
  return section("Who owns what", table.str());
}

std::string timeline_section(const RunReport& report) {
  const std::string note =
      "<p class=\"note\">The last step that was traced on rank 0. Under the first row of a thread "
      "are its named ranges, by depth. The pointer on a box shows its name and time.</p>\n";
  if (report.trace.empty()) {
    return section("One step",
                   "<p class=\"note\">No trace was recorded; --trace records steps from "
                   "the third on.</p>\n");
  }
  const std::string picture = draw_step(report.trace);
  return section("One step", picture.empty() ? "<p class=\"note\">The trace has no step.</p>\n"
                                             : picture + note);
}

std::string samples_section(const RunReport& report) {
  std::string body;
  for (const auto& [steps, text] : report.samples) {
    body += "<p class=\"note\">after " + std::to_string(steps) + " steps</p>\n<pre>" +
            escape(text) + "</pre>\n";
  }
  return section("Text that the model writes", body);
}

std::string facts_section(const RunReport& report) {
  std::string body = "<table id=\"facts\">\n";
  for (const auto& [name, value] : report.facts) {
    body += "<tr><td>" + escape(name) + "</td><td>" + escape(value) + "</td></tr>\n";
  }
  return section("Options and versions",
                 body + "</table>\n<pre id=\"options\">" + escape(report.options) + "</pre>\n");
}

std::string tile(const std::string& value, const std::string& name) {
  return "<div><b>" + escape(value) + "</b><span>" + escape(name) + "</span></div>\n";
}

std::string tiles(const RunReport& report) {
  std::vector<double> speeds;
  std::string validation = "none";
  for (const StepMetrics& step : report.steps) {
    speeds.push_back(tokens_per_second(step));
    if (step.validation_loss) validation = fixed(*step.validation_loss, 4);
  }
  const auto middle = speeds.begin() + static_cast<std::ptrdiff_t>(speeds.size() / 2);
  std::nth_element(speeds.begin(), middle, speeds.end());
  const StepMetrics& last = report.steps.back();
  return "<div class=\"tiles\">\n" + tile(std::to_string(last.step), "steps") +
         tile(validation, "last validation loss, nats per byte") +
         tile(fixed(last.loss, 4), "last training loss") +
         tile(fixed(*middle, 0), "tokens per second, median") +
         tile(fixed(megabytes(report.memory.total()), 2) + " MB",
              "held by rank 0; " + fixed(megabytes(report.unsharded.total()), 2) +
                  " MB by one process alone") +
         "</div>\n";
}

}  // namespace

void write_report(const RunReport& report, const std::string& path) {
  std::ofstream file(path);
  file << "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n<head>\n"
       << "<meta charset=\"utf-8\"/>\n"
       << "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
       << "<title>" << escape(report.heading) << "</title>\n<style>" << kStyle << "</style>\n"
       << "</head>\n<body>\n<main>\n<h1>train_gpt</h1>\n<div>" << escape(report.heading)
       << "</div>\n";
  if (report.steps.empty()) {
    file << section("Curves", "<p class=\"note\">No step was made.</p>\n");
  } else {
    file << tiles(report) << charts(report) << memory_section(report);
  }
  file << owners_section(report) << timeline_section(report) << samples_section(report)
       << facts_section(report) << "</main>\n</body>\n</html>\n";
  file.flush();
  TORCH_CHECK(file.good(), "--report: cannot write ", path);
}

}  // namespace zero::examples
