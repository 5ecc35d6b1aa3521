// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Charts of the page of train_gpt --report: long runs, losses that are not finite, skipped steps,
// and text that XML does not take as it is.
#include "examples/train_gpt/svg.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>

namespace zero::examples {
namespace {

Points points_of(const std::string& svg) {
  const std::string before = " points=\"";
  const size_t begin = svg.find(before) + before.size();
  std::istringstream text(svg.substr(begin, svg.find('"', begin) - begin));
  Points points;
  char comma = 0;
  for (double x = 0, y = 0; text >> x >> comma >> y;) points.emplace_back(x, y);
  return points;
}

Points line(int64_t count) {
  Points points;
  for (int64_t i = 1; i <= count; ++i) {
    points.emplace_back(static_cast<double>(i), static_cast<double>(i));
  }
  return points;
}

TEST(SvgTest, ALongRunIsDrawnAsMeansOfNeighbours) {
  EXPECT_EQ(points_of(draw_chart({"", {{"loss", kBlue, line(1000)}}})).size(), 1000u);
  const Points means = points_of(draw_chart({"", {{"loss", kBlue, line(25000)}}}));
  EXPECT_EQ(means.size(), 1000u);
  // A straight line stays one: x rises as much as y falls, each from end to end.
  const auto [first_x, first_y] = means.front();
  const auto [last_x, last_y] = means.back();
  for (const auto& [x, y] : means) {
    EXPECT_NEAR((x - first_x) / (last_x - first_x), (y - first_y) / (last_y - first_y), 1e-3);
  }
}

TEST(SvgTest, PointsThatAreNotFiniteAreLeftOut) {
  Points points = line(10);
  points[3].second = std::nan("");
  points[5].second = std::numeric_limits<double>::infinity();
  const std::string svg = draw_chart({"", {{"loss", kBlue, points}}});
  EXPECT_EQ(points_of(svg).size(), 8u);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST(SvgTest, AChartWithoutPointsOrWithOneValueIsFinite) {
  for (const Points& points : {Points{}, Points{{1, 2.5}}, Points{{1, 0}, {2, 0}}}) {
    const std::string svg = draw_chart({"", {{"loss", kBlue, points}}});
    EXPECT_EQ(points_of(svg).size(), points.size());
    EXPECT_EQ(svg.find("nan"), std::string::npos) << svg;
    EXPECT_EQ(svg.find("inf"), std::string::npos) << svg;
  }
}

TEST(SvgTest, SkippedStepsAreCrossesBelowTheirSteps) {
  const std::string svg =
      draw_chart({"norm", {{"norm", kBlue, line(11)}}, /*from_zero=*/true, {1, 6, 11}, "skipped"});
  const Points points = points_of(svg);
  EXPECT_NE(svg.find(">skipped<"), std::string::npos);
  for (const size_t at : {0u, 5u, 10u}) {
    const std::string cross = "<text x=\"" + fixed(points[at].first, 1) + "\"";
    const size_t found = svg.find(cross + " y=\"224.0\"");
    ASSERT_NE(found, std::string::npos) << cross;
    EXPECT_NE(svg.substr(found, 120).find(">x<"), std::string::npos);
  }
}

TEST(SvgTest, TextIsEscapedAndBytesThatAreNoTextAreFullStops) {
  EXPECT_EQ(escape("a<b> & \"c\"\n\t"), "a&lt;b&gt; &amp; &quot;c&quot;\n\t");
  EXPECT_EQ(escape("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(escape(std::string("\0\x01\x1b", 3)), "...");
  EXPECT_EQ(escape("\xff \x80 \xc3"), ". . .");
  EXPECT_EQ(escape("\xc0\xaf"), "..");  // '/' in too many bytes
  EXPECT_EQ(escape("\xe0\x80\xaf"), "...");
  EXPECT_EQ(escape("\xed\xa0\x80"), "...");       // half of a surrogate pair
  EXPECT_EQ(escape("\xef\xbf\xbf"), "...");       // U+FFFF
  EXPECT_EQ(escape("\xf4\x90\x80\x80"), "....");  // above U+10FFFF
}

}  // namespace
}  // namespace zero::examples
