// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <sstream>

namespace zero::examples {

namespace {

constexpr double kWidth = 560, kHeight = 250;
constexpr double kLeft = 62, kRight = 16, kTop = 30, kBottom = 30;
constexpr size_t kMostPoints = 1000;
constexpr std::array<const char*, 7> kPartColours = {"#1f6f8b", "#4f9d69", "#e0a458", "#c8553d",
                                                     "#8f6bb3", "#4f86a8", "#7d8790"};

Points thinned(const Points& points) {
  Points finite;
  for (const auto& point : points) {
    if (std::isfinite(point.second)) finite.push_back(point);
  }
  const size_t share = (finite.size() + kMostPoints - 1) / kMostPoints;
  if (share <= 1) return finite;
  Points means;
  for (size_t begin = 0; begin < finite.size(); begin += share) {
    const size_t end = std::min(begin + share, finite.size());
    double x = 0, y = 0;
    for (size_t i = begin; i < end; ++i) {
      x += finite[i].first;
      y += finite[i].second;
    }
    means.emplace_back(x / static_cast<double>(end - begin), y / static_cast<double>(end - begin));
  }
  return means;
}

struct Axis {
  double low = 0, high = 1, step = 1;
};

// An axis of about five steps of 1, 2 or 5 times a power of ten, which holds low to high.
Axis round_axis(double low, double high) {
  if (!(low <= high)) return {};  // no points
  if (high - low < 1e-12 * std::max(std::abs(low), 1e-12)) {
    low -= 0.5 * std::max(std::abs(low), 1e-6);
    high += 0.5 * std::max(std::abs(high), 1e-6);
  }
  const double raw = (high - low) / 5;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  const double ratio = raw / power;
  const double step = power * (ratio <= 1.0 ? 1 : ratio <= 2.0 ? 2 : ratio <= 5.0 ? 5 : 10);
  return {std::floor(low / step) * step, std::ceil(high / step) * step, step};
}

std::string label_of(double value) {
  if (std::abs(value) < 1e-12) return "0";
  const bool millions = std::abs(value) >= 1e6, thousands = std::abs(value) >= 1e4;
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g%s",
                value / (millions    ? 1e6
                         : thousands ? 1e3
                                     : 1.0),
                millions    ? "M"
                : thousands ? "k"
                            : "");
  return text;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text,
                    const char* more = "") {
  return "<text x=\"" + fixed(x, 1) + "\" y=\"" + fixed(y, 1) + "\" text-anchor=\"" + anchor +
         "\" " + more + ">" + escape(text) + "</text>\n";
}

// The position of a value between two ends of a picture.
struct Scale {
  Axis axis;
  double from, to;
  double operator()(double value) const {
    return from + (value - axis.low) / (axis.high - axis.low) * (to - from);
  }
};

std::string draw_grid(const Scale& x, const Scale& y) {
  std::ostringstream out;
  for (double value = y.axis.low; value < y.axis.high + y.axis.step / 2; value += y.axis.step) {
    out << "<line x1=\"" << kLeft << "\" x2=\"" << kWidth - kRight << "\" y1=\""
        << fixed(y(value), 1) << "\" y2=\"" << fixed(y(value), 1) << "\" stroke=\"#e3e6e8\"/>\n"
        << text_at(kLeft - 6, y(value) + 4, "end", label_of(value));
  }
  const double step = x.axis.step;
  for (double value = std::ceil(x.axis.low / step) * step; value <= x.axis.high + step / 1000;
       value += step) {
    out << text_at(x(value), kHeight - 10, "middle", label_of(value));
  }
  return out.str();
}

std::string draw_curve(const Curve& curve, const Points& points, const Scale& x, const Scale& y) {
  std::ostringstream out;
  out << "<polyline data-curve=\"" << escape(curve.name) << "\" fill=\"none\" stroke=\""
      << curve.colour << "\" stroke-width=\"1.5\" stroke-linejoin=\"round\" points=\"";
  for (const auto& [at, value] : points) out << fixed(x(at), 2) << "," << fixed(y(value), 2) << " ";
  out << "\"/>\n";
  if (curve.dots) {
    for (const auto& [at, value] : points) {
      out << "<circle cx=\"" << fixed(x(at), 2) << "\" cy=\"" << fixed(y(value), 2)
          << "\" r=\"2.5\" fill=\"" << curve.colour << "\"/>\n";
    }
  }
  return out.str();
}

// The bytes of the character of XML at `i`; 0 where there is none.
size_t character_length(const std::string& text, size_t i) {
  const auto first = static_cast<unsigned char>(text[i]);
  if (first < 0x80) return first >= 0x20 || first == '\n' || first == '\t' ? 1 : 0;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || i + length > text.size()) return 0;
  uint32_t code = first & (0x7fu >> length);
  for (size_t k = 1; k < length; ++k) {
    const auto next = static_cast<unsigned char>(text[i + k]);
    if ((next & 0xc0) != 0x80) return 0;
    code = code << 6 | (next & 0x3fu);
  }
  constexpr std::array<uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  return code < kLeast[length] || code > 0x10ffff || surrogate || (code | 1) == 0xffff ? 0 : length;
}

std::string svg(double width, double height, const std::string& body) {
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + fixed(width, 0) + " " +
         fixed(height, 0) + "\" role=\"img\">\n" + body + "</svg>\n";
}

}  // namespace

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string draw_chart(const Chart& chart) {
  std::vector<Points> points;
  double first = std::numeric_limits<double>::infinity(), last = -first;
  double low = chart.from_zero ? 0.0 : first, high = -first;
  for (const Curve& curve : chart.curves) {
    points.push_back(thinned(curve.points));
    for (const auto& [at, value] : points.back()) {
      first = std::min(first, at);
      last = std::max(last, at);
      low = std::min(low, value);
      high = std::max(high, value);
    }
  }
  // Steps are whole, and the curves go from end to end.
  Axis steps = round_axis(first, last);
  steps.step = std::max(steps.step, 1.0);
  if (first < last) {
    steps.low = first;
    steps.high = last;
  }
  const Scale x{steps, kLeft, kWidth - kRight};
  const Scale y{round_axis(low, high), kHeight - kBottom, kTop};
  std::string body = text_at(kLeft, 18, "start", chart.title, "font-weight=\"bold\"");
  body += draw_grid(x, y);
  double legend = kWidth - kRight;
  for (size_t i = chart.curves.size(); i-- > 0;) {
    body += draw_curve(chart.curves[i], points[i], x, y);
    if (chart.curves.size() == 1) continue;
    const std::string style = "fill=\"" + chart.curves[i].colour + "\"";
    body += text_at(legend, 18, "end", chart.curves[i].name, style.c_str());
    legend -= 8.0 * static_cast<double>(chart.curves[i].name.size()) + 12;
  }
  for (const double at : chart.crosses) {
    body += text_at(x(at), kHeight - kBottom + 4, "middle", "x", "fill=\"#c8553d\"");
  }
  if (!chart.crosses.empty()) {
    body += text_at(kWidth - kRight, 18, "end", chart.crosses_label, "fill=\"#c8553d\"");
  }
  return svg(kWidth, kHeight, body);
}

std::string draw_bars(const std::vector<Bar>& bars) {
  constexpr double kWide = 1140, kStart = 150, kRow = 38, kNumber = 100;
  double most = 0;
  std::vector<double> totals;
  for (const Bar& bar : bars) {
    double total = 0;
    for (const BarPart& part : bar.parts) total += part.megabytes;
    totals.push_back(total);
    most = std::max(most, total);
  }
  const double scale = most > 0 ? (kWide - kStart - kNumber) / most : 0;
  std::string body;
  double y = 4;
  for (size_t b = 0; b < bars.size(); ++b, y += kRow) {
    body += text_at(kStart - 10, y + 18, "end", bars[b].name);
    double x = kStart;
    for (size_t p = 0; p < bars[b].parts.size(); ++p) {
      const BarPart& part = bars[b].parts[p];
      const double width = part.megabytes * scale;
      const std::string title = part.name + ": " + fixed(part.megabytes, 2) + " MB";
      body += "<rect data-bar=\"" + escape(bars[b].name) + "\" data-part=\"" + escape(part.name) +
              "\" x=\"" + fixed(x, 2) + "\" y=\"" + fixed(y, 0) + "\" width=\"" + fixed(width, 2) +
              "\" height=\"26\" fill=\"" + kPartColours[p % kPartColours.size()] + "\"><title>" +
              escape(title) + "</title></rect>\n";
      x += width;
    }
    body += text_at(x + 8, y + 18, "start", fixed(totals[b], 2) + " MB", "font-weight=\"bold\"");
  }
  double x = kStart;
  for (size_t p = 0; !bars.empty() && p < bars[0].parts.size(); ++p) {
    const std::string& name = bars[0].parts[p].name;
    body += "<rect x=\"" + fixed(x, 0) + "\" y=\"" + fixed(y + 4, 0) +
            "\" width=\"12\" height=\"12\" fill=\"" + kPartColours[p % kPartColours.size()] +
            "\"/>\n" + text_at(x + 18, y + 14, "start", name);
    x += 8.0 * static_cast<double>(name.size()) + 40;
  }
  return svg(kWide, y + 24, body);
}

std::string escape(const std::string& text) {
  std::string result;
  for (size_t i = 0; i < text.size();) {
    const size_t length = character_length(text, i);
    if (length == 0) {
      result += '.';
      ++i;
      continue;
    }
    switch (text[i]) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += text.substr(i, length);
    }
    i += length;
  }
  return result;
}

}  // namespace zero::examples
