"""Figures as inline SVG that uses the colours, the font and the width of the page."""

import io
import re
from xml.etree import ElementTree

from markupsafe import Markup

from afterdrop.report.figure_style import THEME, Axes, styled

_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_FONT = re.compile(r"(font(?:-family)?:[^;]*?)(?:'DejaVu Sans'|DejaVu Sans)[^;]*")


def inline_svg(ax: Axes, name: str, description: str) -> Markup:
    """The figure of some axes as an `<svg>` element.

    Colours become CSS variables (`var(--ink)`), text stays text in the font of the page, ids get a
    prefix that keeps them unique in the page, and the page determines the width.

    Args:
        ax: Axes of the figure.
        name: Prefix of the ids, unique in the page; letters, digits and dashes.
        description: Alternative text for screen readers.

    Returns:
        Markup that is safe to insert into a page.
    """
    buffer = io.BytesIO()
    with styled(salt=name):
        figure = ax.get_figure(root=True)
        assert figure is not None
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for child in [c for c in root if c.tag == f"{{{_SVG}}}metadata"]:
        root.remove(child)
    used = _references(root)
    for element in root.iter():
        _adapt(element, name, used)
    for parent in root.iter(f"{{{_SVG}}}defs"):  # its rules would apply to the whole page
        for style in parent.findall(f"{{{_SVG}}}style"):
            parent.remove(style)
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.set("role", "img")
    root.set("aria-label", description)
    ElementTree.register_namespace("", _SVG)
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # ElementTree escapes all text


def _references(root: ElementTree.Element) -> set[str]:
    """The ids that other elements refer to."""
    found: set[str] = set()
    for element in root.iter():
        for value in element.attrib.values():
            found.update(re.findall(r"url\(#([^)]+)\)", value))
            if value.startswith("#"):
                found.add(value[1:])
    return found


def _adapt(element: ElementTree.Element, name: str, used: set[str]) -> None:
    own = element.attrib.pop("id", None)
    if own in used:
        element.set("id", f"{name}-{own}")
    if _LINK in element.attrib:
        element.set("href", f"#{name}-{element.attrib.pop(_LINK)[1:]}")
    for key, value in element.attrib.items():
        value = value.replace("url(#", f"url(#{name}-")
        if key in ("style", "fill", "stroke"):
            value = _FONT.sub(r"\1var(--font)", value)
            for variable, (light, _) in THEME.items():
                value = value.replace(light, f"var(--{variable})")
        element.set(key, value)
