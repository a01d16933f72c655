"""nginx as a child process, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import httpx

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
START_TIMEOUT_S = 20.0

MAIN = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {http}
}}
"""


class Nginx:
    """One nginx process, in a folder of its own.

    Args:
        folder: made by this.
        http: what its `http` block says.
        url: answered by it, once it has started.
    """

    def __init__(self, folder: Path, http: str, url: str) -> None:
        assert NGINX is not None
        folder.mkdir()
        file, self.log = folder / "nginx.conf", folder / "error.log"
        file.write_text(MAIN.format(folder=folder, http=http))
        self.process = subprocess.Popen(
            [NGINX, "-c", str(file), "-p", str(folder), "-e", str(self.log)]
        )
        try:
            self._wait(url)
        except BaseException:
            self.stop()
            raise

    def _wait(self, url: str) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                httpx.get(url, timeout=5)
                return
            except httpx.TransportError:
                ended = self.process.poll() is not None or time.monotonic() > end
                assert not ended, self.log.read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        """End it; safe to call again."""
        self.process.kill()
        self.process.wait()
