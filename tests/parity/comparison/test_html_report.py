"""The HTML report: its content, and that it is self-contained."""

import base64
import hashlib
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text
from PIL import Image

import vit_spec
from parity.comparison import html_report
from parity.comparison.html_report import attention, plot
from parity.comparison.tolerances import FLOAT32_TOLERANCE
from tests import ROOT
from tests.reports import checkpoint, failing_report, passing_report, random_attention_maps
from tests.twins import perturbed_params, small_config
from vit_spec import InputError

MAPS = attention.AttentionMaps(
    np.zeros((4, 6, 3)), random_attention_maps(0), random_attention_maps(1), 1, "the class token"
)


class Page(HTMLParser):
    """A parsed page: its elements with their attributes and texts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        element = SimpleNamespace(tag=tag, attributes=dict(attributes), text="", inside=tuple(self.open))
        self.elements.append(element)
        if tag not in {"meta", "link", "img", "br", "wbr"}:
            self.open.append(element)

    def handle_endtag(self, tag):
        while self.open and self.open.pop().tag != tag:
            pass

    def handle_data(self, data):
        for element in self.open:
            element.text += data

    def all(self, tag, **attributes):
        """Return the elements of a tag with these attributes."""
        return [e for e in self.elements if e.tag == tag and attributes.items() <= e.attributes.items()]

    def within(self, tag, of):
        """Return the elements of a tag inside another element."""
        return [e for e in self.elements if e.tag == tag and any(o is of for o in e.inside)]

    def table(self, label):
        """Return the rows of the table in a region with this label, header first."""
        (region,) = self.all("div", **{"aria-label": label})
        rows = self.within("tr", region)
        return [[e for e in self.elements if e.tag in ("th", "td") and e.inside[-1] is row] for row in rows]


def render_page(report, **given):
    """Return the parsed page of a report."""
    return Page(html_report.render(report, MAPS, **given))


# Content -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("report", "word"), [(passing_report, "PASS"), (failing_report, "FAIL")])
def test_the_verdict_comes_first(report, word):
    headings = [e for e in render_page(report()).elements if e.tag in ("h1", "h2", "table", "svg")]
    assert headings[0].tag == "h1"
    assert word in headings[0].text


def test_every_tensor_is_in_the_table_in_the_order_of_computation():
    names = [row[0].text for row in render_page(passing_report()).table("All tensors")[1:]]
    assert names == [m.name for m in passing_report().measures]


def test_a_cell_shows_two_digits_and_stores_all():
    row = render_page(passing_report()).table("All tensors")[1]
    error = passing_report().measures[0].difference
    assert (row[1].text, row[1].attributes["data-v"]) == (f"{error:.1e}", repr(error))


def test_the_gradients_with_the_largest_errors_come_first():
    numbers = [
        float(row[1].attributes["data-v"])
        for row in render_page(passing_report()).table("Gradients with the largest errors")[1:]
    ]
    of_parameters = [m.difference for m in passing_report().measures if m.name.startswith("gradient of ")]
    assert numbers == sorted(of_parameters, reverse=True)[:20]


def test_a_comparison_in_float64_alone_has_no_columns_for_float32():
    header = [cell.text for cell in render_page(failing_report()).table("All tensors")[0]]
    assert "PyTorch" not in header


def test_a_failure_names_the_first_part_and_every_origin():
    found = render_page(failing_report())
    (section,) = found.all("section", id="failure")
    assert failing_report().part.module in found.within("strong", section)[0].text
    origins = [row[1].text for row in found.table("Parts that differ in isolation")[1:]]
    assert origins == [origin.name for origin in failing_report().origins[:12]]


def test_a_failure_shows_the_next_command():
    (section,) = render_page(failing_report(), source="my weights.pth").all("section", id="failure")
    assert "python -m parity diagnose 'my weights.pth' --logits EXPECTED.npz" in section.text


def test_a_pass_has_no_section_of_failures():
    assert not render_page(passing_report()).all("section", id="failure")


def test_settings_and_environment_are_shown():
    found = render_page(passing_report())
    assert [row[0].text for row in found.table("Settings")[1:]] == [setting.name for setting in passing_report().audit]
    (section,) = found.all("section", id="environment")
    assert passing_report().environment["torch"] in section.text


def test_training_is_shown_with_its_verdict_and_a_plot():
    losses = {"jax float64": [1.0, 0.5], "torch float64": [1.0, 0.5000001]}
    facts = {"verdict": "PASS: the updates agree", "losses": losses}
    training = SimpleNamespace(passed=True, verdict=facts["verdict"], facts=lambda: facts)
    found = render_page(replace(passing_report(), training=training))
    (section,) = found.all("section", id="training")
    assert "the updates agree" in section.text
    assert found.within("svg", section)


def test_a_comparison_without_gradients_says_so():
    forward = tuple(m for m in passing_report().measures if "gradient" not in m.name)
    (section,) = render_page(replace(passing_report(), measures=forward)).all("section", id="gradients")
    assert "Only the forward pass was compared" in section.text


def test_an_infinite_error_is_written_as_javascript_reads_it():
    first, *rest = passing_report().measures
    broken = replace(passing_report(), measures=(replace(first, function=first.function.infinite()), *rest))
    cell = render_page(broken).table("All tensors")[1][1]
    assert (cell.text, cell.attributes["data-v"]) == ("∞", "Infinity")


def test_the_reason_of_an_infinite_error_is_told_once():
    first, *rest = failing_report().origins
    origins = [replace(first, error=float("inf"), reason=reason) for reason in ("not finite", "missing", "missing")]
    (section,) = render_page(replace(failing_report(), origins=(*origins, *rest))).all("section", id="failure")
    assert "∞: JAX gives NaN or infinities in float64 on the same inputs." in section.text
    assert section.text.count("∞: only one twin computes it.") == 1


def test_the_command_of_the_next_step_reads_the_weights_as_the_check_did():
    options = ["--from", "timm", "--set", "norms.eps=1e-05", "--ignore", "head\\..*"]
    (section,) = render_page(failing_report(), source="my vit.pth", options=options).all("section", id="failure")
    command = r"python -m parity diagnose 'my vit.pth' --from timm --set norms.eps=1e-05 --ignore 'head\..*' --logits"
    assert command in section.text


def test_attention_that_is_not_finite_is_not_drawn():
    infinite = np.where(np.arange(MAPS.jax.size).reshape(MAPS.jax.shape) == 3, np.nan, MAPS.jax)
    (section,) = Page(html_report.render(passing_report(), replace(MAPS, jax=infinite))).all("section", id="attention")
    assert "is not finite, so it is not drawn" in section.text and "nan" not in section.text
    (drawn,) = render_page(passing_report()).all("section", id="attention")
    assert "No weight of any head differs by more than" in drawn.text


# Self-contained ------------------------------------------------------------------------------------------------------


def test_the_page_fetches_nothing():
    text = html_report.render(failing_report(), MAPS)
    addresses = [e.attributes[key] for e in Page(text).elements for key in ("src", "href") if key in e.attributes]
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert not re.search(r"https?:|@import", text)


def test_the_content_security_policy_allows_only_the_script_of_the_page():
    found = render_page(passing_report())
    (script,) = found.all("script")
    (policy,) = found.all("meta", **{"http-equiv": "Content-Security-Policy"})
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy.attributes["content"]
    assert "default-src 'none'" in policy.attributes["content"]


def test_names_are_escaped():
    hostile = "</td><script>alert('&')</script>"
    first, *rest = passing_report().measures
    report = replace(
        passing_report(),
        measures=(replace(first, name=hostile), *rest),
        environment={hostile: hostile},
        warnings=(hostile,),
    )
    found = render_page(report, source=hostile)
    assert len(found.all("script")) == 1
    assert found.table("All tensors")[1][0].text == hostile


def test_names_outside_utf_8_or_with_bidirectional_overrides_are_written_as_escapes():
    hostile = "\udcff\u202ex.pth"
    text = html_report.render(replace(failing_report(), environment={"PATH": hostile}), MAPS, source=hostile)
    assert "\u202e" not in text and text.encode()
    (section,) = Page(text).all("section", id="failure")
    assert r"python -m parity diagnose '\udcff\u202ex.pth' --logits EXPECTED.npz" in section.text
    assert Page(text).all("section", id="environment")[0].text.count(r"\udcff\u202ex.pth") == 1
    assert [e.text for e in Page(text).all("bdi")] == 2 * [r"'\udcff\u202ex.pth'"]


def test_no_two_elements_share_an_id():
    ids = Counter(e.attributes["id"] for e in render_page(passing_report()).elements if "id" in e.attributes)
    assert ids.most_common(1)[0][1] == 1


def test_plots_take_their_colours_from_the_page():
    text = html_report.render(passing_report(), MAPS)
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--jax)" in drawings
    assert not re.search(r"(fill|stroke): #", drawings)


def test_all_tables_are_printed_whole():
    (style,) = render_page(passing_report()).all("style")
    on_screen, _, on_paper = style.text.partition("@media print {")
    assert "details::details-content { content-visibility: visible; }" in on_paper
    (printed,) = re.findall(r"(.*) { overflow: visible; max-height: none; }", on_paper)
    scrolling = re.findall(r"^(.*) {.* overflow-[xy]: auto;", on_screen, re.MULTILINE)
    assert len(scrolling) == 3 and set(printed.strip().split(", ")) == set(scrolling)


def test_the_report_is_printed_in_light_colours():
    (style,) = render_page(passing_report()).all("style")
    assert re.findall(r"@media (.*dark.*) {", style.text) == ["screen and (prefers-color-scheme: dark)"]
    assert "color-scheme: light;" in style.text.partition("@media print {")[2]


def test_a_model_of_twelve_blocks_makes_a_page_of_at_most_600_kilobytes():
    measures = passing_report().measures
    block = [m for m in measures if "blocks.1." in m.name]
    more = (replace(m, name=m.name.replace("blocks.1", f"blocks.{i}")) for i in range(2, 12) for m in block)
    report = replace(passing_report(), measures=(*measures, *more))
    image = attention.sample_image(224, 224)
    maps = replace(
        MAPS, image=image, jax=random_attention_maps(0).repeat(6, 0), torch=random_attention_maps(1).repeat(6, 0)
    )
    assert len(html_report.render(report, maps).encode()) < 600_000


# The files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder with the two files of a report."""
    folder = tmp_path_factory.mktemp("written")
    assert html_report.write(passing_report(), checkpoint(), folder / "report.html") == [
        folder / "report.html",
        folder / "report.png",
    ]
    return folder


def test_the_same_report_replaces_an_earlier_one_by_the_same_bytes(written, tmp_path):
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    paths = html_report.write(passing_report(), checkpoint(), tmp_path / "report.html")
    assert [path.read_bytes() for path in paths] == [(written / path.name).read_bytes() for path in paths]
    assert all(path.stat().st_mtime_ns > (written / path.name).stat().st_mtime_ns for path in paths)


def test_the_plot_shows_both_twins(written):
    pixels = imread(written / "report.png")[..., :3]
    for twin in ("jax", "torch", "exact"):
        assert (np.abs(pixels - to_rgb(plot.LIGHT[twin])).max(-1) < 1 / 255).sum() > 100


@pytest.mark.parametrize("make", [passing_report, failing_report])
def test_no_texts_of_the_plot_overlap(make, monkeypatch):
    figures = []
    monkeypatch.setattr(plot.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plot.error_png(make(), html_report.title(make()), html_report.GENERATOR)
    renderer = FigureCanvasAgg(figures[0]).get_renderer()
    figures[0].draw(renderer)
    boxes = {
        text.get_text(): text.get_window_extent(renderer)
        for text in figures[0].findobj(lambda each: isinstance(each, Text) and each.get_visible() and each.get_text())
    }
    assert {"relRMS", html_report.title(make()), "logits"} < set(boxes)
    assert not [(one, two) for one, two in combinations(boxes, 2) if boxes[one].overlaps(boxes[two])]
    frame = figures[0].bbox
    assert not [text for text, box in boxes.items() if not (frame.contains(*box.min) and frame.contains(*box.max))]


def test_the_guide_shows_a_plot_with_the_title_that_is_written_today():
    """If not, make docs/report.png again by the command of docs/guides/port.md."""
    with Image.open(ROOT / "docs" / "report.png") as picture:
        stored = picture.text
    measures = range(int(re.search(r"(\d+) tensors", stored["Title"])[1]))
    report = SimpleNamespace(passed=True, config=vit_spec.get("vit_s16"), measures=measures, level="precision")
    assert stored == {"Software": html_report.GENERATOR, "Title": html_report.title(report)}


@pytest.mark.parametrize("name", ["report.html", "report.png"])
def test_a_file_that_is_not_part_of_a_report_is_not_replaced(name, written, tmp_path):
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(InputError, match=rf"{name} exists and is not part of a report: give another name"):
        html_report.write(passing_report(), checkpoint(), tmp_path / "report.html")
    assert (tmp_path / name).read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["report.html", "report.png"])
def test_a_file_that_appears_while_the_report_is_made_is_not_replaced(name, tmp_path, monkeypatch):
    error_png = plot.error_png

    def write_and_plot(*arguments):
        (tmp_path / name).write_text("mine")
        return error_png(*arguments)

    monkeypatch.setattr(plot, "error_png", write_and_plot)
    with pytest.raises(InputError, match=rf"{name} exists and is not part of a report: give another name"):
        html_report.write(passing_report(), checkpoint(), tmp_path / "report.html")
    assert (tmp_path / name).read_text() == "mine"


def test_the_users_matplotlib_style_changes_nothing():
    import matplotlib

    plain = plot.error_png(passing_report(), "title", "test")
    with matplotlib.rc_context({"axes.facecolor": "black", "lines.linewidth": 9, "font.size": 30}):
        assert plot.error_png(passing_report(), "title", "test") == plain


@pytest.mark.parametrize("name", html_report.REQUIRED_PACKAGES)
def test_a_missing_package_is_reported_in_one_line_with_the_command_to_install_it(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"{name}, not installed: pip install '\.\[report\]' in the checkout"):
        html_report.check_output_path(tmp_path / "report.html")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("a/report.html", "does not exist"), ("report.txt", "ends in .html"), ("it.html", "is not a file")],
)
def test_a_path_that_cannot_be_written_is_refused(name, complaint, tmp_path):
    (tmp_path / "it.html").mkdir()
    with pytest.raises(InputError, match=complaint):
        html_report.check_output_path(tmp_path / name)


# Attention -----------------------------------------------------------------------------------------------------------


def test_both_twins_have_the_same_attention_maps():
    maps = attention.compute_attention_maps(checkpoint())
    assert maps.jax.shape == (checkpoint().config.num_heads, *checkpoint().config.grid)
    assert np.abs(maps.difference).max() <= FLOAT32_TOLERANCE * maps.torch.max()


def test_a_map_is_the_attention_of_the_class_token_to_the_patches():
    share = attention.compute_attention_maps(checkpoint()).torch.sum((1, 2))
    assert ((share > 0.5) & (share < 1)).all()


def test_without_a_class_token_all_tokens_are_averaged():
    from parity.checkpoints.weights import as_checkpoint

    config = small_config(vit_spec.get("siglip_b16"))
    maps = attention.compute_attention_maps(as_checkpoint(perturbed_params(config), config, "jax"))
    assert maps.of == "all tokens"
    np.testing.assert_allclose(maps.jax.sum((1, 2)), 1, rtol=FLOAT32_TOLERANCE)


def test_the_sample_image_is_shown_before_normalization():
    config = checkpoint().config.replace(pixels={"mean": (0.48, 0.46, 0.41), "std": (0.27, 0.26, 0.28)})
    maps = attention.compute_attention_maps(replace(checkpoint(), config=config))
    np.testing.assert_allclose(maps.image, attention.sample_image(*config.image_size), atol=FLOAT32_TOLERANCE)
