"""Processes forked from a server that has imported torch: as good as spawned ones, in their caller's environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_facts import Facts

from autotune.errors import WorkerError
from autotune.measure import worker as fork_server
from autotune.measure.worker import Worker

PATIENCE_S = 300.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(Facts()) as made:
        yield made


def ask(worker: Worker, question: str) -> Any:
    return worker.ask(PATIENCE_S, getattr(Facts, question))


def test_it_has_the_callers_environment_folder_and_output(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the moment when it starts: the server may be older."""
    with Worker(Facts()) as earlier:
        _, server = ask(earlier, "surroundings")[0], ask(earlier, "server")[0]
    capfd.readouterr()
    monkeypatch.setenv("EQUITUNE_SAMPLE", "set later")
    monkeypatch.delenv("EQUITUNE_MISSES", raising=False)
    monkeypatch.chdir(tmp_path)
    environment, folder = ask(worker, "surroundings")
    assert environment == dict(os.environ) and folder == str(tmp_path)
    assert capfd.readouterr().out == "said by the process\n"
    assert ask(worker, "server")[0] == server


def test_its_kernels_and_torch_use_threads(worker: Worker) -> None:
    assert ask(worker, "sum_on_threads") == (2, False, float(1 << 20))


def test_variables_that_are_read_while_importing_need_another_server(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the earlier server serves its processes until they end."""
    monkeypatch.setattr(fork_server, "PRELOADED", ())
    monkeypatch.setattr(fork_server, "_servers", fork_server._Servers())
    server, _ = ask(worker, "server")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with Worker(Facts()) as other:
        assert ask(other, "server")[1] == "7" and ask(other, "server")[0] != server
        assert ask(worker, "server")[0] == server
    worker.close()
    os.waitpid(server, 0)


def test_a_server_that_cannot_import_is_an_error(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ends_its_process.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(fork_server, "PRELOADED", ("ends_its_process",))
    monkeypatch.setattr(fork_server, "_servers", fork_server._Servers())
    with pytest.raises(WorkerError, match="ended while it imported ends_its_process"):
        ask(worker, "server")


def test_ctrl_c_does_not_end_a_server_that_imports(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But it may end what is forked from it."""
    (tmp_path / "interrupted.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(fork_server, "PRELOADED", ("interrupted",))
    monkeypatch.setattr(fork_server, "_servers", fork_server._Servers())
    assert ask(worker, "blocked_signals") == []


@pytest.mark.gpu
def test_the_server_never_touches_the_device(worker: Worker) -> None:
    """While this process and the new one do."""
    assert Facts().use_the_device() == ask(worker, "use_the_device") == 3
    server = ask(worker, "server")[0]
    opened = [os.readlink(path) for path in Path(f"/proc/{server}/fd").iterdir()]
    assert opened and not [path for path in opened if path.startswith("/dev/nvidia")]
