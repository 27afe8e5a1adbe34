"""Databases that travel: what is pushed is pulled, what is changed on the way or not certified is refused."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from database_samples import GPU, HOST, entry, store

from autotune.cli.commands import main
from autotune.database.entry import Entry
from autotune.database.maintenance import INDEX, file_name, pull, push
from autotune.database.store import read_table
from autotune.errors import DatabaseError
from kernelgen.kernels.product.schedule import CudaSchedule

CERTIFICATE = {"bitwise": True, "equivariance": 2e-7, "edges": 8192, "environment": "8f640bc6f817b1fd"}
SLUG = GPU.slug


def certified(schedule: Any = None, **changes: Any) -> Entry:
    return entry(schedule or CudaSchedule(), **{"certificate": CERTIFICATE, **changes})


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    store(tmp_path / "mine", GPU, certified(), certified(direction="backward"))
    return tmp_path / "mine"


@pytest.fixture
def shared(mine: Path, tmp_path: Path) -> Path:
    push(mine, SLUG, str(tmp_path / "shared"))
    return tmp_path / "shared"


def identities(results: Path) -> set[Any]:
    return set(read_table(results / f"{SLUG}.json").by_identity)


def test_what_is_pushed_is_pulled_with_its_hash(mine: Path, shared: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in shared.iterdir()}
    target, digest, merged = pull(str(shared), SLUG, tmp_path / "yours")
    assert target == tmp_path / "yours" / f"{SLUG}.json" and all(item.taken for item in merged)
    assert read_table(target).by_identity == read_table(mine / f"{SLUG}.json").by_identity
    assert hashlib.sha256((shared / file_name(SLUG, digest)).read_bytes()).hexdigest() == digest
    assert before == {path: path.read_bytes() for path in shared.iterdir()}, "a pull only reads"
    again = pull(str(shared), SLUG, tmp_path / "yours", pin=digest)[2]
    assert [item.reason for item in again] == ["the same as here"] * 2


def test_pushes_join_and_a_pin_stays_good(shared: Path, tmp_path: Path) -> None:
    old = json.loads((shared / INDEX).read_text())["files"][SLUG]["sha256"]
    better = certified(date="2026-11-22T12:00:00+00:00", time_us=900.0)
    exact = {"tolerance": 1e-10, "errors": {"g": 1e-15}, "certificate": CERTIFICATE | {"equivariance": 1e-15}}
    store(tmp_path / "theirs", GPU, better, certified(dtype="float64", **exact))
    _, new, merged = push(tmp_path / "theirs", SLUG, str(shared))
    assert len(merged) == 2 and all(item.taken for item in merged)
    pull(str(shared), SLUG, tmp_path / "new")
    pull(str(shared), SLUG, tmp_path / "old", pin=old)
    assert new != old and (len(identities(tmp_path / "new")), len(identities(tmp_path / "old"))) == (3, 2)
    assert read_table(tmp_path / "new" / f"{SLUG}.json").by_identity[better.identity].time_us == 900.0
    assert push(tmp_path / "theirs", SLUG, str(shared), ["small"])[1] == new, "the same again is the same file"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (entry(CudaSchedule()), "no certificate"),
        (certified(checked={"state": "wrong", "reason": "x", "date": "now"}), "failed its last check"),
        (certified(CudaSchedule(path_groups=50)), "cannot be launched on NVIDIA Test"),
    ],
    ids=["uncertified", "failed", "illegal"],
)
def test_entries_are_refused_with_a_reason(bad: Entry, reason: str, tmp_path: Path) -> None:
    store(tmp_path / "theirs", GPU, bad, certified(direction="backward"))
    _, _, pushed = push(tmp_path / "theirs", SLUG, str(tmp_path / "shared"))
    assert [(item.entry.direction, item.taken) for item in pushed] == [("backward", True), ("forward", False)]
    assert reason in pushed[1].reason
    # A stranger's folder that took it all the same.
    text = (tmp_path / "theirs" / f"{SLUG}.json").read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    (tmp_path / "shared" / file_name(SLUG, digest)).write_bytes(text)
    pulled = pull(str(tmp_path / "shared"), SLUG, tmp_path / "yours", pin=digest)[2]
    assert [item.taken for item in pulled] == [True, False] and reason in pulled[1].reason
    assert {identity[2] for identity in identities(tmp_path / "yours")} == {"backward"}


def test_what_was_changed_on_the_way_changes_nothing_here(shared: Path, tmp_path: Path) -> None:
    def refused(match: str, slug: str = SLUG, source: str = str(shared), pin: str | None = None) -> None:
        with pytest.raises(DatabaseError, match=match):
            pull(source, slug, tmp_path / "yours", pin)
        assert not (tmp_path / "yours").exists()

    digest = json.loads((shared / INDEX).read_text())["files"][SLUG]["sha256"]
    refused("expected a SHA-256", pin="../../etc/passwd")
    refused(f"has no {SLUG}.0000", pin="0" * 64)
    refused("has nothing of nvidia-b200", slug="nvidia-b200")
    refused("not a plain name", slug="../escape")
    refused("begins with https://", source="http://127.0.0.1/equitune")
    refused("has no index.json", source=str(tmp_path / "nowhere"))
    file = shared / file_name(SLUG, digest)
    text = file.read_bytes()
    file.write_bytes(text.replace(b'"time_us":1500.0', b'"time_us":1.0'))
    refused("has the SHA-256")
    other = text.replace(SLUG.encode(), b"nvidia-other")
    (shared / file_name(SLUG, other_digest := hashlib.sha256(other).hexdigest())).write_bytes(other)
    refused("is of the device 'nvidia-other'", pin=other_digest)
    for index in ("no json", "[]", '{"equitune": 2, "files": {}}', '{"equitune": 1, "files": {"a/b": {"sha256": 3}}}'):
        (shared / INDEX).write_text(index)
        refused("not that of a shared database")


def test_a_push_needs_entries_and_a_folder(mine: Path, tmp_path: Path) -> None:
    for folder, slug, labels, match in (
        ("https://example.org/x", SLUG, (), "is not written to"),
        (str(tmp_path / "shared"), HOST.slug, (), "has no entries"),
        (str(tmp_path / "shared"), SLUG, ("other",), "has no entries"),
        (str(mine / f"{SLUG}.json"), SLUG, (), "cannot be written"),
    ):
        with pytest.raises(DatabaseError, match=match):
            push(mine, slug, folder, labels)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], mine: Path, shared: Path) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["db", *words, "--results", str(tmp_path / "yours")])
        return int(str(end.value.code)), *capsys.readouterr()

    code, out, _ = run("pull", str(shared), "--of", SLUG)
    assert code == 0 and "2 taken" in out and "--sha256" in out
    code, _, error = run("push", str(tmp_path / "other"), "--device", "cpu")
    assert code == 2 and "has no entries" in error


@pytest.fixture
def served(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The shared folder over HTTPS, with a certificate that this process trusts."""
    program = shutil.which("openssl") or pytest.skip("no openssl, which makes the server's certificate")
    pem = tmp_path / "server.pem"
    made = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", f"{pem}.key", "-out", str(pem)]
    subprocess.run(made, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            if self.path.startswith("/moved/"):
                self.send_response(302)
                self.send_header("Location", "http://localhost/index.json")
                self.end_headers()
            else:
                super().do_GET()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(shared)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, f"{pem}.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_over_https(served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(item.taken for item in pull(served + "/", SLUG, tmp_path / "yours")[2])
    with pytest.raises(DatabaseError, match="redirects to http://"):
        pull(f"{served}/moved", SLUG, tmp_path / "other")
    with pytest.raises(DatabaseError, match="cannot be fetched"):
        pull(f"{served}/nothing", SLUG, tmp_path / "other")
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(DatabaseError, match="certificate verify failed"):
        pull(served, SLUG, tmp_path / "other")
    assert not (tmp_path / "other").exists()
