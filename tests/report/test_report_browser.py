"""The report in a real browser: self-contained, with all plots, and safe against hostile names."""

import io
import json
import shutil

import numpy as np
import pytest
from cases import EVIL, EVIL_FOLDER, evil_study
from matplotlib.image import imread

from afterdrop.cli import main
from afterdrop.tune.study_files import write_result

WIDTHS = (380, 1280)


@pytest.fixture(scope="module")
def page(trained, tmp_path_factory):
    """The report of a trained model whose words, and whose folder, are HTML and very long."""
    run = shutil.copytree(trained, tmp_path_factory.mktemp("web") / EVIL_FOLDER)
    assert main(["report", str(run)]) == 0
    return run / "report.html"


@pytest.fixture(scope="module")
def own_page(scores, tmp_path_factory):
    """The report of a user's own classifier whose classes are HTML and very long."""
    folder = tmp_path_factory.mktemp("own")
    scores.save(folder / "scores" / "valid.safetensors")
    assert main(["select", str(folder)]) == 0
    (folder / "classes.json").write_text(json.dumps(dict.fromkeys(EVIL, 9)))
    assert main(["report", str(folder), "--classes", str(folder / "classes.json")]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def comparison(trained, page, own_page, tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "compare.html"
    runs = [str(trained), str(page.parent), str(own_page.parent)]
    assert main(["compare", *runs, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The page of a study whose recipe, folder and failures are HTML and very long."""
    folder = tmp_path_factory.mktemp("tuned") / EVIL_FOLDER
    write_result(evil_study(), folder)
    assert main(["report", str(folder)]) == 0
    return folder / "study.html"


@pytest.fixture(params=["page", "own_page", "comparison", "study"])
def any_page(request):
    return request.getfixturevalue(request.param)


def test_the_browser_detects_requests_scripts_and_overflow(browser, tmp_path):
    """A page with every fault that the reports must not have."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<title>mine</title><div style='width: 2000px'>wide</div><img src='beside.png'>"
        "<script>document.title = 'taken'; console.error('no')</script>"
    )
    browser.open(bad, 380)
    assert browser.requests()[1:] == [(tmp_path / "beside.png").as_uri()]
    assert browser.complaints()
    assert browser.value("document.title") == "taken"
    assert browser.value("document.documentElement.scrollWidth") >= 2000


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_self_contained_and_the_console_is_empty(browser, any_page, width):
    browser.open(any_page, width)
    assert browser.requests() == [any_page.resolve().as_uri()]
    assert browser.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_it_never_scrolls_sideways(browser, any_page, width):
    browser.open(any_page, width)
    assert browser.value("document.documentElement.scrollWidth <= window.innerWidth")
    wide = browser.value(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.wide, svg, .skip') && "
        "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 90))"
    )
    assert wide == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_plot_is_visible(browser, any_page, width, dark):
    browser.open(any_page, width, dark=dark)
    boxes = browser.value(
        "[...document.querySelectorAll('figure svg')].map(e => { const b = "
        "e.getBoundingClientRect(); return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, "
        "height: b.height}})"
    )
    assert len(boxes) >= 4
    whole = imread(io.BytesIO(browser.screenshot()))[..., :3]
    for box in boxes:
        assert box["width"] > 0.75 * min(width, 480) and box["height"] > 120
        left, top = round(box["x"]), round(box["y"])
        part = whole[top : top + int(box["height"]), left : left + int(box["width"])]
        paper = np.median(part.reshape(-1, 3), 0)
        drawn = np.abs(part - paper).max(-1) > 0.15
        assert 0.01 < drawn.mean() < 0.99
        assert (whole[0, 0].mean() < 0.3) == dark


def test_html_in_the_data_is_inert(browser, any_page):
    browser.open(any_page, 1280)
    assert "taken" not in browser.value("document.title.replace(/<[^>]*>/g, '')")
    foreign = "document.querySelectorAll('script, img, iframe, [onerror], [onload]').length"
    assert browser.value(foreign) == 0
    assert browser.value("/<script>|<img src=x/.test(document.body.textContent)")  # as text


def test_text_in_plots_is_legible_against_the_page(browser, page):
    """Contrast of at least 4.5 (WCAG AA) of the plots' and the page's text colours."""
    for dark in (False, True):
        browser.open(page, 1280, dark=dark)
        colours = browser.value(
            "[getComputedStyle(document.body).backgroundColor, ...['ink', 'muted', 'blue', "
            "'vermilion', 'teal', 'purple', 'ochre'].map(name => { const e = document.body"
            ".appendChild(document.createElement('i')); e.style.color = `var(--${name})`; "
            "return getComputedStyle(e).color })]"
        )
        paper, *inks = (_luminance(colour) for colour in colours)
        for ink in inks:
            low, high = sorted((paper, ink))
            assert (high + 0.05) / (low + 0.05) >= 4.5


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_it_is_accessible_and_prints(browser, any_page):
    browser.open(any_page, 1280)
    assert browser.value(
        "[...document.querySelectorAll('svg')].every(e => e.role === 'img' && e.ariaLabel)"
    )
    assert browser.value("document.querySelectorAll('table caption').length") == browser.value(
        "document.querySelectorAll('table').length"
    )
    assert browser.value("document.documentElement.lang") == "en"
    assert browser.value("document.querySelectorAll('h1').length") == 1
    assert browser.pdf().startswith(b"%PDF")
    browser.open(any_page, 800, dark=True, media="print")
    paper = browser.value("getComputedStyle(document.documentElement).getPropertyValue('--paper')")
    assert paper.strip() == "#fefefe"  # dark paper would waste ink
