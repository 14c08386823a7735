import base64
import hashlib
import json
import re
import shutil
import subprocess

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib._pylab_helpers import Gcf
from matplotlib.collections import PathCollection
from matplotlib.text import Text
from PIL import Image

from livt_hf import reports
from livt_hf.files import read_log
from livt_hf.metrics import LongTailMetrics, confusions
from livt_hf.recipes.paper import biases
from livt_hf.reports import style
from livt_hf.reports.curves import trade_off
from livt_hf.reports.page import escape_markdown


def size_of(path):
    """Of a picture that is not one colour."""
    with Image.open(path) as picture:
        assert any(low != high for low, high in picture.convert("RGB").getextrema())
        return picture.size


@pytest.fixture
def figures(monkeypatch):
    """The figures drawn, kept from being written."""
    drawn = []

    def keep(figure, path, **_):
        figure.draw_without_rendering()
        drawn.append(figure)
        return path

    for module in ("recipes.paper.biases", "reports.classes", "reports.curves", "reports.sheets"):
        monkeypatch.setattr(f"livt_hf.{module}.save", keep)
    return drawn


def measured(num_classes, images_per_class=2, seed=0):
    """Metrics of a model that is right on about half the images of an exponential long tail."""
    rng = np.random.default_rng(seed)
    counts = (1000 * 500 ** (-np.arange(num_classes) / max(1, num_classes - 1))).astype(int)
    labels = np.arange(num_classes).repeat(images_per_class)
    predictions = np.where(rng.random(len(labels)) < 0.5, labels, rng.integers(num_classes, size=len(labels)))
    metrics = LongTailMetrics(counts, confidence="given")
    for start in range(0, len(labels), 1000):
        chosen, part = predictions[start : start + 1000], labels[start : start + 1000]
        rows = np.zeros((len(part), num_classes), dtype=np.float32)
        rows[np.arange(len(part)), chosen] = rng.random(len(part))
        metrics.update(rows, part)
    names = [f"A rather long species name {i}" for i in range(num_classes)]
    return metrics, confusions(torch.from_numpy(predictions), torch.from_numpy(labels), counts, names)


def overlapping(texts):
    boxes = [text.get_window_extent() for text in texts if text.get_visible() and text.get_text()]
    return [(i, j) for i in range(len(boxes)) for j in range(i) if boxes[i].overlaps(boxes[j])]


def test_drawing_leaves_matplotlibs_settings_and_pyplots_figures_alone(tmp_path):
    before = dict(matplotlib.rcParams)
    biases.bias_by_gamma(tmp_path / "gamma.png")
    assert dict(matplotlib.rcParams) == before
    assert Gcf.get_all_fig_managers() == []  # pyplot's list of figures


def test_letters_that_the_usual_font_lacks_are_looked_for_in_others_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "EAST_ASIAN", ("STIXGeneral", "Nowhere Sans"))  # the first comes with matplotlib
    style.font_families.cache_clear()
    figure = style.new_figure(2, 2)
    plain, other = (figure.text(0.1, 0.1, name) for name in ("oak", "猫"))
    with pytest.warns(UserWarning, match="missing from font"):
        style.save(figure, tmp_path / "names.png")
    assert plain.get_fontfamily() == ["sans-serif"] and other.get_fontfamily() == ["sans-serif", "STIXGeneral"]
    style.font_families.cache_clear()


@pytest.mark.parametrize("num_classes", [2, 10, 40, 8142])
def test_no_class_label_overlaps_another_with_few_and_with_thousands_of_classes(num_classes, figures):
    metrics, pairs = measured(num_classes, images_per_class=3)
    names = [f"A rather long species name {i}" for i in range(num_classes)]
    table = metrics.per_class(names)
    reports.class_distribution([row["count"] for row in table], "x.png", names)
    reports.accuracy_by_frequency(table, "x.png")
    reports.confused_classes(pairs[:20], "x.png")
    assert len(figures) == 3
    reports.confused_classes([], "x.png")  # of a model without an error
    assert figures.pop().texts[0].get_text() == "no test image is taken for another class"
    for figure in figures:
        for ax in figure.axes:
            assert overlapping(ax.get_xticklabels() if ax.xaxis.get_visible() else []) == []
            assert overlapping(ax.get_yticklabels()) == []
            assert overlapping(ax.texts) == []


def test_classes_are_drawn_over_their_training_images_without_those_that_were_not_tested(figures):
    rows = [
        {"class": 0, "name": "rare", "count": 5, "group": "few", "accuracy": 0.1},
        {"class": 1, "name": "unseen", "count": 7, "group": "few", "accuracy": None},
        {"class": 2, "name": "common", "count": 500, "group": "many", "accuracy": 0.9},
    ]
    reports.accuracy_by_frequency(rows, "x.png", intervals=np.array([[0.0, 0.3], [0.0, 1.0], [0.7, 1.0]]))
    drawn = [one for one in figures[0].axes[0].collections if isinstance(one, PathCollection)]
    few, many = (one.get_offsets()[0] for one in drawn)
    assert few.tolist() == pytest.approx([5, 10], rel=0.05) and many.tolist() == pytest.approx([500, 90], rel=0.05)


def test_the_trade_off_marks_the_chosen_point_on_both_curves(figures):
    curve = [{"exponent": t, "accuracy": 0.5 + t / 5, "mean_class_accuracy": 0.6 - t / 5} for t in (0, 0.5, 1)]
    check = [row | {"accuracy": row["accuracy"] - 0.1} for row in curve]
    trade_off("x.png", curve, 0.5, check)
    trade_off("x.png", test=check)
    chosen = [line.get_xydata() for line in figures[0].axes[0].lines if line.get_marker() == "D"][:2]
    np.testing.assert_allclose(chosen, [[[50, 60]], [[50, 50]]])
    assert [line.get_label() for line in figures[1].axes[0].lines] == ["test images (check)"]


def test_every_picture_is_written_where_it_is_asked_for(tmp_path):
    metrics, pairs = measured(10, images_per_class=5)
    table = metrics.per_class()
    picture = np.random.default_rng(0).random((8, 8, 3))
    paths = [
        reports.reliability_diagram(metrics.bins, tmp_path / "new" / "reliability.png"),
        reports.accuracy_by_frequency(table, tmp_path / "accuracy.png"),
        reports.confused_classes(pairs[:5], tmp_path / "confused.png"),
        reports.best_and_worst(table, lambda label: [picture] * 3, tmp_path / "classes.png"),
        biases.bias_curves(tmp_path / "curves.png"),
        biases.bias_by_gamma(tmp_path / "gamma.png"),
        reports.class_distribution([9, 4, 1], tmp_path / "distribution.png"),
        reports.sweep_plot([{"variant": "ce", "many": 40}], tmp_path / "sweep.png", "loss"),
    ]
    for path in paths:
        assert min(size_of(path)) > 100


def test_the_two_biases_cross_zero_at_the_uniform_share_and_part_at_the_head(figures):
    biases.bias_curves("x.png", num_classes=10)
    ax = figures[0].axes[0]
    bce, ce = (line.get_xydata() for line in ax.lines[:2])
    assert np.interp(0.1, *bce.T) == pytest.approx(0, abs=0.02)
    assert np.interp(0.1, *ce.T) == pytest.approx(0, abs=0.02)
    assert bce[-1, 1] > ce[-1, 1] + 3


def test_classes_without_training_images_are_drawn_without_biases(figures):
    reports.class_distribution([9, 4, 0], "x.png")
    reports.class_distribution([9, 4, 1], "x.png")
    reports.class_distribution([9, 4, 1], "x.png", biases=False)
    assert [len(figure.axes) for figure in figures] == [1, 2, 1]


def test_a_contact_sheet_shows_each_image_pixel_for_pixel_and_its_caption(tmp_path, figures):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    images = [np.full((4, 4, 3), colour, dtype=np.uint8) for colour in colours]
    reports.contact_sheet(images, ["red", "green", "$blue_1$"], "x.png", columns=2)
    canvas = figures[0].axes[0].images[0].get_array()
    for colour in colours:
        assert (canvas == colour).all(-1).sum() == 128 * 128
    assert [text.get_text().strip() for text in figures[0].axes[0].texts] == ["red", "green", "$blue_1$"]
    assert not figures[0].axes[0].texts[2].get_parse_math()
    floats = np.full((4, 4, 3), 0.5)  # floats, bytes and pictures are shown alike
    images = [floats, np.full((4, 4, 3), 128, np.uint8), Image.new("RGB", (4, 4), (128,) * 3), floats + 7]
    reports.contact_sheet(images, [""] * 4, "x.png")
    assert (figures[1].axes[0].images[0].get_array() == 128).all(-1).sum() == 3 * 128 * 128


def test_reconstructions_stand_in_columns_under_their_titles(tmp_path, figures):
    picture = np.zeros((8, 8, 3))
    reports.reconstruction_sheet([(picture, picture, picture)] * 2, "x.png", ["image", "masked", "reconstruction"])
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["image", "masked", "reconstruction"]
    with pytest.raises(ValueError, match="one title per column"):
        reports.reconstruction_sheet([(picture, picture)], "x.png", ["image"])


def accuracies(*pairs):
    """Rows of `per_class`: how many test images of each class are right, of how many."""
    shares = [None if not images else right / images for right, images in pairs]
    return [{"class": i, "accuracy": share, "images": pairs[i][1]} for i, share in enumerate(shares)]


def test_the_best_and_the_worst_classes_are_those_of_highest_and_lowest_accuracy():
    rows = accuracies((5, 10), (0, 0), (10, 10), (0, 10), (7, 10))
    assert reports.best_and_worst_classes(rows, 1) == ([2], [3])
    assert reports.best_and_worst_classes(rows, 5) == ([2, 4], [3, 0])
    assert reports.best_and_worst_classes(rows[:1], 5) == ([0], [])
    rows = accuracies((0, 2), (0, 12), (3, 3), (9, 9), (1, 2), (1, 2))  # of equal ones those with more test images
    assert reports.best_and_worst_classes(rows, 1) == ([3], [1])
    assert reports.best_and_worst_classes(rows, 2) == ([3, 2], [1, 0])
    rows = accuracies((0, 1), (1, 1), (0, 12), (2, 4), (0, 1))  # one test image counts where there is no other
    assert reports.best_and_worst_classes(rows) == ([3], [2])
    assert reports.best_and_worst_classes(accuracies((0, 1), (1, 1), (0, 1))) == ([1], [0, 2])
    # No class is among both, and none without a right image is a best one.
    assert reports.best_and_worst_classes(accuracies(*[(0, 12)] * 6), 5) == ([], [0, 1, 2, 3, 4])
    assert reports.best_and_worst_classes(accuracies(*[(12, 12)] * 6), 3) == ([0, 1, 2], [])
    best, worst = reports.best_and_worst_classes(accuracies(*[(6, 12)] * 6), 5)
    assert not set(best) & set(worst) and len(best + worst) == 6


def test_five_of_the_best_classes_are_shown_also_beside_fewer_that_err(figures):
    rows = [row | {"name": "x", "count": 9, "group": "few"} for row in accuracies(*[(4, 4)] * 9, (1, 4), (0, 4))]
    reports.best_and_worst(rows, lambda label: [np.zeros((8, 8, 3))], "x.png")
    words = [text.get_text().split("\n")[0] for text in figures[0].axes[0].texts]
    assert words == [*(f"best {place}" for place in range(1, 6)), "worst 1", "worst 2"]


def test_the_words_of_a_reliability_diagram_have_its_ece_and_mce_and_hide_none_of_its_bars(figures):
    metrics, _ = measured(10, images_per_class=50)
    reports.reliability_diagram(metrics.bins, "x.png", title="ten classes")
    computed, words = metrics.compute(), figures.pop().axes[0].get_title(loc="left")
    assert f"ECE {100 * computed['ece']:.1f} %" in words and f"MCE {100 * computed['mce']:.1f} %" in words
    bins = [{"low": i / 15, "high": (i + 1) / 15, "images": 7, "accuracy": 1.0, "confidence": 1.0} for i in range(15)]
    reports.reliability_diagram(bins, "x.png", title="bars everywhere")
    figure = figures[0]
    words = [figure.legends[0], *(text for text in figure.findobj(Text) if text.get_text())]
    bars = [bar for ax in figure.axes for bar in ax.patches]
    assert not [1 for word in words for bar in bars if word.get_window_extent().overlaps(bar.get_window_extent())]


def write_log(path, rows, end=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return path


def test_a_line_that_a_killed_process_left_unfinished_does_not_count(tmp_path):
    rows = [{"update": 1, "loss": 3}, {"update": 2, "loss": 2}, {"update": 2, "eval": {"accuracy": 0.5}}]
    log = write_log(tmp_path / "log.jsonl", rows, '{"upd')
    assert read_log(log) == rows
    log.write_text('{"upd\n{"update": 1, "loss": 1}\n')
    with pytest.raises(ValueError, match="line 1 of"):
        read_log(log)


def test_one_run_shows_its_groups_together_and_several_runs_one_panel_per_group(tmp_path, figures):
    rows = [{"update": u, "epoch": u / 10, "loss": 1 / u, "lr": 1e-3} for u in range(1, 101)]
    rows += [{"update": 100, "epoch": 10, "eval": {"accuracy": 0.5, "many": 0.7, "medium": None, "few": 0.1}}]
    log = write_log(tmp_path / "log.jsonl", rows)
    pretraining = write_log(tmp_path / "mgp.jsonl", rows[:20])
    reports.training_curves({"one": log}, "x.png")
    reports.training_curves({"one": log, "two": log}, "x.png")
    reports.training_curves({"mgp": pretraining}, "x.png")
    assert [len(figure.axes) for figure in figures] == [3, 5, 2]  # the medium group is absent
    groups = figures[0].axes[2]
    assert [text.get_text() for text in groups.get_legend().get_texts()] == ["all", "many", "few"]
    with pytest.raises(ValueError, match="empty.jsonl: no line to draw"):
        reports.training_curves({"empty": write_log(tmp_path / "empty.jsonl", [])}, "x.png")


def test_a_sweep_keeps_the_distances_of_numbers_and_names_words_beside_bars(figures):
    rows = [{"variant": v, "accuracy": a, "accuracy_deviation": 1.5} for v, a in (("0", 10), ("1", 20), ("4", None))]
    reports.sweep_plot(rows, "x.png", "tau")
    rows = [{"variant": "ce", "few": 10, "paper": None}, {"variant": "bal_bce", "few": 20, "paper": {"few": 30}}]
    reports.sweep_plot(rows, "x.png", "loss", title="losses")
    numbers, words = (figure.axes[0] for figure in figures)
    assert numbers.lines[0].get_xdata().tolist() == [0, 1, 4]
    assert np.nan_to_num(numbers.lines[0].get_ydata(), nan=-1).tolist() == [10, 20, -1]
    assert [label.get_text() for label in words.get_yticklabels()] == ["ce", "bal_bce"]
    hollow = [line for line in words.lines if line.get_markerfacecolor() == "none"]
    assert np.nan_to_num(hollow[0].get_xdata(), nan=-1).tolist() == [-1, 30]
    assert [text.get_text() for text in figures[1].legends[0].get_texts()] == ["few", "paper"]
    with pytest.raises(ValueError, match="no row has an accuracy"):
        reports.sweep_plot([{"variant": "ce", "few": None}], "x.png", "loss")


def test_a_markdown_table_has_one_column_per_key_and_dashes_for_what_is_absent():
    rows = [{"loss": "a|b", "all": 0.123456}, {"loss": "c<d>", "all": None, "images": 7}]
    assert reports.markdown_table(rows).splitlines() == [
        "| loss | all | images |",
        "| --- | ---: | ---: |",
        "| a\\|b | 0.1235 | - |",
        "| c&lt;d&gt; | - | 7 |",
    ]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("<b>bold</b>", "&lt;b&gt;bold&lt;/b&gt;"),
        ("a*b* `c` [d](e) $f$ g|h \\i", "a\\*b\\* \\`c\\` \\[d\\](e) \\$f\\$ g\\|h \\\\i"),
        ("__bal_bce_", "\\_\\_bal_bce\\_"),
    ],
)
def test_markdown_shows_a_name_as_it_is(name, written):
    assert escape_markdown(name) == written and f"| {written} |" in reports.markdown_table([{"class": name}])


def test_numbers_stand_right_under_their_heading_and_names_left_also_where_digits_are_fixed(tmp_path):
    rows = [{"name": "ant", "few": "44.0"}, {"name": "7", "few": "-"}]
    assert reports.markdown_table(rows).splitlines()[1] == "| --- | ---: |"
    page = reports.write_page(tmp_path, title="", tables={"Classes": rows}).read_text()
    assert '<th class="text">name</th><th>few</th>' in page
    assert '<td class="text">7</td><td>-</td>' in page


def magenta_report(folder):
    Image.new("RGB", (300, 200), (255, 0, 255)).save(folder / "magenta.png")
    tables = {"Results": [{"rule": "<b>argmax</b>", "few": 0.25}], "Classes": [{"class": i} for i in range(60)]}
    pictures = {"a picture": [folder / "magenta.png"]}
    page = reports.write_page(folder, title="Report & <title>", tables=tables, pictures=pictures)
    (folder / "magenta.png").unlink()  # what the page shows is in the page
    return page


def test_the_html_page_refers_to_nothing_outside_itself_and_runs_one_script_of_its_own(tmp_path):
    text = magenta_report(tmp_path).read_text()
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert len(script) == 1 and f"script-src 'sha256-{digest}'" in text
    assert "http://" not in text and "https://" not in text
    assert "&lt;b&gt;argmax&lt;/b&gt;" in text and "<title>Report &amp; &lt;title&gt;</title>" in text
    with pytest.raises(ValueError, match="not a picture"):
        reports.write_page(tmp_path, title="", pictures={"a table": [tmp_path / "results.csv"]})


def test_a_figure_stands_in_the_page_as_text_that_follows_light_and_dark(tmp_path):
    metrics, _ = measured(10, images_per_class=50)
    path = reports.reliability_diagram(metrics.bins, tmp_path / "reliability.png", "a <b> & c")
    page = reports.write_page(tmp_path, title="", pictures={"one": [path]}).read_text()
    svg = page[page.index("<svg") : page.index("</svg>")]
    assert "<img" not in page and "http" not in svg and "a &lt;b&gt; &amp; c" in svg and "currentColor" in svg
    assert not re.findall(r'(?:src|href)="(?!#)', svg) and "font-family" not in svg and "font:" not in svg
    assert float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1]) < 390  # read on a phone without a magnifying glass
    assert min(map(float, re.findall(r"font-size: ([\d.]+)px", svg))) >= 9


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_the_pictures_of_the_page_without_a_console_message(tmp_path):
    def visit(page, name):
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        flags += " --disable-component-update --disable-sync --window-size=900,900 --enable-logging=stderr"
        command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path / name}"]
        command += [f"--screenshot={tmp_path / name}.png", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        pixels = np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB"))
        return (pixels == (255, 0, 255)).all(-1).sum(), done.stderr.count("CONSOLE")

    page = magenta_report(tmp_path)
    assert visit(page, "good") == (300 * 200, 0)
    # The same eyes on a page that does refer elsewhere: the browser complains and shows nothing.
    broken = tmp_path / "broken.html"
    broken.write_text(re.sub(r'src="data:[^"]*"', 'src="elsewhere.png"', page.read_text()))
    shown, complaints = visit(broken, "bad")
    assert shown == 0 and complaints > 0
