"""One JupyterLab on this machine, with directories of its own, and the flags Chromium is started with."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--headless",
]

# A "Jupyter news?" pop-up would cover the page, and autosave would write under a test.
OVERRIDES = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}


def chromium() -> str | None:
    """Where the system's Chromium is; `None` where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def missing() -> str | None:
    """What has to be installed before the browser tests can run, as a sentence; `None` if nothing."""
    packages = [name for name in ("jupyterlab", "playwright") if find_spec(name) is None]
    if packages:
        return f"browser tests need packages that are not here: pip install {' '.join(packages)}"
    if chromium() is None:
        return "browser tests need Chromium, which is not here: apt-get install chromium"
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(folder: Path) -> dict[str, str]:
    """Nothing of the user's settings is read or written."""
    own = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "run",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    return os.environ | {name: str(folder / place) for name, place in own.items()}


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Path]]:
    """Give the address of a JupyterLab and the folder of its notebooks; its kernels end with it."""
    notebooks, settings = folder / "notebooks", folder / "config" / "labconfig"
    notebooks.mkdir()
    settings.mkdir(parents=True)
    (settings / "default_setting_overrides.json").write_text(json.dumps(OVERRIDES))
    port = _free_port()
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
        *("--IdentityProvider.token=", f"--ServerApp.root_dir={notebooks}"),
        *("--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly"),
        *("--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"),
    ]
    url = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=_environment(folder), stdout=log, stderr=log)
        try:
            _wait(url, process, folder / "server.log")
            yield url, notebooks
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/api/status", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab does not answer:\n{log.read_text()[-2000:]}")
