# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""What the pictures of this folder are drawn with: shapes as SVG on a white sheet."""

import html
import os
import sys

BLUE, ORANGE, GREEN, RED, PURPLE = "#2f6f9f", "#d98324", "#3f8f5b", "#b9442f", "#7a5aa6"
LIGHT_BLUE, LIGHT_ORANGE, LIGHT_GREEN = "#cfe2f0", "#fae0c3", "#d5ebdc"
INK, GREY, LIGHT_GREY = "#1f2429", "#6a737b", "#e4e7ea"

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Picture:
    """Shapes in the order they are drawn. Coordinates are pixels from the upper left corner."""

    def __init__(self, width, height):
        self.width, self.height = width, height
        self.shapes = []

    def rect(self, x, y, width, height, fill, stroke="none", radius=0, dash=""):
        self.shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                           f'height="{height:.1f}" fill="{fill}" stroke="{stroke}"'
                           + (f' rx="{radius}"' if radius else "")
                           + (f' stroke-dasharray="{dash}"' if dash else "") + "/>")

    def line(self, points, stroke=INK, width=1.5, dash="", opacity=1):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" '
                           f'stroke-width="{width}"'
                           + (f' stroke-dasharray="{dash}"' if dash else "")
                           + (f' stroke-opacity="{opacity}"' if opacity != 1 else "")
                           + "/>")

    def curve(self, path, stroke=INK, width=1.5):
        """An arrow along a path in SVG's own words."""
        self.shapes.append(f'<path d="{path}" fill="none" stroke="{stroke}" '
                           f'stroke-width="{width}" marker-end="url(#head)"/>')

    def area(self, points, fill, opacity=1.0):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(f'<polygon points="{path}" fill="{fill}" fill-opacity="{opacity}"/>')

    def text(self, x, y, words, size=13, fill=INK, anchor="start", bold=False, mono=False,
             halo=False):
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"'
                           + (f' text-anchor="{anchor}"' if anchor != "start" else "")
                           + (' font-weight="bold"' if bold else "")
                           + (' font-family="monospace"' if mono else "")
                           + (' stroke="white" stroke-width="4" paint-order="stroke"' if halo
                              else "")
                           + f">{html.escape(words, quote=False)}</text>")

    def hatched(self, x, y, width, height):
        """Padding."""
        self.rect(x, y, width, height, "url(#padding)", "#9aa3ab")

    def svg(self):
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" '
                f'height="{self.height}" viewBox="0 0 {self.width} {self.height}" '
                'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">\n'
                '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" '
                'orient="auto" markerUnits="userSpaceOnUse"><path d="M0,0 L9,4 L0,8 z" '
                f'fill="{GREY}"/></marker><pattern id="padding" width="6" height="6" '
                'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" '
                'height="6" fill="#f4f5f6"/><rect width="2" height="6" fill="#b3bbc2"/></pattern>'
                '</defs>\n'
                f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" '
                'rx="6" fill="white" stroke="#d5d9dd"/>\n' + "\n".join(self.shapes) + "\n</svg>\n")


def write(picture, script):
    """Writes <name of script>.svg beside the script, or into the folder given as argument."""
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(script))
    name = os.path.splitext(os.path.basename(script))[0] + ".svg"
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write(picture.svg())


def table_below(path, heading):
    """The rows of the first table that has `heading` in its first line, as lists of cells."""
    rows = []
    with open(os.path.join(REPOSITORY, path), encoding="utf-8") as file:
        for line in file:
            if line.startswith("|") and (rows or heading in line):
                rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
            elif rows:
                break
    if not rows:
        sys.exit(f"{path}: expected a table with {heading!r} in its first line, got none")
    return [rows[0]] + rows[2:]
