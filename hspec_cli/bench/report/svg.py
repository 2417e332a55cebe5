"""A matplotlib figure as SVG that stands inside a page: no reference to anywhere, ids of its own, an alt text."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTHING = {"Creator": None, "Date": None, "Format": None, "Type": None}


def inline(figure: Figure, name: str, title: str, alt: str) -> str:
    """The SVG element; `name` keeps its ids apart from those of others on the page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=NOTHING)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    head, _, body = text.partition(">")
    head = re.sub(r'\s(width|height|version)="[^"]*"', "", head)
    labelled = f'{head} role="img" aria-labelledby="{name}-title {name}-alt">'
    return (
        f'{labelled}<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-alt">{escape(alt)}</desc>{body.strip()}'
    )
