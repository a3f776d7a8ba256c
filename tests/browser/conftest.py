"""One JupyterLab for all browser tests, and a page with a notebook for each."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.server import FLAGS, chromium, missing, served

if TYPE_CHECKING:
    from tests.browser.lab import Lab


@pytest.fixture(scope="session")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a JupyterLab, and the folder of its notebooks."""
    if (why := missing()) is not None:
        pytest.skip(why)
    with served(tmp_path_factory.mktemp("jupyter")) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; of a module, since it keeps an event loop in this thread while it is there."""
    if (why := missing()) is not None:
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        found = player.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def page(browser: Any, jupyter: tuple[str, Path]) -> Iterator[Callable[[], "Lab"]]:
    """Makes pages; loading JupyterLab takes seconds, so that the tests of a module share one."""
    from tests.browser.lab import Lab

    contexts: list[Any] = []

    def make() -> Lab:
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 1600}))
        contexts[-1].set_default_timeout(60_000)
        return Lab(contexts[-1], *jupyter)

    yield make
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def shared(page: Callable[[], "Lab"]) -> "Lab":
    """The page of a module."""
    return page()


@contextmanager
def in_use(lab: "Lab", tmp_path: Path) -> Iterator["Lab"]:
    """A page for one test, which fails if anything happened on it that must not."""
    lab.shots = Path(os.environ.get("INTERLENS_SHOTS") or tmp_path)
    lab.shots.mkdir(parents=True, exist_ok=True)
    lab.noise.clear()
    try:
        yield lab
    finally:
        lab.close()
        noise = "\n  ".join(lab.noise)
    assert not noise, "on the page:\n  " + noise


@pytest.fixture
def lab(shared: "Lab", tmp_path: Path) -> Iterator["Lab"]:
    """A page of JupyterLab."""
    with in_use(shared, tmp_path) as found:
        yield found


@pytest.fixture
def second(page: Callable[[], "Lab"], tmp_path: Path) -> Iterator["Lab"]:
    """Another page, beside the first."""
    with in_use(page(), tmp_path) as found:
        yield found
