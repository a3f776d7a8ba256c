"""What holds for every test: no hub, no network, and no hook left behind on a model."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tiny models: a second thread only waits, and spins beside a busy machine

import ipaddress
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _refuse_outside(sock: socket.socket, address: Any) -> None:
    if sock.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(str(address[0])):
        sock.close()
        raise AssertionError(
            f"a test tried to connect to {address[0]}:{address[1]}: tests reach this machine only; "
            "answer the request with a fake server on 127.0.0.1 or with ScriptedBackend"
        )


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Refuse every connection that would leave this machine."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def guarded_connect(self: socket.socket, address: Any) -> None:
        _refuse_outside(self, address)
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        _refuse_outside(self, address)
        return connect_ex(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
        yield


def _not_theirs(module: Any, kind: str) -> list[Any]:
    """The hooks that transformers did not put there: its output recorders stay on a model by design."""
    hooks = getattr(module, kind, {}).values()
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]


def _hooks() -> list[str]:
    """Every hook that is registered now, in words; nothing is imported to find out."""
    torch_module = sys.modules.get("torch.nn.modules.module")
    if torch_module is None:
        return []
    found = [
        f"torch-wide {kind}: {hook!r}"
        for kind in GLOBAL_HOOKS
        for hook in getattr(torch_module, kind).values()
    ]
    backend = sys.modules.get("interlens.backends.huggingface")
    for root in getattr(backend, "resident_modules", tuple)():
        for path, module in root.named_modules():
            for kind in MODULE_HOOKS:
                found += [f"{path or 'the model'}.{kind}: {hook!r}" for hook in _not_theirs(module, kind)]
    return found


@pytest.fixture(autouse=True)
def no_hooks_left() -> Iterator[None]:
    """Fail a test after which a hook that it registered is still there, torch-wide or on a resident model."""
    before = set(_hooks())
    yield
    left = [hook for hook in _hooks() if hook not in before]
    assert not left, "hooks left after the test:\n  " + "\n  ".join(left)
