"""The report page: whole, self-contained, and deaf to what an agent printed."""

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.core.types import Episode, Message, Score, Status, Trajectory
from skyrl_jax.train.charts import Series, line_chart, moving_mean, stacked_chart, text, ticks
from skyrl_jax.train.report import MAX_CONTENT, sample_episodes, write_report
from skyrl_jax.train.rollouts import rollout_path, write_rollouts

HOSTILE = (
    "</pre></details><script>alert(1)</script><img src=x onerror=alert(2)>"
    "<iframe src='https://example.org'></iframe><style>*{display:none}</style>\x00\x1b[31m\ud800"
)
SAFE = {"html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "div", "span", "p"}
SAFE |= {"table", "tr", "td", "th", "figure", "figcaption", "details", "summary", "pre", "i"}
SAFE |= {"svg", "text", "circle", "line", "polyline", "polygon"}


class _Page(HTMLParser):
    """Collects elements, attributes and text, and checks that elements close in order."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text, self._open = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open and self._open[-1] == tag, f"</{tag}> inside {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data):
        self.text.append(data)

    def done(self):
        assert not self._open
        return self


def _parse(path):
    parser = _Page()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser.done()


def _workdir(folder, content="hello", steps=12):
    (folder / "config.json").write_text(json.dumps({"name": "swe", "seed": 3, "hack": content}))
    summary = {
        "resolved_before": 0.25,
        "resolved_after": 0.4,
        "gain": 0.15,
        "gain_low": 0.1,
        "gain_high": 0.2,
        "greedy_before": 0.3,
        "greedy_after": None,
        "steps": steps,
        "resolved_curve": [[0, 0.25], [6, 0.3], [12, 0.4]],
        "episodes": 512,
        "tasks": 128,
        "rl_episodes": 3840,
        "wall_s": 900.0,
        "setup_s": 61.0,
        content: content,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "resolved_rate": step / 50, "loss": None if step == 2 else 0.1}
            row |= {"wait_s": 3.0, "step_s": 1.0, "wall_s": 4.0, content: 1.0}
            file.write(json.dumps(row) + "\n")
    episode = Episode(
        task_id=content,
        sample_index=0,
        messages=(Message(role=content, content=content, error=content),),
        turns=(),
        status=Status.TRUNCATED,
        reason=content,
        submission=content,
        temperature=1.0,
    )
    for step in (1, 2, 3):
        for verdict in ("resolved", content):
            score = Score(value=1.0, verdict=verdict)
            trajectory = Trajectory(episode=episode, score=score)
            write_rollouts(rollout_path(folder, step), [trajectory] * 3)
    return folder


def test_page_shows_the_run(tmp_path):
    page = _parse(write_report(_workdir(tmp_path)))
    shown = " ".join(page.text)
    for words in (
        "25.0 %",
        "40.0 %",
        "+15.0",
        "+10.0 to +20.0",
        "15.0 min",
        "setup 61 s",
        "3,840",
        "512 episodes of 128 tasks",
    ):
        assert words in shown
    for title in (
        "Resolved rate, held-out tasks",
        "Loss",
        "Where a step's time goes",
        "Before and after",
    ):
        assert title in shown
    dots = [value for name, value in page.attributes if name == "class" and value == "dot alone"]
    assert len(dots) == 3  # the measured points of the held-out curve are seen, not hidden
    assert page.tags.count("svg") >= 4 and page.tags.count("pre") >= 6


def test_hostile_content_is_text_and_nothing_else(tmp_path):
    path = write_report(_workdir(tmp_path, content=HOSTILE))
    page = _parse(path)
    assert set(page.tags) <= SAFE
    assert page.tags.count("style") == 1
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "srcset", "action"} & names
    assert not [name for name in names if name.startswith("on")]
    assert "<script>alert(1)</script>" in "".join(page.text)
    assert "\x00" not in path.read_text() and "\x1b" not in path.read_text()


def test_page_may_load_and_run_nothing(tmp_path):
    source = write_report(_workdir(tmp_path)).read_text()
    assert "Content-Security-Policy" in source and "default-src 'none'" in source
    assert "http://" not in source and "https://" not in source and "url(" not in source


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_escaped_text_reads_back(value):
    parser = _Page()
    parser.feed(f"<p>{text(value)}</p>")
    shown = "".join(parser.done().text)
    expected = "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in value
    )
    assert shown == expected


def test_a_run_that_ended_at_once_still_has_a_page(tmp_path):
    page = _parse(write_report(tmp_path))
    assert "h1" in page.tags and "svg" not in page.tags


def test_long_messages_are_cut_and_say_so(tmp_path):
    _workdir(tmp_path, content="y" * (MAX_CONTENT + 500))
    assert "500 characters left out" in write_report(tmp_path).read_text()


def test_reasoning_is_shown_and_files_without_it_are_read(tmp_path):
    folder = _workdir(tmp_path)
    assert "reasoning" not in write_report(folder).read_text()
    path = rollout_path(folder, 1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["messages"][0]["reasoning"] = "first <b>think"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = write_report(folder).read_text()
    assert '<div class="role">reasoning</div><pre>first &lt;b&gt;think</pre>' in page


def test_transcripts_come_from_first_middle_and_last_step_of_both_kinds(tmp_path):
    episode = Episode(
        task_id="t", sample_index=0, messages=(), turns=(), status=Status.FINISHED,
        reason="submit", submission="", temperature=1.0,
    )  # fmt: skip
    verdicts = ["resolved"] * 5 + ["unresolved"] * 5
    scores = [Score(value=0.0, verdict=verdict) for verdict in verdicts]
    for step in range(1, 6):
        group = [Trajectory(episode=episode, score=score) for score in scores]
        write_rollouts(rollout_path(tmp_path, step), group)
    picked = sample_episodes(tmp_path / "rollouts")
    assert [step for step, _ in picked] == [
        f"step {number:06d}" for number in (1, 3, 5) for _ in range(4)
    ]
    resolved = [item["score"]["verdict"] == "resolved" for _, item in picked]
    assert sum(resolved) == 6


def test_charts_by_hand():
    assert moving_mean([(1, 0.0), (2, 3.0), (3, 6.0), (4, 9.0)], window=2) == [
        (1, 0.0), (2, 1.5), (3, 4.5), (4, 7.5),
    ]  # fmt: skip
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 47, most=6) == [10, 20, 30, 40]
    # Two layers of 1 over x = 0..1: the frame is 0 to 2.1, so the upper edge lies at 2 / 2.1.
    chart = stacked_chart([Series(name=name, points=[(0, 1.0), (1, 1.0)]) for name in ("a", "b")])
    height = 210 - 26 - (2 / 2.1) * (210 - 26 - 10)
    assert chart.count("<polygon") == 2 and f",{height:.1f}" in chart
    assert "no data" in line_chart([Series(name="a", points=[])])
    with pytest.raises(ValueError, match="same x"):
        stacked_chart([Series(name="a", points=[(0, 1)]), Series(name="b", points=[(1, 1)])])


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e12, 1e12, allow_nan=False)), max_size=30)
)
def test_any_curve_is_drawn_with_finite_numbers(points):
    chart = line_chart([Series(name="a", points=sorted(points))])
    assert "nan" not in chart and "inf" not in chart
