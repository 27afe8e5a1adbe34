"""A PostgreSQL server for one test, in a temporary folder, that can be killed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path


def server_programs() -> Path | None:
    """The folder of ``postgres`` and ``initdb``, which Debian does not put on the path."""
    found = shutil.which("postgres")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


class Postgres:
    """A server as a context manager. It refuses to run as root, so root runs it as another user."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="equitune-pg-"))
        self._user: dict[str, str] = {}
        if os.geteuid() == 0:
            self._user = {"user": "postgres"}
            shutil.chown(self._folder, "postgres")
        self._data, self._process = self._folder / "data", None
        self.url = f"postgresql+psycopg://equitune@/postgres?host={self._folder}"

    def __enter__(self) -> Postgres:
        command = ["initdb", "-D", str(self._data), "-A", "trust", "-U", "equitune", "--no-sync"]
        self._run(command)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start and wait until it answers. The children of a killed server must end before another can start."""
        command = [str(self._programs / "postgres"), "-D", str(self._data), "-k", str(self._folder)]
        while True:
            with open(self._folder / "log", "ab") as log:
                self._process = subprocess.Popen(
                    [*command, "-c", "listen_addresses="], cwd=self._folder, stdout=log, stderr=log, **self._user
                )
            while self._process.poll() is None:
                ready = [str(self._programs / "pg_isready"), "-q", "-h", str(self._folder)]
                if subprocess.run(ready).returncode == 0:
                    return
                time.sleep(0.1)
            time.sleep(0.2)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            [str(self._programs / command[0]), *command[1:]],
            cwd=self._folder, capture_output=True, text=True, **self._user,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
