"""The connection to etcd."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.comm.name_resolve import NameResolveUnavailable
from asyncrl.hosts.etcd import EtcdLink
from asyncrl.hosts.etcd_access import EtcdAccess


def test_a_password_that_cannot_be_read_now_is_read_again_by_the_next_call(tmp_path: Path) -> None:
    absent = tmp_path / "password"
    link = EtcdLink(EtcdAccess(("127.0.0.1:1",), user="me", password_file=str(absent)), "/names/")
    with pytest.raises(NameResolveUnavailable, match="password"):
        link.call(lambda stubs: None)
    link.close()
