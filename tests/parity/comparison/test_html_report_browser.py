"""The HTML report in a browser: it loads without errors, fits the screen of a phone, and its tables can be sorted."""

import os
import shutil

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
sync = pytest.importorskip("playwright.sync_api", reason="needs playwright to run a browser: pip install playwright")

from matplotlib.image import imread

from parity.comparison import html_report
from tests.reports import checkpoint, failing_report, passing_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

SCREENS = {"light": (1100, "light"), "dark": (1100, "dark"), "phone": (390, "light"), "phone, dark": (390, "dark")}
REPORTS = {"pass": passing_report, "fail": failing_report}


@pytest.fixture(scope="module")
def browser():
    with sync.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox does not run as root
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write both pages and return their addresses."""
    folder = tmp_path_factory.mktemp("pages")
    return {
        name: html_report.write(make(), checkpoint(), folder / f"{name}.html")[0].as_uri() for name, make in REPORTS.items()
    }


@pytest.fixture
def visit(browser, pages):
    """Return a function that opens a page on a screen and collects the browser's errors."""
    contexts = []

    def visit(name, screen="light"):
        width, scheme = SCREENS[screen]
        contexts.append(browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme))
        tab = contexts[-1].new_page()
        tab.errors = []
        tab.on("console", lambda message: tab.errors.append(message.text))
        tab.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.goto(pages[name])
        return tab

    yield visit
    for context in contexts:
        context.close()


def column(tab, label, index):
    """Return the values of a column, from top to bottom."""
    cells = tab.locator(f'[aria-label="{label}"] tbody tr > :nth-child({index})')
    return cells.evaluate_all("all => all.map(cell => 'v' in cell.dataset ? Number(cell.dataset.v) : cell.textContent)")


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", REPORTS)
def test_the_page_loads_without_errors(name, screen, visit):
    assert visit(name, screen).errors == []


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_fits_the_width_of_a_phone(name, visit):
    tab = visit(name, "phone")
    for details in tab.locator("details").all():
        details.evaluate("all => all.open = true")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_column_of_numbers_sorts_in_descending_and_then_in_ascending_order(visit):
    tab, label = visit("pass"), "Gradients with the largest errors"
    button = tab.locator(f'[aria-label="{label}"]').get_by_role("button", name="JAX")
    button.click()
    descending = column(tab, label, 3)
    button.click()
    assert descending == sorted(descending, reverse=True)
    assert column(tab, label, 3) == descending[::-1]


def test_numbers_in_names_sort_as_numbers(visit):
    tab, label = visit("pass"), "All tensors"
    tab.locator("#tensors summary").click()
    tab.locator("#tensors").get_by_role("button", name="Tensor").click()
    names = column(tab, label, 1)
    assert sorted(names) == sorted(m.name for m in passing_report().measures)
    assert names.index("blocks.0.sum") < names.index("blocks.1.norm1") < names.index("tokens")


def test_the_sorted_column_is_announced_to_screen_readers(visit):
    tab = visit("pass")
    headers = tab.locator("#gradients thead th")
    headers.nth(4).locator("button").press("Enter")
    assert headers.evaluate_all("all => all.map(each => each.ariaSort)").index("descending") == 4


def test_dark_and_light_mode_differ_and_neither_is_blank(visit, tmp_path):
    light, dark = (screenshot(visit("pass", screen), tmp_path / f"{screen}.png") for screen in ("light", "dark"))
    assert min(light.std(), dark.std()) > 0.02
    assert light.mean() > 0.8 > 0.3 > dark.mean()


def screenshot(tab, path):
    tab.screenshot(path=path)
    return np.asarray(imread(path))[..., :3]
