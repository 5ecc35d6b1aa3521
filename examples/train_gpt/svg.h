// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Pictures of a report as SVG elements, which a page holds without another file: charts of curves
// and stacked bars.
//
//   draw_chart({"gradient norm", {{"norm", kBlue, points}}});
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace zero::examples {

inline constexpr const char* kBlue = "#1f6f8b";
inline constexpr const char* kRed = "#c8553d";
inline constexpr const char* kGreen = "#5b8c5a";
inline constexpr const char* kGrey = "#9aa3aa";

using Points = std::vector<std::pair<double, double>>;

struct Curve {
  std::string name;  // the attribute data-curve of its element
  std::string colour;
  Points points;
  bool dots = false;  // also a dot for each point
};

struct Chart {
  std::string title;
  std::vector<Curve> curves;
  bool from_zero = false;            // the vertical axis; otherwise from the least value
  std::vector<double> crosses = {};  // on the horizontal axis, with this label
  std::string crosses_label = {};
};

// Points that are not finite are left out. A curve of more than 1000 points is drawn as the means
// of equally many neighbours.
std::string draw_chart(const Chart& chart);

struct BarPart {
  std::string name;
  double megabytes = 0;
};
struct Bar {
  std::string name;
  std::vector<BarPart> parts;  // of the same names in all bars
};

// Horizontal bars, whose parts have the attributes data-bar and data-part, with a legend.
std::string draw_bars(const std::vector<Bar>& bars);

// `text` with the characters escaped that mean something in XML. Characters that XML does not
// have, and bytes that are no UTF-8, are shown as a full stop.
std::string escape(const std::string& text);

// `value` with `digits` decimals.
std::string fixed(double value, int digits);

}  // namespace zero::examples
