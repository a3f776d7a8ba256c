"""The harness itself: what it says of a notebook is so."""

import pytest

from tests.browser.lab import DARK, Lab

pytestmark = pytest.mark.browser

WIDGET = """
import ipywidgets
slider = ipywidgets.IntSlider(value=3, min=0, max=10)
button, said = ipywidgets.Button(description="Add ten"), ipywidgets.Label("nothing yet")
typed = ipywidgets.Text()
button.on_click(lambda _: setattr(said, "value", f"{slider.value + 10} {typed.value}"))
ipywidgets.VBox([slider, button, typed, said])
"""


def test_a_notebook(lab: Lab) -> None:
    lab.open(["x = 1\nprint('said')\nx", "x += 1\nx", "1 / 0", WIDGET], "harness")
    for i in (0, 1, 1, 3):
        lab.run_cell(i)
    assert lab.output_text(1).endswith("3")
    assert lab.outputs(0)[0] == {"output_type": "stream", "name": "stdout", "text": "said\n"}
    assert lab.kernel_eval("x") == 3
    lab.slide(3, 2)
    lab.slide(3, -1)
    lab.fill(3, "apples")
    lab.click(3, "Add ten")
    lab.expect_text(3, "14 apples")
    assert lab.kernel_eval("slider.value") == 4
    lab.run_cell(2, fails=True)
    assert lab.error(2) == "ZeroDivisionError: division by zero"
    with pytest.raises(AssertionError, match="cell 2: ZeroDivisionError"):
        lab.run()
    lab.restart()
    assert lab.kernel_eval("'x' in globals()") is False


NOISY = """
from IPython.display import HTML, display
later = "setTimeout(() => { throw new Error('thrown') })"
display(HTML(f'''<script>alert(1); console.error("bad"); {later};</script>
<img src="https://example.org/x.png">'''))
"""


def test_what_must_not_happen_is_noticed(lab: Lab) -> None:
    lab.open([NOISY], "noisy")
    lab.run()
    lab.page.wait_for_timeout(500)
    kinds = {line.split(":")[0] for line in lab.noise}
    assert kinds == {"dialog", "console", "page error", "outside"}, lab.noise
    lab.noise.clear()


FADED = """
from IPython.display import HTML, display
display(HTML('<p>plain</p><p style="opacity:.2">faded</p><p style="background:#000;color:#111">dark</p>'))
"""


def test_contrasts(lab: Lab) -> None:
    lab.open([FADED], "faded")
    lab.run()
    for theme in ("JupyterLab Light", DARK):
        lab.theme(theme)
        found = {line["text"]: line["ratio"] for line in lab.contrasts()}
        assert found["plain"] > 10
        assert found["faded"] < 3
        assert found["dark"] < 1.5
