"""The page in a browser: it opens without a complaint, fits a phone, and its tables sort."""

import os
import shutil

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
sync = pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright: pip install playwright")

from matplotlib.image import imread

from parity.comparison import html_report
from tests.reports import checkpoint, failing, passing

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

SCREENS = {"light": (1100, "light"), "dark": (1100, "dark"), "phone": (390, "light"), "phone, dark": (390, "dark")}
REPORTS = {"pass": passing, "fail": failing}


@pytest.fixture(scope="module")
def browser():
    with sync.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # which root cannot have
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The addresses of both pages."""
    folder = tmp_path_factory.mktemp("pages")
    return {
        name: html_report.write(make(), checkpoint(), folder / f"{name}.html")[0].as_uri() for name, make in REPORTS.items()
    }


@pytest.fixture
def visit(browser, pages):
    """Open a page on a screen; what the browser complains of is kept."""
    contexts = []

    def visit(name, screen="light"):
        width, scheme = SCREENS[screen]
        contexts.append(browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme))
        tab = contexts[-1].new_page()
        tab.complaints = []
        tab.on("console", lambda message: tab.complaints.append(message.text))
        tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.goto(pages[name])
        return tab

    yield visit
    for context in contexts:
        context.close()


def column(tab, label, index):
    """What the cells of a column hold, top to bottom."""
    cells = tab.locator(f'[aria-label="{label}"] tbody tr > :nth-child({index})')
    return cells.evaluate_all("all => all.map(cell => 'v' in cell.dataset ? Number(cell.dataset.v) : cell.textContent)")


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", REPORTS)
def test_it_opens_without_a_complaint(name, screen, visit):
    assert visit(name, screen).complaints == []


@pytest.mark.parametrize("name", REPORTS)
def test_a_phone_need_not_scroll_sideways(name, visit):
    tab = visit(name, "phone")
    for details in tab.locator("details").all():
        details.evaluate("all => all.open = true")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_column_of_numbers_sorts_from_the_largest_and_then_from_the_smallest(visit):
    tab, label = visit("pass"), "Gradients that part the most"
    button = tab.locator(f'[aria-label="{label}"]').get_by_role("button", name="JAX")
    button.click()
    falling = column(tab, label, 3)
    button.click()
    assert falling == sorted(falling, reverse=True)
    assert column(tab, label, 3) == falling[::-1]


def test_names_sort_by_their_numbers_as_numbers(visit):
    tab, label = visit("pass"), "All tensors"
    tab.locator("#tensors summary").click()
    tab.locator("#tensors").get_by_role("button", name="Tensor").click()
    names = column(tab, label, 1)
    assert sorted(names) == sorted(m.name for m in passing().measures)
    assert names.index("blocks.0.sum") < names.index("blocks.1.norm1") < names.index("tokens")


def test_the_sorted_column_is_told_to_those_who_cannot_see_it(visit):
    tab = visit("pass")
    headers = tab.locator("#gradients thead th")
    headers.nth(4).locator("button").press("Enter")
    assert headers.evaluate_all("all => all.map(each => each.ariaSort)").index("descending") == 4


def test_dark_and_light_look_different_and_neither_is_blank(visit, tmp_path):
    light, dark = (imread_of(visit("pass", screen), tmp_path / f"{screen}.png") for screen in ("light", "dark"))
    assert min(light.std(), dark.std()) > 0.02
    assert light.mean() > 0.8 > 0.3 > dark.mean()


def imread_of(tab, path):
    tab.screenshot(path=path)
    return np.asarray(imread(path))[..., :3]
