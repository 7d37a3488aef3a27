from __future__ import annotations

import os
import ssl
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.comm.security import RunSecret, SecretError


def test_the_secret_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        RunSecret.create(tmp_path / "run" / "secret")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "run" / "secret").stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "run") == ["secret"]


def test_every_process_derives_the_same_keys(tmp_path: Path) -> None:
    one, other = RunSecret.create(tmp_path / "secret"), RunSecret.load(tmp_path / "secret")
    assert one.token == other.token
    assert one.sockets() == other.sockets()


def test_runs_and_purposes_have_keys_of_their_own() -> None:
    one, other = RunSecret(b"a" * 32), RunSecret(b"b" * 32)
    keys = [one.sockets().server_secret, one.sockets().client_secret, other.sockets().server_secret]
    assert len({*keys, one.token.encode(), other.token.encode()}) == 5


def test_the_certificate_lies_with_the_secret_and_is_the_runs_own(tmp_path: Path) -> None:
    made = RunSecret.create(tmp_path / "secret").http(adopted=["http://a:1/"])
    loaded = RunSecret.load(tmp_path / "secret").http(adopted=["http://a:1"])
    assert loaded == made
    assert made.certificate != RunSecret.create(tmp_path / "other").http().certificate
    assert "PRIVATE" not in made.certificate
    assert made.token not in repr(made)
    assert made.server_context().minimum_version == ssl.TLSVersion.TLSv1_3
    assert made.client_context().cert_store_stats()["x509"] == 1  # and none of the machine's authorities
    urls = ["http://a:1", "http://a:1/generate", "http://a:12", "http://a:1.evil"]
    assert [made.is_adopted(url) for url in urls] == [True, True, False, False]


def test_a_secret_without_a_certificate_serves_no_http(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("ab" * 32)
    (tmp_path / "secret").chmod(0o600)
    with pytest.raises(SecretError, match="has no certificate: delete it"):
        RunSecret.load(tmp_path / "secret").http()


def test_of_many_creators_one_wins_and_its_secret_can_be_loaded(tmp_path: Path) -> None:
    def create(path: Path) -> str | None:
        try:
            return RunSecret.create(path).token
        except FileExistsError:
            assert RunSecret.load(path).token
            return None

    with ThreadPoolExecutor(8) as pool:
        created = [token for token in pool.map(create, [tmp_path / "secret"] * 16) if token is not None]
    assert created == [RunSecret.load(tmp_path / "secret").token]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_a_secret_that_others_can_read_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    RunSecret.create(tmp_path / "secret")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(SecretError, match=f"{mode:04o}.*delete it"):
        RunSecret.load(tmp_path / "secret")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_somebody_elses_secret_is_refused(tmp_path: Path) -> None:
    RunSecret.create(tmp_path / "secret")
    os.chown(tmp_path / "secret", 12345, -1)
    with pytest.raises(SecretError, match="belongs to user 12345"):
        RunSecret.load(tmp_path / "secret")


@pytest.mark.parametrize("content", ["", "zz", "ab" * 31, "ab" * 33])
def test_a_damaged_secret_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(SecretError, match="damaged"):
        RunSecret.load(path)


def test_missing_and_linked_secrets_are_refused(tmp_path: Path) -> None:
    RunSecret.create(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    for name in ("missing", "link"):
        with pytest.raises(SecretError, match="cannot be read"):
            RunSecret.load(tmp_path / name)


def test_the_secret_does_not_show_in_logs() -> None:
    secret = RunSecret(b"a" * 32)
    assert "a" * 8 not in f"{secret!r} {secret}"
    with pytest.raises(ValueError, match="expected 32"):
        RunSecret(b"short")
