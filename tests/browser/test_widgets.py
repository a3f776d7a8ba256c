"""Every widget in a real JupyterLab: what is done on the page is done on the Python side."""

import pytest

from tests.browser.lab import DARK, Lab

pytestmark = pytest.mark.browser

TALK = """
import torch
from interlens import AutoModelParticipant, Conversation, Direction, HumanParticipant, ScriptedParticipant
a, b = (AutoModelParticipant.from_pretrained("tiny", name=n, max_new_tokens=16) for n in "ab")
conv = Conversation([a, b], shared_context="Go on.")
with conv.capture() as acts:
    conv.run(4, show=False)
v = Direction(torch.randn(a.model.config.hidden_size, generator=torch.Generator().manual_seed(0)), layer=1)
"""
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def test_explore(lab: Lab):
    lab.open([TALK, "w = conv.explore(acts, v)\nw"], "explore")
    lab.run()
    lab.expect_text(1, "layer 0 of 1")
    lab.slide(1, 1)
    lab.expect_text(1, "layer 1 of 1")
    assert lab.kernel_eval("w.layer") == 1
    token = lab.kernel_eval("next(m['tokens'][2] for m in w.messages if m['author'] == 'a')")
    place = lab.kernel_eval("next(m['start'] + 2 for m in w.messages if m['author'] == 'a')")
    word = lab.output(1).locator("span[style*='cursor: pointer']").nth(place)
    word.hover()
    number = lab.kernel_eval(f"float(w._numbers[1, {place}])")
    assert f"{number:.3f}"[:5] in lab.output_text(1)
    word.click()
    assert lab.kernel_eval("w.pinned") == [place]
    assert lab.kernel_eval("w.frame().columns[0]") == f"{place}: {token}"
    lab.screenshot("explore-light", 900)
    lab.output(1).get_by_role("combobox", name="speaker").select_option("b")
    assert lab.kernel_eval("w.speaker") == "b"
    hidden = [m.is_visible() for m in lab.output(1).locator("b", has_text="a").all() if m.inner_text() == "a"]
    assert hidden
    assert not any(hidden)
    lab.theme(DARK)
    lab.output(1).get_by_role("combobox", name="speaker").select_option("")
    lab.screenshot("explore-dark", 900)
    assert all(found["ratio"] >= 4.5 for found in lab.contrasts() if found["cell"] == 1), lab.contrasts()
    lab.output(1).get_by_role("button", name="unpin").click()
    assert lab.kernel_eval("w.pinned") == []


RUN = """
from interlens import FunctionParticipant, Conversation
def say(view):
    n = int(view.messages[-1]["content"].split()[-1])
    if n % 40 == 7:
        raise RuntimeError("%s" % "HOSTILE")
    return f"heard {n} HOSTILE"
conv = Conversation([FunctionParticipant("f", say)], shared_context=lambda row: f"number {row['n']}")
recipe = conv.data([{"n": n} for n in range(120)]).turns(1).analyzer(lambda c: c.row["n"] % 5)
report = recipe.rollout(progress=False)
""".replace("HOSTILE", HOSTILE)


def test_browse(lab: Lab):
    lab.open([RUN, "w = report.browse()\nw"], "browse")
    lab.run()
    lab.expect_text(1, "1–50 of 120")
    lab.click(1, "next page")
    lab.expect_text(1, "51–100 of 120")
    assert lab.kernel_eval("w.page") == 1
    lab.click(1, "next failure")
    lab.expect_text(1, "RuntimeError: " + HOSTILE)
    assert lab.kernel_eval("w.selected") == "row_00007"
    lab.click(1, "next failure")
    lab.expect_text(1, "number 47")
    assert lab.kernel_eval("w.selected") == "row_00047"
    lab.screenshot("browse-light", 900)
    lab.output(1).get_by_role("columnheader", name="analysis").click()
    lab.output(1).get_by_role("columnheader", name="analysis").click()
    lab.page.wait_for_timeout(300)
    assert lab.kernel_eval("[w.sort, w.descending]") == ["analysis", True]
    lab.fill(1, "heard 11")
    lab.expect_text(1, "1–11 of 11")
    assert lab.kernel_eval("w.query") == "heard 11"
    lab.output(1).get_by_text("row_00110").click()
    lab.expect_text(1, "number 110")
    lab.theme(DARK)
    lab.screenshot("browse-dark", 900)
    assert all(found["ratio"] >= 4.5 for found in lab.contrasts() if found["cell"] == 1), lab.contrasts()
    lab.output(1).get_by_role("combobox", name="outcome").select_option("failed")
    lab.fill(1, "")
    lab.expect_text(1, "1–3 of 3")


def test_steering(lab: Lab):
    lab.open([TALK, "p = conv.steering({'up': v, 'noise': v.random_like()}, 'a')\np"], "steering")
    lab.run()
    lab.slide(1, 5, which=1)
    lab.expect_text(1, "strength 2")
    lab.kernel_becomes("p.strength", pytest.approx(2.0))
    lab.slide(1, -1, which=0)
    lab.expect_text(1, "layer 0")
    lab.kernel_becomes("p.layer", 0)
    lab.output(1).get_by_role("combobox", name="direction").select_option("noise")
    lab.slide(1, 30, which=1)
    lab.expect_text(1, "strength 8")
    lab.click(1, "generate")
    lab.expect_text(1, "steered by 8 along noise at layer 0 · turn 2")  # the turn has ended
    lab.page.wait_for_function("() => true")
    assert lab.kernel_eval("p.wait(30)")
    words = lab.kernel_eval("[p.message.content, p.steered_message.content]")
    assert words[0] == lab.kernel_eval("conv.transcript[-2].content")
    for text in words:
        assert " ".join(text.split()) in " ".join(lab.output_text(1).split())
    lab.screenshot("steering-light", 700)
    lab.theme(DARK)
    lab.screenshot("steering-dark", 700)
    assert all(found["ratio"] >= 4.5 for found in lab.contrasts() if found["cell"] == 1), lab.contrasts()


def test_stop_is_heard_while_a_panel_speaks(lab: Lab):
    endless = "max_new_tokens=1900, logit_bias={2: -1000.0}"  # no end token
    long = TALK.replace("max_new_tokens=16", endless).replace("conv.run(4, show=False)", "pass")
    lab.open([long, "p = conv.steering(v, 'a')\np"], "stop")
    lab.run()
    lab.click(1, "generate")
    lab.expect_text(1, "generating …")
    lab.page.wait_for_timeout(500)
    lab.click(1, "stop")
    assert lab.kernel_eval("p.wait(20)")
    assert lab.kernel_eval("[p.message is None, len(conv.transcript)]") == [True, 1]
    lab.kernel_run("p.strength = 3.0")  # and the page goes on hearing
    lab.expect_text(1, "strength 3")


def test_chat(lab: Lab):
    seat = TALK.replace("[a, b]", "[HumanParticipant('me'), a]").replace("conv.run(4, show=False)", "pass")
    lab.open([seat + "conv.reset()", "c = conv.chat()\nc"], "chat")
    lab.run()
    lab.fill(1, f"Hello {HOSTILE}")
    lab.output(1).get_by_role("textbox").press("Enter")
    lab.page.wait_for_function("() => true")
    lab.expect_text(1, f"Hello {HOSTILE}")
    lab.kernel_eval("c.wait(30)")
    assert lab.kernel_eval("[m.author for m in conv.transcript][-2:]") == ["me", "a"]
    lab.fill(1, "And then?")
    lab.click(1, "send")
    lab.expect_text(1, "And then?")
    lab.kernel_eval("c.wait(30)")
    said = lab.kernel_eval("[m.content for m in conv.transcript]")
    for text in said:
        assert " ".join(text.split()) in " ".join(lab.output_text(1).split())
    lab.screenshot("chat-light", 700)
    lab.theme(DARK)
    lab.screenshot("chat-dark", 700)
    assert all(found["ratio"] >= 4.5 for found in lab.contrasts() if found["cell"] == 1), lab.contrasts()


def test_a_saved_notebook_shows_the_static_pictures(lab: Lab, second: Lab):
    lab.open([TALK, "conv.explore(acts, v)", "conv.chat()", "conv.tint(v)"], "kept")
    lab.run()
    lab.save()
    words = lab.kernel_eval("conv.transcript[1].content")
    second.visit("kept")
    second.page.wait_for_timeout(500)
    for i in (1, 2, 3):
        assert " ".join(words.split()) in " ".join(second.output_text(i).split())


def test_an_exported_page_shows_them_too(lab: Lab):
    """What `nbconvert --to html` writes, opened without a kernel and without a network."""
    from nbconvert import HTMLExporter

    lab.open([TALK, "conv.explore(acts, v)", "conv.steering(v, 'a')", "conv"], "exported")
    lab.run()
    words = lab.kernel_eval("[m.content for m in conv.transcript]")
    lab.save()
    page, _ = HTMLExporter().from_filename(str(lab.folder / "exported.ipynb"))
    (lab.folder / "exported.html").write_text(page, encoding="utf-8")
    shown = lab.page.context.new_page()
    shown.route("**/*", lambda r: r.continue_() if r.request.url.startswith("file:") else r.abort())
    shown.goto((lab.folder / "exported.html").as_uri())
    text = " ".join(shown.inner_text("body").split())
    for said in words:
        assert text.count(" ".join(said.split())) >= 2
    shown.screenshot(path=lab.shots / "exported.png", full_page=True)
    shown.close()
