"""The report: what it shows of finished, half done and hostile runs."""

import copy
import html as escapes
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from interlens import Conversation, RunReport, TokenBudget
from interlens.interp.capture import Activation, Activations
from interlens.runner import desk, ledger
from interlens.runner.results import RunResult
from interlens.runner.store import StoreError
from tests.runner.talk import about, rows, talk, words

HOSTILE = "<script>alert(1)</script>\"'&</details><img src=x onerror=y>\u2028 é"


def boom(*args: Any) -> Any:
    raise LookupError("boom")


def quiet(conv: Conversation, out: Path | None = None, n: int | None = None, **options: Any) -> RunReport:
    return conv.rollout(n, out_dir=out, progress=False, **options)


def fails_about_one(view: Any) -> str:
    return boom() if "topic 1." in str(view.messages) else words(view)


def size(conv: Conversation) -> int:
    return len(conv.transcript)


def odd(conv: Conversation) -> Any:
    return boom() if "topic 2." in conv.transcript[0].content else {"x": 1}


@pytest.fixture(params=["memory", "disk", "loaded"])
def report(request: Any, tmp_path: Path) -> RunReport:
    """Four jobs, one of which failed, with two analyzers, one of which fails once."""
    conv = about(talk(turns=2, script=fails_about_one), 4).analyzer(size=size, odd=odd)
    made = quiet(conv, None if request.param == "memory" else tmp_path, seed=3)
    return RunReport.load(tmp_path, trust=True) if request.param == "loaded" else made


def test_counts_and_ids(report: RunReport) -> None:
    ids = [f"row_0000{i}" for i in range(4)]
    assert list(report) == list(report.results) == ids
    assert len(report) == 4
    assert report.failed == ["row_00001"]
    assert report.counts() == {"done": 3, "limit": 0, "failed": 1, "analysis_failed": 1}
    assert report.complete
    told = "3 done, 1 failed, 1 analysis_failed, the first failure is LookupError: boom"
    assert repr(report) == f"RunReport(4 jobs: {told})"
    good = [i for i in ids if i != "row_00001"]
    assert list(report.transcripts()) == list(report.analyses()) == good
    with pytest.raises(KeyError, match="row_00001"):
        report["row_1"]


def test_one_result(report: RunReport) -> None:
    good, analysed_badly, failed = report["row_00000"], report["row_00002"], report["row_00001"]
    assert (good.outcome, good.reason, good.error, good.seed, good.attempts) == ("done", "turns", None, 3, 1)
    assert (good.row, good.tokens_generated, good.device) == ({"topic": "topic 0"}, 8, "default")
    assert good.analysis == {"size": 3, "odd": {"x": 1}}
    assert good.analysis_error is None
    assert repr(good) == "RunResult(row_00000: done, 3 messages, 8 tokens)"
    assert analysed_badly.analysis == {"size": 3, "odd": None}
    assert analysed_badly.analysis_error == {"odd": "LookupError: boom"}
    assert (failed.outcome, failed.reason, failed.analysis) == ("failed", "LookupError", None)
    assert str(failed.error).startswith("LookupError: boom\n\nTraceback")
    assert len(failed.transcript) == 1
    assert len(failed.activations) == 0


@pytest.mark.parametrize("source", ["memory", "disk", "loaded"])
def test_conversations_are_as_they_ended(tmp_path: Path, source: str) -> None:
    conv = talk(turns=2)
    report = quiet(conv, None if source == "memory" else tmp_path, 3, seed=5)
    report = RunReport.load(tmp_path, trust=True) if source == "loaded" else report
    found = report.conversations()
    assert list(found) == list(report)
    for i, one in enumerate(found.values()):
        assert (one.recipe.seed, one.n_turns) == (5 + i, 2)
        assert one.transcript == report[f"rollout_0000{i}"].transcript
        assert one.step("ada").content == conv.seed(5 + i).run(turns=3)[-1].content
        conv.reset()


def test_code_in_a_folder_needs_trust_and_words_do_not(tmp_path: Path) -> None:
    quiet(talk(turns=2), tmp_path, 2)
    report = RunReport.load(tmp_path)
    assert [len(t) for t in report.transcripts().values()] == [3, 3]
    assert len(report.frame()) == 2
    with pytest.raises(StoreError, match="trust=True"):
        report["rollout_00000"].conversation  # noqa: B018


def test_conversations_of_rows_come_back_from_a_folder(tmp_path: Path) -> None:
    quiet(about(talk(turns=2), 3), tmp_path)
    found = RunReport.load(tmp_path, trust=True).conversations()
    assert [c.row for c in found.values()] == rows(3)
    assert [c.transcript[0].content for c in found.values()] == [f"Speak about topic {i}." for i in range(3)]


def test_conversations_come_back_though_their_analyzer_has_no_name(tmp_path: Path) -> None:
    quiet(talk(turns=2).analyzer(lambda c: 1), tmp_path, 1)
    [found] = RunReport.load(tmp_path, trust=True).conversations().values()
    assert found.n_turns == 2


@pytest.mark.parametrize("stored", [True, False])
def test_a_conversation_knows_its_analysis_and_is_no_job_any_more(tmp_path: Path, stored: bool) -> None:
    report = quiet(talk(turns=2).analyzer(size), tmp_path if stored else None, 1)
    conv = report["rollout_00000"].conversation
    assert conv.analysis == 3
    with TokenBudget(per_conversation=conv.tokens_generated + 4):
        conv.run(turns=5)
    assert conv.n_turns == 3


def test_frame(report: RunReport) -> None:
    frame = report.frame()
    assert frame["job"].tolist() == list(report)
    assert frame["outcome"].tolist() == ["done", "failed", "done", "done"]
    assert frame["messages"].tolist() == [3, 1, 3, 3]
    assert frame["tokens"].tolist() == [8, 0, 8, 8]
    assert frame["seed"].tolist() == [3, 4, 5, 6]
    assert frame["row.topic"].tolist() == [r["topic"] for r in rows(4)]
    assert frame["analysis.size"].dropna().tolist() == [3, 3, 3]
    assert frame["error"].dropna().tolist() == ["boom"]
    assert frame["analysis_error"].dropna().tolist() == [{"odd": "LookupError: boom"}]


def test_a_frame_reads_each_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = quiet(about(talk(turns=1), 5), tmp_path)
    read: list[Any] = []
    real = ledger.read_record
    monkeypatch.setattr(ledger, "read_record", lambda place: read.append(place) or real(place))  # type: ignore[func-returns-value]
    report.frame()
    assert len(read) == 5
    read.clear()
    assert repr(report), report.counts()
    assert report.failed == []
    assert read == []


# -- half done


def test_a_half_done_folder_says_so(tmp_path: Path) -> None:
    conv = about(talk(turns=1), 6)
    quiet(conv, tmp_path)
    [seg] = (tmp_path / "seg").glob("*.jsonl")
    lines = seg.read_bytes().splitlines(keepends=True)
    seg.write_bytes(b"".join(lines[:4]) + lines[4][:30])
    report = RunReport.load(tmp_path, trust=True)
    assert (report.complete, report.expected, len(report)) == (False, 6, 4)
    assert repr(report) == "RunReport(4 jobs: 4 done, incomplete, 2 missing)"
    assert "incomplete, 2 missing" in report._repr_html_()
    assert len(report.frame()) == 4
    (tmp_path / "seg" / seg.name).unlink()
    empty = RunReport.load(tmp_path, trust=True)
    assert (len(empty), empty.complete, len(empty.frame())) == (0, False, 0)
    assert "incomplete, 6 missing" in empty._repr_html_()


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run folder"):
        RunReport.load(tmp_path / "nowhere")


def test_many_jobs_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    report = quiet(talk(turns=1), tmp_path, 12, samples=2)
    assert list(RunReport.load(tmp_path, trust=True)) == list(report)


# -- hostile text


class _Tags(HTMLParser):
    """Collects elements and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.words = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.words += data


def test_hostile_text_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    conv = talk(turns=2, script=lambda view: HOSTILE).analyzer(lambda c: HOSTILE)
    conv = conv.set(shared_context=lambda row: row["x"], data=[{"x": HOSTILE}, {"x": "\ud800 fine"}])
    report = quiet(conv, tmp_path)
    page = report.save_html(tmp_path / "page.html").read_text("utf-8")
    for shown in (page, report._repr_html_(), report["row_00000"]._repr_html_()):
        parser = _Tags()
        parser.feed(shown)
        assert not parser.tags & {"script", "img", "style", "link", "svg"}
        assert HOSTILE in parser.words
        assert escapes.escape(HOSTILE) in shown
    failing = quiet(talk(turns=1, script=lambda view: (_ for _ in ()).throw(LookupError(HOSTILE))), None, 1)
    parser = _Tags()
    parser.feed(failing.save_html(tmp_path / "failed.html").read_text("utf-8"))
    assert "script" not in parser.tags
    assert HOSTILE in parser.words
    frame = report.frame()
    assert frame["analysis"].tolist() == [HOSTILE, HOSTILE]
    assert frame["row.x"].tolist() == [HOSTILE, "? fine"]


def test_a_large_report_shows_the_first_twenty() -> None:
    report = quiet(talk(turns=1), None, 23)
    assert "… 3 more jobs" in report._repr_html_()
    assert "rollout_00019" in report._repr_html_()
    assert "rollout_00020" not in report._repr_html_()


# -- activations


def _acts(job: int, reduce: Any = None, positions: tuple[int, ...] = (4, 5, 6)) -> Activations:
    torch = pytest.importorskip("torch")
    rows = 1 if reduce else len(positions)
    tensor = torch.arange(rows * 2.0).reshape(rows, 2) + 100 * job
    one = Activation(
        participant="ada",
        turn=job,
        site="resid_post",
        layer=1,
        positions=positions,
        tensor=tensor,
        reduce=reduce,
    )
    return Activations([one])


def test_activations_are_aligned_with_their_rows(tmp_path: Path) -> None:
    (tmp_path / "activations").mkdir()
    place: Any = None
    results = {}
    for number, (job, acts) in enumerate(
        {"a": _acts(0), "b": _acts(1, "mean"), "c/é": _acts(2, "last", (9,))}.items()
    ):
        acts.save(desk.activation_file(tmp_path, job))
        results[job] = RunResult(job, restore=copy.copy, place=place, folder=tmp_path)
        assert number == acts.items[0].turn
    found = RunReport(results).activations(site="resid_post.1", speaker="ada")
    frame = found.frame()
    assert found.tensor.tolist() == [[0, 1], [2, 3], [4, 5], [100, 101], [200, 201]]
    assert len(found) == len(frame) == 5
    assert frame["job"].tolist() == ["a", "a", "a", "b", "c/é"]
    # A mean is of many positions and has none of its own.
    assert [None if p is pandas_na() else p for p in frame["position"]] == [4, 5, 6, None, 9]
    nothing = RunReport(results).activations(site="resid_post.0")
    assert len(nothing) == len(nothing.frame()) == 0
    with pytest.raises(LookupError, match="no activation matches"):
        nothing.tensor  # noqa: B018


def pandas_na() -> Any:
    import pandas

    return pandas.NA


def test_everything_in_a_record_is_json(tmp_path: Path) -> None:
    report = quiet(about(talk(turns=1), 2), tmp_path)
    for result in report.results.values():
        assert json.loads(json.dumps(result.record, allow_nan=False)) == result.record


def test_a_table_on_disk_and_a_data_set(report: RunReport, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = report.to_parquet(tmp_path / "x.parquet")
    table = parquet.read_table(path)
    state = json.loads(table.schema.metadata[b"interlens"])
    assert (state["complete"], state["jobs"], state["failed"]) == (True, 4, 1)
    found = table.to_pylist()
    assert [row["job"] for row in found] == list(report.results)
    assert [m["content"] for m in found[0]["transcript"]] == [
        m.content for m in report["row_00000"].transcript
    ]
    assert json.loads(found[3]["analysis"]) == {"size": 3, "odd": {"x": 1}}
    assert "boom" in found[1]["error"]
    assert "boom" in found[2]["analysis_error"]
    data = report.to_dataset()
    assert data[0]["transcript"] == found[0]["transcript"]
    assert json.loads(data.info.description)["complete"] is True
    half = RunReport(dict(list(report.results.items())[:2]), expected=4)
    assert json.loads(half.to_dataset().info.description)["complete"] is False


def test_why_a_job_was_begun_again_is_told(tmp_path: Path) -> None:
    trouble = {"left": 2}

    def flaky(view: Any) -> str:
        if trouble["left"]:
            trouble["left"] -= 1
            raise OSError(f"overloaded {trouble['left']}")
        return words(view)

    conv = talk(turns=1, script=flaky)
    for _ in range(3):
        report = quiet(conv, tmp_path, 1)
    assert report["rollout_00000"].earlier_errors == ["OSError: overloaded 1", "OSError: overloaded 0"]
    assert report.frame()["attempts"].tolist() == [3]
