"""Waits of a process group's members: their ends, their delay, and their requests to the store."""

import multiprocessing
import os
import re
import secrets
import signal
import statistics
import threading
import time
from collections import Counter

import psutil
import pytest
import torch
import torch.distributed as dist

from epfsdp2.rollout.remote.process_group import Members, SyncGroup
from epfsdp2.rollout.remote.signed_store import SignedStore, connect_store, serve_store
from epfsdp2.rollout.transport.watched_sockets import CHECK_SECONDS, WeightSyncError, wait_for_work
from tests.support import ranks  # noqa: F401 (the server that forks processes has imported torch)

SECONDS = 3.0
MEMBERS = Members(2, 3)


def _blocks(*args, **kwargs):
    threading.Event().wait()


def _is_killed(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def _member(rank, port, token, first, errors):
    """A process that joins the group; ``first`` replaces its first collective."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if first is not None:
        dist.all_to_all_single = first
    started, error = time.monotonic(), None
    try:
        SyncGroup(SignedStore(connect_store("127.0.0.1", port, SECONDS), token), rank, MEMBERS, "cpu", SECONDS)
    except WeightSyncError as raised:
        error = str(raised)
    seconds = time.monotonic() - started
    errors.put((rank, error, seconds, [t.name for t in threading.enumerate() if t.name == "weight sync"]))


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("is killed", "another rank is gone: killed or unreachable|one was killed or hangs since then"),
        ("hangs", "all members came to the group's set-up, which did not end within 3 s: one was killed or hangs"),
    ],
)
def test_group_of_processes_of_which_one_does_not_end_its_set_up_raises_in_time_on_the_others(case, cause):
    served, token = serve_store("127.0.0.1", SECONDS), secrets.token_hex(32)
    context = multiprocessing.get_context("forkserver")
    errors, first = context.SimpleQueue(), {"is killed": _is_killed, "hangs": _blocks}
    firsts = [None, None, first[case]]
    processes = [
        context.Process(target=_member, args=(rank, served.port, token, firsts[rank], errors)) for rank in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert not any(psutil.pid_exists(process.pid) for process in processes), "a thread that hangs keeps no process"
    found = {}
    while not errors.empty():
        rank, error, seconds, threads = errors.get()
        found[rank] = error
        assert seconds < SECONDS + 3
        # No thread is in a native call, which aborts the process if it returns at interpreter exit.
        assert not threads or case == "is killed" or rank == 2
    assert {0, 1} <= found.keys()
    for rank in (0, 1):
        assert re.search(cause, found[rank] or "joined"), found


def test_broadcast_group_to_which_a_member_never_comes_raises_on_the_others(together):
    members, each = together
    for member in members:
        member.timeout_seconds = 0.5

    def part(group):
        if group.rank != 2:
            return None
        with pytest.raises(WeightSyncError) as caught, group.abort_on_error():
            group.broadcast(torch.zeros(1))
        return str(caught.value)

    errors = each(part, members)
    assert "trainer rank 0 did not come to the group's set-up within 0.5 s" in errors[2]
    assert members[2].failed and members[2].process_group is None
    with pytest.raises(WeightSyncError, match="trainer rank 0 did not come"), members[0].abort_on_error():
        members[0].broadcast(torch.zeros(1))


class _Counted:
    """A store that counts its requests."""

    def __init__(self, store, requests):
        self._store, self._requests = store, requests

    def __getattr__(self, name):
        self._requests[name] += 1
        return getattr(self._store, name)


def _count(group):
    requests = Counter()
    group._store = _Counted(group._store, requests)
    group._blocking_store = _Counted(group._blocking_store, requests)
    return requests


class _Pending:
    """Work that ends at ``end``."""

    ended = None

    def end(self):
        self.ended = time.perf_counter()

    def is_completed(self):
        return self.ended is not None

    def wait(self):
        return True


def test_waits_ask_the_store_some_times_a_second(together):
    (first, second, _), _ = together
    requests, waited = _count(first), 2.5 * CHECK_SECONDS
    work = _Pending()
    timer = threading.Timer(waited, work.end)
    timer.start()
    first.finish(work)
    assert 1 <= requests.total() <= waited / CHECK_SECONDS, requests

    first.begin_sync(), second.begin_sync()
    requests.clear()
    timer = threading.Timer(waited, second.publish, ("a", 1))
    timer.start()
    assert first.wait_for("a") == 1
    assert requests["wait"] == 1 and requests.total() <= 3 + waited / CHECK_SECONDS, requests

    requests.clear()
    assert first.wait_for("a") == 1
    assert requests == {"check": 1, "get": 1}, "a published message needs no wait"


def test_end_of_work_and_of_a_wait_is_seen_within_two_milliseconds(together):
    (first, second, _), _ = together
    of_work, of_messages = [], []
    for _ in range(15):
        work = _Pending()
        threading.Timer(0.03, work.end).start()
        wait_for_work(work, SECONDS)
        of_work.append(time.perf_counter() - work.ended)

        first.begin_sync(), second.begin_sync()
        sent = []
        timer = threading.Timer(0.03, lambda sent=sent: (second.publish("a", 1), sent.append(time.perf_counter())))
        timer.start()
        first.wait_for("a")
        seen = time.perf_counter()
        timer.join()
        of_messages.append(seen - sent[0])
    assert statistics.median(of_work) < 2e-3 and statistics.median(of_messages) < 2e-3


def test_wait_on_a_failing_member_ends_soon_and_leaves_no_thread(together):
    (first, second, _), _ = together
    before = threading.enumerate()
    first.begin_sync(), second.begin_sync()
    with pytest.raises(WeightSyncError, match="a fault"), second.abort_on_error():
        raise ValueError("a fault")
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="trainer rank 1: ValueError: a fault"), first.abort_on_error():
        first.wait_for("a")
    assert time.monotonic() - started < SECONDS / 2
    until = time.monotonic() + SECONDS
    while (left := set(threading.enumerate()) - set(before)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


def _like(group, rank, members):
    """A member of a larger group, with the same store."""
    made = SyncGroup.__new__(SyncGroup)
    made.__dict__ |= group.__dict__ | {"rank": rank, "members": members, "_published": [], "_groups": []}
    return made


def test_gather_among_1024_members_costs_each_three_requests(together):
    (first, *_), _ = together
    members = Members(512, 1024)
    trainers = [_like(first, rank, members) for rank in (0, 1)]
    rollouts = [_like(first, rank, members) for rank in members.rollouts]
    for rollout in rollouts[1:]:
        rollout.publish(f"request {rollout.rank}", ("wanted by", rollout.rank))
    results, requests = {}, [_count(group) for group in (*trainers, rollouts[0])]

    def part(group, message):
        results[group.rank] = group.gather("request", message, members.rollouts)

    threads = [threading.Thread(target=part, args=(group, None)) for group in trainers]
    for thread in threads:
        thread.start()
    part(rollouts[0], ("wanted by", rollouts[0].rank))
    for thread in threads:
        thread.join()
    wanted = [("wanted by", rank) for rank in members.rollouts]
    assert [results[group.rank] for group in (*trainers, rollouts[0])] == [wanted] * 3
    for each in requests[1:]:
        del each["check"]  # while it waits
        assert each.total() <= 3, each


def test_gather_names_the_first_member_that_did_not_publish(together):
    (first, *_), _ = together
    members = Members(4, 8)
    group = _like(first, 1, members)
    group.timeout_seconds = 0.1
    for rank in (4, 5, 7):
        _like(first, rank, members).publish(f"request {rank}", rank)
    with pytest.raises(WeightSyncError, match="rollout rank 2 did not publish its 'request' within 0.1 s"):
        group.gather("request", None, members.rollouts)
    _like(first, 6, members).publish("request 6", 6)
    with pytest.raises(WeightSyncError, match="trainer rank 0 did not publish all 'request'"):
        group.gather("request", None, members.rollouts)
    group.close()
