"""Every message that docs/troubleshooting.md quotes is one that the source can say."""

import ast
import re

import pytest
from package_source import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "…"  # what stands for names and numbers, on the page and here


def quoted(text: str) -> list[str]:
    """Messages of the page: code in bold, on one line or two."""
    return [re.sub(r"\s+", " ", found) for found in re.findall(r"\*\*`([^`]+)`\*\*", text)]


def template(node: ast.AST) -> str | None:
    """The text of a string in the source, with a gap for each value that is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or GAP for part in node.values)
    return None


def source_messages() -> str:
    """All strings of the package, one per line."""
    found = []
    for path in (ROOT / "src" / "afterdrop").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = (template(node) for node in ast.walk(tree))
        found += [text.replace("\n", " ") for text in texts if text]
    return "\n".join(found)


@pytest.fixture(scope="module")
def messages() -> str:
    return source_messages()


def occurs(message: str, messages: str) -> bool:
    """Whether one string of the source has the parts of a message in this order."""
    parts = [re.escape(part) for part in message.split(GAP) if part.strip(" ;,")]
    return bool(parts) and re.search("[^\n]*?".join(parts), messages) is not None


@pytest.mark.parametrize("message", quoted(PAGE.read_text(encoding="utf-8")))
def test_a_quoted_message_occurs_in_the_source(message, messages):
    assert len(message.replace(GAP, "")) >= 12
    assert occurs(message, messages), message


def test_other_messages_are_told_apart(messages):
    assert len(quoted(PAGE.read_text(encoding="utf-8"))) > 50
    assert not occurs("the model has no dropout whatsoever", messages)
    assert not occurs("the model has no dropout … these are scores of the test split", messages)
    page = "- **`one\n  two`** and **`three …`**: `not this`"
    assert quoted(page) == ["one two", "three …"]
