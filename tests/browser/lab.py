"""A notebook in a real JupyterLab: open, run, interrupt, look. Nothing in here knows interlens.

Cells are counted from 0 and read from the notebook's model, not from what the page happens to have drawn.
What must not happen on the page (dialogs, errors, requests that would leave this machine) is collected in
`Lab.noise`, and the fixture `lab` asserts that it is empty when a test ends.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Locator, Page, Route

LIGHT, DARK = "JupyterLab Light", "JupyterLab Dark"

LAB_ITSELF = {
    r"status of 404 \(Not Found\) \(\S+/api/sessions/": "a session that has ended is asked for once more",
    r"^Could not restore the debugger state: Canceled future": "a kernel ended while Lab asked it",
}
"""Console errors that JupyterLab makes without us: a regular expression, to the reason."""


class Lab:
    """One page of a JupyterLab and the notebook in it."""

    def __init__(self, context: "BrowserContext", url: str, folder: Path) -> None:
        self.url, self.folder, self.shots = url, folder, folder
        """The server's address, the folder of the notebooks, and where screenshots go."""
        self.noise: list[str] = []
        """Dialogs, page errors, console errors and requests to elsewhere, as they came."""
        self._themed = False
        context.route("**/*", self._only_here)
        context.add_init_script(path=Path(__file__).with_name("page.js"))
        self.page: Page = context.new_page()
        self.listen(self.page)

    # -- what is collected

    def listen(self, page: "Page") -> None:
        """Collect what happens on another page, too."""
        page.on("dialog", self._dialog)
        page.on("pageerror", lambda error: self.noise.append(f"page error: {error}"))
        page.on("console", self._console)

    def _only_here(self, route: "Route") -> None:
        address = route.request.url
        if address.startswith((self.url + "/", "data:", "blob:")):
            route.continue_()
        else:
            self.noise.append(f"outside: {address}")
            route.abort()

    def _dialog(self, dialog: Any) -> None:
        self.noise.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _console(self, message: Any) -> None:
        said = f"{message.text} ({message.location.get('url', '')})"
        if message.type == "error" and not any(re.search(known, said) for known in LAB_ITSELF):
            self.noise.append(f"console: {said}")

    @property
    def received(self) -> int:
        """Bytes that came over the page's websockets, as the page counts them."""
        return int(self.page.evaluate("() => inPage.received"))

    # -- notebooks

    def write(self, cells: Sequence[str], name: str) -> Path:
        """Write a notebook without opening it."""
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.folder / f"{name}.ipynb"
        nbformat.write(made, path)
        return path

    def open(self, cells: Sequence[str], name: str) -> None:
        """Write a notebook and open it with a kernel of its own."""
        self.write(cells, name)
        self.visit(name)

    def visit(self, name: str) -> None:
        """Open a notebook that is in the folder, and wait until its kernel can be asked."""
        path = f"{name}.ipynb"
        if self.page.url.startswith(self.url):
            self._command("docmanager:open", {"path": path, "factory": "Notebook"})
        else:  # ?reset forgets what was open before
            self.page.goto(f"{self.url}/lab/tree/{path}?reset")
        self.page.wait_for_function("path => inPage.shows(path)", arg=path)
        self.wait_ready()

    def save(self) -> None:
        """Save the notebook, outputs included."""
        self._command("docmanager:save")

    def trusted(self) -> list[bool]:
        """Whether Lab trusts the outputs of each code cell."""
        return list(self.page.evaluate("() => inPage.trusted()"))

    # -- running

    def wait_ready(self) -> None:
        """Wait until the kernel is connected and idle."""
        self.page.wait_for_function("() => inPage.ready()")

    def run(self) -> None:
        """Run all cells and wait; a cell that fails fails the test."""
        self._command("notebook:run-all-cells")
        self.wait_ready()
        for i in range(len(self.trusted())):
            self._no_error(i)

    def run_cell(self, i: int, *, fails: bool = False) -> None:
        """Run one cell and wait; with `fails` it may end in an error."""
        self.start_cell(i)
        self.wait_cell()
        if not fails:
            self._no_error(i)

    def start_cell(self, i: int) -> None:
        """Begin one cell and come back while it runs; `wait_cell` waits for it."""
        self.wait_ready()
        self.page.evaluate("i => inPage.choose(i)", i)
        self._begin("notebook:run-cell", {}, "cell")

    def wait_cell(self) -> None:
        """Wait for the cell that was begun."""
        self._wait_mark("cell")
        self.wait_ready()

    def wait_output(self, i: int, text: str) -> None:
        """Wait until the output of a cell contains this text, also while it runs."""
        self.page.wait_for_function("([i, text]) => inPage.text(i).includes(text)", arg=[i, text])

    def seconds_until(self, i: int, text: str) -> float:
        """Run a cell; give the seconds until its output, laid out, contains this text."""
        self.wait_ready()
        self.page.evaluate("([i, text]) => inPage.time(i, text)", [i, text])
        self.page.wait_for_function("() => inPage.took !== null")
        self.wait_cell()
        return float(self.page.evaluate("() => inPage.took"))

    def interrupt(self) -> None:
        """What the stop button does."""
        self._command("notebook:interrupt-kernel")

    def restart(self) -> None:
        """A new kernel for the same notebook; outputs stay."""
        self.page.evaluate("() => inPage.restart()")
        self._wait_mark("restart")
        self.wait_ready()

    def kernel_run(self, code: str) -> str:
        """Run code that is in no cell; give what it printed."""
        self.page.evaluate("code => inPage.ask(code)", code)
        self.page.wait_for_function("() => inPage.asked.done")
        found = self.page.evaluate("() => inPage.asked")
        assert not found["error"], f"{code}\n{found['error']}"
        return str(found["text"])

    def kernel_eval(self, expression: str) -> Any:
        """The value of an expression in the kernel, through JSON."""
        return json.loads(self.kernel_run(f"print(__import__('json').dumps({expression}))"))

    def kernel_becomes(self, expression: str, value: Any) -> None:
        """Wait until an expression has a value in the kernel: what a page sends takes its time."""
        for _ in range(50):
            if (found := self.kernel_eval(expression)) == value:
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"{expression} is {found!r} in the kernel, and not {value!r}")

    # -- looking

    def outputs(self, i: int) -> list[dict[str, Any]]:
        """The outputs of a cell, as the notebook would store them."""
        return list(json.loads(self._outputs(i)))

    def output_size(self, i: int) -> int:
        """Their size, in bytes of JSON."""
        return len(self._outputs(i).encode())

    def output_text(self, i: int) -> str:
        """The text that a cell's outputs put into the page, folded parts included."""
        return str(self.page.evaluate("i => inPage.text(i)", i))

    def error(self, i: int) -> str:
        """Name and words of the error that a cell ended with; empty if with none."""
        found = [o for o in self.outputs(i) if o["output_type"] == "error"]
        return f"{found[0]['ename']}: {found[0]['evalue']}" if found else ""

    def output(self, i: int) -> "Locator":
        """A cell's output area, to look for things in it."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(i).locator(".jp-Cell-outputArea")

    def contrasts(self) -> list[dict[str, Any]]:
        """Of every visible piece of text in an output: `cell`, `text`, `tag`, and `ratio`, its contrast (WCAG
        2, 1 to 21) with what is painted behind it.
        """
        return list(self.page.evaluate("() => inPage.contrasts()"))

    def theme(self, name: str) -> None:
        """Change the theme; the fixture changes it back."""
        self._themed = name != LIGHT
        self._command("apputils:change-theme", {"theme": name})
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)
        self.page.wait_for_timeout(300)  # it fades

    def screenshot(self, name: str, height: int = 1600) -> Path:
        """A picture of the page, made as tall as what is to be seen."""
        self.page.set_viewport_size({"width": 1280, "height": height})
        self.page.wait_for_timeout(300)
        path = self.shots / f"{name}.png"
        self.page.screenshot(path=path)
        return path

    # -- widgets

    def click(self, i: int, text: str) -> None:
        """Click the button of a cell's output that says this; else whatever says it."""
        button = self.output(i).get_by_role("button", name=text)
        (button if button.count() else self.output(i).get_by_text(text)).first.click()

    def slide(self, i: int, steps: int, which: int = 0) -> None:
        """Move a slider of a cell's output by the keyboard: right, or left where `steps` is negative."""
        handle = self.output(i).get_by_role("slider").nth(which)
        handle.focus()
        for _ in range(abs(steps)):
            handle.press("ArrowRight" if steps > 0 else "ArrowLeft")

    def fill(self, i: int, text: str, which: int = 0) -> None:
        """Write into a text field of a cell's output."""
        self.output(i).get_by_role("textbox").nth(which).fill(text)

    def expect_text(self, i: int, text: str | re.Pattern[str]) -> None:
        """Wait until a cell's output says this."""
        from playwright.sync_api import expect

        expect(self.output(i)).to_contain_text(text, timeout=20_000)

    def close(self) -> None:
        """Give the theme, the kernel and the tab back; the page stays."""
        self.page.set_viewport_size({"width": 1280, "height": 1600})
        if self._themed:
            self.theme(LIGHT)
        if self.page.url.startswith(self.url):
            self.page.evaluate("() => inPage.close()")
            self._wait_mark("close")

    # -- underneath

    def _outputs(self, i: int) -> str:
        return str(self.page.evaluate("i => inPage.outputs(i)", i))

    def _begin(self, command: str, arguments: dict[str, Any], mark: str) -> None:
        self.page.evaluate(
            "([name, args, mark]) => inPage.command(name, args, mark)", [command, arguments, mark]
        )

    def _wait_mark(self, mark: str) -> None:
        self.page.wait_for_function("mark => inPage.marks[mark] !== 'going'", arg=mark)
        how = self.page.evaluate("mark => inPage.marks[mark]", mark)
        assert how == "done", f"{mark}: {how}"

    def _command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        self._begin(name, arguments or {}, "command")
        self._wait_mark("command")

    def _no_error(self, i: int) -> None:
        assert not (error := self.error(i)), f"cell {i}: {error}"
