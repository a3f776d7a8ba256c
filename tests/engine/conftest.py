"""One thread, so that the figures of a test do not depend on the machine's number of cores."""

from collections.abc import Iterator

import pytest
import torch

from tests.engine.driving import WITH_KERNEL


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by plain torch, as on a machine without a compiler."""
    for module in WITH_KERNEL:
        monkeypatch.setattr(f"interlens.engine.{module}.kernel_for", lambda *given: None)


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
