"""Names in etcd: who may, over what, and what a watch that cannot be relied on is checked with."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm import name_resolve
from asyncrl.comm.name_resolve import (
    NameBackend,
    NameResolveError,
    NameResolver,
    NameResolveUnavailable,
    Subtree,
    make_resolver,
)
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import write_run_config
from asyncrl.runtime.supervisor import STOP_SIGNAL

from ..etcd_cluster import PASSWORD, USER, EtcdCluster, needs_etcd
from ..leases import LONG_S, renew_often

pytestmark = pytest.mark.etcd

LIMIT_S = 300.0
ROOT = "/asyncrl/a/b"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """An etcd with TLS, client certificates and a login."""
    needs_etcd()
    cluster = EtcdCluster(tmp_path_factory.mktemp("guarded"), tls=True)
    try:
        cluster.start()
        for name, word in (("password", PASSWORD), ("wrong", "guessed")):
            (cluster.folder / name).touch(0o600)
            (cluster.folder / name).write_text(f"{word}\n")
        cluster.switch_authentication_on()
        yield cluster
    finally:
        cluster.kill()


def login(cluster: EtcdCluster, password: str = "password", user: str = USER) -> dict[str, str]:
    return {"user": user, "password_file": str(cluster.folder / password)}


def resolver_at(access: dict[str, str], root: str = ROOT, patience_s: float = LIMIT_S) -> NameResolver:
    return make_resolver("etcd3", root, access=access, patience_s=patience_s)  # type: ignore[arg-type]


def await_that(fact: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    pause = threading.Event()
    deadline = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < deadline
        pause.wait(0.02)


def test_entries_are_found_and_followed_over_tls_with_a_login(guarded: EtcdCluster) -> None:
    with resolver_at(guarded.access(**login(guarded))) as one, resolver_at(guarded.access(**login(guarded))) as other:
        followed = other.follow("w")
        one.add("w/0", "x", lease_s=LONG_S)
        await_that(lambda: followed.entries() == {"w/0": "x"})
        assert other.get("w/0") == "x"
    assert followed.entries() == {"w/0": "x"}, "as it was when it was closed"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"ca_file": "", "certificate_file": "", "key_file": ""}, ["system.etcd.ca_file=''", "speaks TLS"]),
        ({"ca_file": "other.crt"}, ["system.etcd.ca_file=", "other.crt", "certificate of etcd at"]),
        ({"certificate_file": "", "key_file": ""}, ["system.etcd.certificate_file=''", "asks for one"]),
        (
            {"certificate_file": "stranger.crt", "key_file": "stranger.key"},
            ["system.etcd.certificate_file=", "stranger.crt", "refuses it"],
        ),
        ({"ca_file": "client.key"}, ["system.etcd.ca_file=", "holds no certificate in PEM"]),
        ({"key_file": "stranger.key"}, ["system.etcd.key_file=", "not a certificate and its key"]),
        ({"password_file": "wrong"}, ["system.etcd.user='run'", "system.etcd.password_file=", "refuses this user"]),
        ({"user": "", "password_file": ""}, ["system.etcd.user='' may not use these names", "certificate_file"]),
    ],
)
def test_what_is_wrong_is_told_at_once_with_its_setting(
    guarded: EtcdCluster, change: dict[str, str], parts: list[str]
) -> None:
    named = {name: str(guarded.folder / value) if value and name != "user" else value for name, value in change.items()}
    with pytest.raises(NameResolveError) as caught:
        resolver_at(guarded.access(**(login(guarded) | named)), patience_s=3600.0)
    for part in parts:
        assert part in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_names_that_the_user_may_not_use_are_refused_with_the_prefix(guarded: EtcdCluster) -> None:
    with pytest.raises(NameResolveError, match=r"system\.etcd\.user='run'.*prefix /elsewhere/"):
        resolver_at(guarded.access(**login(guarded)), "/elsewhere")


def test_a_login_to_an_etcd_without_and_tls_to_one_without_are_told(etcd_address: str, guarded: EtcdCluster) -> None:
    with pytest.raises(NameResolveError, match=r"system\.etcd\.user='run'.*switched off"):
        resolver_at({"addresses": etcd_address} | login(guarded))
    with pytest.raises(NameResolveError, match=r"system\.etcd\.ca_file=.*speaks no TLS"):
        resolver_at({"addresses": etcd_address} | guarded.files())


def test_an_etcd_that_wants_a_login_says_so(etcd_server: EtcdCluster) -> None:
    etcd_server.switch_authentication_on()
    with pytest.raises(NameResolveError, match=r"system\.etcd\.user=''.*requires a user and a password"):
        resolver_at(etcd_server.access())


def test_after_a_restart_entries_are_followed_on(guarded: EtcdCluster) -> None:
    with resolver_at(guarded.access(**login(guarded))) as one, resolver_at(guarded.access(**login(guarded))) as other:
        followed = one.follow("w")
        guarded.kill()
        guarded.start()
        other.add("w/1", "x", lease_s=LONG_S)
        await_that(lambda: followed.entries() == {"w/1": "x"})


def test_who_is_logged_out_logs_in_again(guarded: EtcdCluster) -> None:
    with resolver_at(guarded.access(**login(guarded))) as one:
        one.add("w/0", "x", lease_s=LONG_S)
        guarded.forget_logins()
        one.add("w/1", "y", lease_s=LONG_S)
        guarded.forget_logins()
        assert one.get_subtree("w") == {"w/0": "x", "w/1": "y"}


def test_a_watch_that_tells_nothing_is_found_out(etcd_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a member that was cut off: no change and no error, for as long as it may last."""
    from asyncrl.hosts import etcd

    monkeypatch.setattr(etcd, "CHECK_S", 0.2)
    access, root = {"addresses": etcd_address}, "/asyncrl/silent"
    with resolver_at(access, root) as one, resolver_at(access, root) as other:
        link = other._link  # type: ignore[attr-defined]

        def silent(ranges: Any, limit_s: float, ended: threading.Event) -> Iterator[Any]:
            ended.wait(limit_s)
            yield from ()

        monkeypatch.setattr(link, "changes", silent)
        followed = other.follow("w")
        one.add("w/0", "a")
        await_that(lambda: followed.entries() == {"w/0": "a"})
        one.add("w/0", "b", replace=True)
        await_that(lambda: followed.entries() == {"w/0": "b"})
        one.delete("w/0")
        await_that(lambda: followed.entries() == {})


def test_history_that_was_compacted_away_is_read_anew(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_resolve, "GRACE_S", 0.5)
    from asyncrl.hosts import etcd

    monkeypatch.setattr(etcd, "CHECK_S", 3600.0)
    with resolver_at(etcd_server.access()) as one, resolver_at(etcd_server.access()) as other:
        one.add("w/0", "a")
        link = other._link  # type: ignore[attr-defined]
        changes = link.changes
        starts: list[int] = []

        def late(ranges: Any, limit_s: float, ended: threading.Event) -> Iterator[Any]:
            """Between the reading and the watch others change everything, and etcd forgets how."""
            starts.append(ranges[0][-1])
            if len(starts) == 1:
                one.add("w/0", "b", replace=True)
                one.add("w/1", "c")
                etcd_server.compact()
            yield from changes(ranges, limit_s, ended)

        monkeypatch.setattr(link, "changes", late)
        followed = other.follow("w")
        await_that(lambda: followed.entries() == {"w/0": "b", "w/1": "c"})
        one.delete("w/0")
        await_that(lambda: followed.entries() == {"w/1": "c"})
        assert min(starts[1:]) > starts[0] + 1, "from what was read anew on"


def test_leases_that_ran_out_in_an_outage_are_made_anew_and_nobody_sees_a_gap(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of w/0 comes to renew only once its entry is gone; that of w/1 never does. The reader's time stands
    still until w/0 is back, and then the grace is over.
    """
    access = etcd_server.access()
    with resolver_at(access) as owner, resolver_at(access) as dies, resolver_at(access) as reader:
        owner.add("w/0", "x", lease_s=2.0)
        dies.add("w/1", "x", lease_s=2.0)
        reader.add("mine", "x", lease_s=2.0)
        followed, now = reader.follow("w"), time.monotonic()
        followed._clock = lambda: now
        dies._stop_renewing()
        may_renew = threading.Event()
        renew = owner._renew_all

        def renew_later() -> None:
            may_renew.wait(LIMIT_S)
            renew()

        seen: list[bool] = []

        def noting(change: Callable[..., None]) -> Callable[..., None]:
            def changed(*reported: Any, **how: Any) -> None:
                change(*reported, **how)
                seen.append("w/0" in followed.entries())

            return changed

        owner._renew_all = renew_later  # type: ignore[method-assign]
        monkeypatch.setattr(followed, "replace", noting(followed.replace))
        etcd_server.pause()
        threading.Event().wait(4.0)  # twice a lease
        etcd_server.resume()
        await_that(lambda: not dies.get_subtree("w"))  # which asks etcd, and follows nothing
        await_that(lambda: not followed._present)
        assert set(followed.entries()) == {"w/0", "w/1"}
        may_renew.set()
        await_that(lambda: followed._present == {"w/0": "x"})
        now += name_resolve.GRACE_S
        assert followed.entries() == {"w/0": "x"}
        assert len(seen) > 0
        assert all(seen)
        await_that(lambda: dies.get_subtree("w") == {"w/0": "x"})


def test_entries_of_a_process_are_renewed_together_and_idle_followers_ask_for_nothing(
    etcd_server: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the lease, and its keys. So 16 processes with three entries ask as 4 with twelve."""
    renew_often(monkeypatch)
    from asyncrl.hosts import etcd

    monkeypatch.setattr(etcd, "CHECK_S", 3600.0)
    access = etcd_server.access()
    resolvers = [resolver_at(access) for _ in range(16)]
    try:
        followed: list[Subtree] = []
        for index, resolver in enumerate(resolvers):
            for kind in ("status", "workers", "pushers"):
                resolver.add(f"{kind}/{index}", "x", lease_s=LONG_S)
            followed += [resolver.follow("pushers"), resolver.follow("pullers")]
        await_that(lambda: all(len(each.entries()) == 16 for each in followed[::2]))
        await_that(lambda: not etcd_server.requests()["Watch"] < 2 * len(resolvers))  # two roots in one stream
        began, before = time.monotonic(), etcd_server.requests()
        await_that(lambda: (etcd_server.requests() - before)["LeaseTimeToLive"] > 10 * len(resolvers))
        asked, lasted = etcd_server.requests() - before, time.monotonic() - began
    finally:
        for resolver in resolvers:
            resolver.close()
    renewals = (lasted * name_resolve.RENEWALS_PER_LEASE / LONG_S + 1) * len(resolvers)
    others = asked.total() - asked["LeaseKeepAlive"] - asked["LeaseTimeToLive"]
    assert asked["LeaseKeepAlive"] < 1.5 * renewals, asked
    assert asked["LeaseTimeToLive"] < 1.5 * renewals, asked
    assert others < lasted * len(resolvers) / 2, f"{asked}: none, but where a call failed"


def test_an_entry_that_was_deleted_or_taken_is_not_renewed_and_its_neighbours_are(
    etcd_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_often(monkeypatch)
    access, root = {"addresses": etcd_address}, f"/asyncrl/{tmp_path.name}"
    with resolver_at(access, root) as owner, resolver_at(access, root) as other:
        for name in ("kept", "deleted", "taken"):
            owner.add(name, "mine", lease_s=LONG_S)
        other.delete("deleted")
        other.add("taken", "theirs", replace=True)
        await_that(lambda: list(owner._leased) == ["kept"])
        assert other.get_subtree() == {"kept": "mine", "taken": "theirs"}
        owner.close()
        assert other.get_subtree() == {"taken": "theirs"}


def test_who_replaces_its_own_entry_beside_a_renewal_has_not_lost_it(
    etcd_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease has run out in an outage; the status is written anew, under another one, while it is being renewed."""
    renew_often(monkeypatch)
    with resolver_at({"addresses": etcd_address}, f"/asyncrl/{tmp_path.name}") as owner:
        lost: list[str] = []
        owner.on_lost, owner.fences = lost.append, {"incarnation": "1"}
        owner.add("status", "a", lease_s=LONG_S)
        is_alive, renewed = owner._is_alive, list[bool]()  # type: ignore[attr-defined]

        def replaced_meanwhile(lease: Any) -> bool:
            if not renewed:
                owner._lapsed(lease)  # type: ignore[attr-defined]
                owner.add("status", "b", lease_s=LONG_S, replace=True)
                lease.names, lease.looked_at = frozenset(), math.inf
            renewed.append(not renewed or is_alive(lease))
            return renewed[-1]

        owner._is_alive = replaced_meanwhile  # type: ignore[attr-defined]
        await_that(lambda: len(renewed) >= 3)
        assert lost == []
        assert owner.get_subtree() == {"status": "b"}


def test_a_withdrawal_that_etcd_did_not_answer_is_made_again(
    etcd_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access, root = {"addresses": etcd_address}, f"/asyncrl/{tmp_path.name}"
    with resolver_at(access, root) as owner:
        owner.add("server/0", "url", lease_s=60.0)
        transact, answered = owner._transact, iter([False])  # type: ignore[attr-defined]

        def away_at_first(*request: Any) -> Any:
            if not next(answered, True):
                raise NameResolveUnavailable("no answer")
            return transact(*request)

        monkeypatch.setattr(owner, "_transact", away_at_first)
        assert owner.delete("server/0", own=True)
        assert owner.get_subtree() == {}
        assert not owner.delete("server/0", own=True)


WAITS = """
import sys
from pathlib import Path
from asyncrl.runtime.process.worker import Worker, WorkerSpec

class Waits(Worker):
    def run(self):
        self.ready()
        print("ready", flush=True)
        self.stop_requested.wait()

sys.exit(Waits(WorkerSpec("waits", 3, Path(sys.argv[1]))).start())
"""


def test_a_process_that_is_asked_to_stop_ends_as_it_should_while_etcd_is_silent(tmp_path: Path) -> None:
    needs_etcd()
    cluster = EtcdCluster(tmp_path / "etcd")
    try:
        cluster.start()
        config = ExperimentConfig()
        config.system.encrypt, config.system.name_resolve = False, NameBackend.etcd3
        config.system.name_resolve_root = cluster.address
        write_run_config(config, tmp_path)
        command = [sys.executable, "-c", WAITS, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
            try:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "ready\n"
                cluster.pause()
                worker.send_signal(STOP_SIGNAL)
                _, log = worker.communicate(timeout=LIMIT_S)
            finally:
                worker.kill()
    finally:
        cluster.kill()
    assert worker.returncode == 0, log
    assert "waits/3 ends as done, which could not be published" in log
