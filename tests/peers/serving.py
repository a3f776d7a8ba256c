"""A thread of its own that serves an application on this machine."""

import socket
import threading
import time

import uvicorn
from starlette.types import ASGIApp

PATIENCE = 10.0
"""Seconds within which a server starts or stops."""


class Served:
    """Serve an application from a daemon thread; a stopped one starts again on the port it had."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self.app, self.host, self.port = app, host, port
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen; connections are taken from here on."""
        # The protocol is named because asyncio sends without delay only where it is: 40 ms a call otherwise.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((self.host, self.port))
        listening.listen(1024)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            self.app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=60,
        )
        self._server = uvicorn.Server(config)
        arguments = {"sockets": [listening]}
        self._thread = threading.Thread(target=self._server.run, kwargs=arguments, name="peer", daemon=True)
        self._thread.start()
        end = time.monotonic() + PATIENCE
        while not self._server.started:
            assert self._thread.is_alive(), "the peer's server ended while it started"
            assert time.monotonic() < end, "the peer's server does not start"
            time.sleep(0.002)

    def stop(self) -> None:
        """Close all connections and stop listening; calls that are still being answered are given up."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the peer's server does not stop"
        self._server = self._thread = None
