"""Colours of the report. Against white, text has a contrast of at least 4.5, what is drawn of at least 3."""

from __future__ import annotations

PAPER, INK, FAINT, RULE, LINK = "#ffffff", "#1a1a1a", "#595959", "#767676", "#0b4f9e"
SHADE = "#f3f3f3"  # behind rows of a table; text keeps its contrast on it too
SERIES = ("#0b4f9e", "#b3410e", "#00694e", "#7a2a7f", "#8a6100", "#a3123f", "#3d5a80", "#5c5c00")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
PARTS = {"draft": "#7a2a7f", "middle": "#b3410e", "target": "#0b4f9e", "rest": "#767676"}


def contrast(one: str, other: str) -> float:
    """Of two colours `#rrggbb`, 1 to 21, as WCAG 2 defines it."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
