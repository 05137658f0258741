import re
from html.parser import HTMLParser

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seg4k.studies.collect import collect_runs
from seg4k.studies.markdown import render_markdown
from seg4k.studies.plotting import nice_ticks, place_labels, plot_range
from seg4k.studies.report import make_report, write_report
from seg4k.studies.run_files import memory_parts, read_metrics, thin
from seg4k.studies.words import percent, shorten, size, three_digits

GIB = 2**30
EVIL = "<script>alert('x')</script> | `a` & \"b\"\nnext line"
VOID = {"meta", "img", "br", "line", "circle", "path", "polyline"}


class Balanced(HTMLParser):
    """Collects tags and checks that each is closed where it should be."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.seen = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(text):
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return parser.seen


@pytest.fixture
def written(run, tmp_path):
    for mode in ("none", "stage", "selective"):
        for seed in range(2):
            breakdown = {
                "parameters": GIB // 2,
                "gradients": GIB // 2,
                "optimizer": GIB,
                "activations": 4 * GIB,
            }
            run(mode, seed, picture=mode != "stage", memory__breakdown=breakdown)
    run("block", 0, status="failed", error=EVIL)
    run("layer", 0, status="out_of_memory")
    write_report(tmp_path)
    return tmp_path


def test_page_stands_alone(written):
    text = (written / "report.html").read_text()
    tags = parse(text)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in tags}
    sources = [attrs["src"] for _, attrs in tags if "src" in attrs]
    assert len(sources) == 2
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert not re.search(r"https?://|url\(|@import", text)
    assert sum(tag == "svg" for tag, _ in tags) == 4  # the Pareto plot and three curves
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_everything_is_escaped(run, tmp_path):
    run("none", 0)
    run(
        "stage",
        0,
        at="a&b<i>/seed=0",
        status="failed",
        error=EVIL,
        activation_checkpointing__mode="<b>",
        device__name="<u>",
        strategy="<s>",
    )
    write_report(tmp_path)
    tags = {tag for tag, _ in parse((tmp_path / "report.html").read_text())}
    assert not {"script", "u", "s"} & tags
    assert "alert(&#x27;x&#x27;)" in (tmp_path / "report.html").read_text()
    markdown = (tmp_path / "report.md").read_text()
    assert "<script" not in markdown
    assert "<b>" not in markdown


def test_markdown_tables_are_whole(written):
    text = render_markdown(make_report(written))
    for table in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().splitlines()}
        assert len(columns) == 1
    assert "![Peak memory against throughput, one point per mode](pareto.png)" in text
    assert text == (written / "report.md").read_text()


def test_picture_of_the_front(written):
    image = cv2.imread(str(written / "pareto.png"))
    assert image.shape == (870, 1275, 3)
    assert image.std() > 10


def test_nothing_is_left_behind(written):
    names = {path.name for path in written.iterdir() if path.is_file()}
    assert names == {"report.json", "report.md", "report.html", "pareto.png"}


def test_damaged_picture_and_metrics_do_not_matter(run, tmp_path):
    directory = run("none", 0, picture=True)
    (directory / "val_samples.png").write_bytes(b"\x89PNG broken")
    (directory / "metrics.csv").write_bytes(
        b"step,train_loss\n0,1.0\n1,nan\n\xff\xfe,3\n2,\x00\n3,2.0,9,9\n4"
    )
    assert read_metrics(directory) == {
        "step": [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)],
        "train_loss": [(0, 1), (3, 2)],
    }
    write_report(tmp_path)
    assert "data:image" not in (tmp_path / "report.html").read_text()
    (directory / "metrics.csv").unlink()
    assert read_metrics(directory) == {}


def test_sweep_in_which_nothing_was_completed(run, tmp_path):
    run("none", 0, status="failed", error="boom", memory__peak_bytes=None)
    report = write_report(tmp_path)
    assert report["pareto"] == []
    assert report["recommendations"][0]["mode"] is None
    parse((tmp_path / "report.html").read_text())


def test_memory_parts_sum_to_the_peak(run, tmp_path):
    run("none", 0, memory__peak_bytes=10 * GIB, memory__static_bytes=3 * GIB)
    run("stage", 0, memory__breakdown={"parameters": GIB, "activations": 2 * GIB}, memory__peak_bytes=4 * GIB)
    run("block", 0, memory__static_bytes=None, memory__peak_bytes=5 * GIB)
    none, stage, block = map(memory_parts, collect_runs(tmp_path))
    assert none == {"static": 3 * GIB, "activations": 7 * GIB}
    assert (stage["parameters"], stage["gradients"], stage["other"]) == (GIB, 0, GIB)
    assert block == {"not split": 5 * GIB}


@given(st.lists(st.floats(-10, 10), max_size=60), st.integers(1, 20))
def test_thinning_keeps_the_mean(values, most):
    points = [(float(step), value) for step, value in enumerate(values)]
    thinned = thin(points, most)
    assert len(thinned) == min(len(points), most)
    assert thinned == sorted(thinned)
    if len(points) % most == 0 and points:
        assert np.mean([value for _, value in thinned]) == pytest.approx(np.mean(values), abs=1e-9)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9))
def test_ticks_lie_inside_and_are_few(low, span):
    high = low + span
    ticks = nice_ticks(low, high)
    slack = 1e-6 * span
    assert len(ticks) <= 7
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert high == low or ticks


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), min_size=1, max_size=4, unique=True))
def test_labels_of_a_few_points_do_not_overlap(points):
    sizes = [(40.0, 12.0)] * len(points)
    corners = place_labels([(float(x), float(y)) for x, y in points], sizes, (-100, -100, 400, 300), 5.0)
    boxes = [(left, low, left + 40, low + 12) for left, low in corners]
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart


def test_range_of_one_value_and_of_none():
    assert plot_range([5.0], 0.1) == (4.5, 5.5)
    assert plot_range([0.0], 0.1) == (-1.0, 1.0)
    assert plot_range([], 0.1) == (0.0, 1.0)


def test_words():
    assert [size(value) for value in (None, 19.9 * GIB, GIB, GIB - 1, 2**19)] == [
        "-",
        "19.9 GiB",
        "1.00 GiB",
        "1,024 MiB",
        "0.500 MiB",
    ]
    assert [percent(value) for value in (0.284, 0.0151, -0.36, 0.0, 0.0004)] == [
        "28%",
        "1.5%",
        "-36%",
        "0%",
        "0%",
    ]
    assert percent(0.048, signed=True) == "+4.8%"
    assert [three_digits(value) for value in (None, 1.0, 0.9481, 123.4, 12345.6)] == [
        "-",
        "1.00",
        "0.948",
        "123",
        "12,346",
    ]
    assert shorten("a\n  b" + "c" * 200, 10) == "a bcccccc…"
