"""The client: what it asks, what it refuses, what becomes of requests that go wrong."""

import json
import threading
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.engines.sglang import capturefile, client, info
from eyas.engines.sglang.client import Lost, Reply, Request, ServerDied, check_ids, generate
from eyas.engines.sglang.http import Connection
from eyas.engines.sglang.plugin.protocol import Wanted
from eyas.engines.sglang.pool import fan_out
from eyas.errors import UserError
from fakesglang import FakeServer, write


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(client, "HOOK_SECONDS", 0.3)
    monkeypatch.setattr("eyas.engines.sglang.http.LIVE_PAUSE", 0.01)
    torch.set_num_threads(1)


@pytest.fixture
def fake(tmp_path, tiny_llama):
    server = FakeServer(tiny_llama, tmp_path)
    yield server
    server.close()


def requests(count, tokens=6):
    return [Request(Wanted(f"s{i}", tokens + i), [1 + (i + j) % 250 for j in range(tokens + i)]) for i in range(count)]


def capture(fake, asked, *others, concurrency=4, **changed):
    ends = [server.endpoint for server in (fake, *others)]
    about = replace(info.read(fake.url), **changed)
    return list(client.capture(ends, asked, info=about, concurrency=concurrency, vocab_size=259))


def test_every_request_comes_back_with_its_own_states(fake):
    asked = requests(12)
    got = capture(fake, asked)
    assert sorted(reply.request.wanted.name for reply in got) == sorted(one.wanted.name for one in asked)
    for reply in got:
        found = capturefile.read(reply.path, fake.root)
        assert found.ids.tolist() == reply.request.ids
        torch.testing.assert_close(found.last, fake.states(reply.request.ids)["last"])
        assert reply.token == int(fake.target.greedy(found.last[-1]))
    assert len({body["extra_key"] for body in fake.seen}) == 12
    assert fake.seen[0]["sampling_params"] == {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
    assert fake.seen[0]["rid"].startswith("eyas:c:")
    assert fake.most <= 4


@pytest.mark.parametrize(("ids", "position"), [([-1], 0), ([1, 259], 1), ([1, 2, 10**12], 2), ([True], 0), ([1.0], 0)])
def test_an_id_out_of_range_is_never_sent(fake, ids, position):
    with pytest.raises(UserError, match=rf"at position {position} is outside the target's vocabulary of 259"):
        capture(fake, [Request(Wanted("bad", len(ids)), ids)])
    assert fake.seen == []
    with pytest.raises(UserError, match="no token ids"):
        check_ids([], 259, "x")
    check_ids([0, 258], 259, "x")


def test_a_cached_prefix_loses_the_sample(fake):
    fake.reply = lambda meta, body: meta.update(cached_tokens=len(body["input_ids"]) - 1)
    (lost,) = capture(fake, requests(1))
    assert isinstance(lost, Lost)
    assert "5 of its 6 tokens came from the server's prefix cache" in lost.reason
    assert list(fake.root.iterdir()) == []


def test_a_server_that_counts_other_tokens_loses_the_sample(fake):
    fake.reply = lambda meta, body: meta.update(prompt_tokens=7)
    (lost,) = capture(fake, requests(1))
    assert "counts 7 tokens where 6 were sent" in lost.reason


@pytest.mark.parametrize("name", ["cached_tokens", "prompt_tokens"])
def test_an_old_server_is_refused(fake, name):
    fake.reply = lambda meta, body: meta.pop(name)
    with pytest.raises(UserError, match=f"replies lack {name}"):
        capture(fake, requests(3))


def test_a_server_without_the_plugin_is_told_within_seconds(fake):
    fake.fault = lambda wanted, tensors, server: None
    began = time.monotonic()
    (lost,) = capture(fake, requests(1))
    assert "the hook did not fire" in lost.reason
    assert time.monotonic() - began < 5


def test_a_file_that_is_still_written_is_waited_for(fake):
    def slow(wanted, tensors, server):
        wanted.partial(server.root).touch()

        def later():
            time.sleep(0.8)  # longer than the patience for a hook that does not fire
            write(wanted.file(server.root), tensors, wanted.rid, server.layers)

        threading.Thread(target=later).start()

    fake.fault = slow
    (reply,) = capture(fake, requests(1))
    assert isinstance(reply, Reply)


def test_a_file_that_does_not_grow_is_given_up(fake, monkeypatch):
    monkeypatch.setattr(client, "STALLED_SECONDS", 0.5)
    fake.fault = lambda wanted, tensors, server: wanted.partial(server.root).touch()
    (lost,) = capture(fake, requests(1))
    assert "has not grown for 0.5 s" in lost.reason
    assert list(fake.root.iterdir()) == []


def test_a_server_that_dies_before_its_file_is_whole(fake, monkeypatch):
    monkeypatch.setattr(client, "ALIVE_SECONDS", 0.1)

    def die(wanted, tensors, server):
        wanted.partial(server.root).touch()
        threading.Timer(0.2, server.http.socket.close).start()

    fake.fault = die
    with pytest.raises(ServerDied):
        capture(fake, requests(1))


def test_an_earlier_attempts_files_are_not_taken_for_this_ones(fake):
    (request,) = requests(1)
    for path in (request.wanted.file(fake.root), request.wanted.failed(fake.root), request.wanted.partial(fake.root)):
        path.write_text("old")
    (reply,) = capture(fake, [request])
    assert capturefile.read(reply.path, fake.root).ids.tolist() == request.ids
    assert [path.name for path in fake.root.iterdir()] == ["s0.safetensors"]


def test_after_an_error_nothing_more_is_asked(fake, monkeypatch):
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.5)

    def work(connection, server, job):
        if job == 0:
            time.sleep(0.2)
            raise UserError("refused")
        return client.ask(connection, {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})

    fake.statuses = [503] * 100
    began = time.monotonic()
    with pytest.raises(UserError, match=r"^refused$"):
        list(fan_out([fake.url], range(50), work, concurrency=4))
    assert time.monotonic() - began < 1.5
    assert len(fake.seen) == 3


def test_the_plugins_reason_is_passed_on(fake):
    fake.fault = lambda wanted, tensors, server: "no space left under /dev/shm for 60 s\n"
    (lost,) = capture(fake, requests(1))
    assert lost.reason == "no space left under /dev/shm for 60 s"
    assert list(fake.root.iterdir()) == []


def test_passing_failures_are_tried_again_under_another_name(fake):
    fake.statuses = [500, 429]
    (reply,) = capture(fake, requests(1))
    assert reply.path.name == "s0-3.safetensors"
    assert reply.request.wanted.name == "s0"
    fake.statuses = [503, 503, 503]
    (lost,) = capture(fake, requests(1))
    assert "failed 3 times, at last: HTTP 503: told to say 503" in lost.reason


def test_a_refused_request_is_lost_with_the_servers_words(fake):
    fake.statuses = [400]
    (lost,) = capture(fake, requests(1))
    assert "refuses the request (HTTP 400): told to say 400" in lost.reason
    fake.statuses = [400]
    with pytest.raises(UserError, match="told to say 400"):
        generate(fake.url, {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})


def test_a_request_that_the_server_gives_up_is_tried_again(fake):
    fake.reply = lambda meta, body: meta.update(finish_reason={"type": "abort", "message": "retracted"})
    with pytest.raises(UserError, match=r"3 times, at last: the server gave the request up \(retracted\)"):
        generate(fake.url, {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})


def test_a_dead_server_ends_it(fake):
    fake.dies_after = 3
    with pytest.raises(ServerDied, match="no server answers any more"):
        capture(fake, requests(30))
    with pytest.raises(ServerDied, match="does not answer any more"):
        generate(fake.url, {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})


def test_the_others_take_over_from_a_dead_server(fake, tmp_path, tiny_llama):
    other = FakeServer(tiny_llama, tmp_path / "other")
    other.dies_after = 3
    got = capture(fake, requests(30), other)
    assert len({reply.request.wanted.name for reply in got}) == 30
    assert {reply.path.parent for reply in got} == {fake.root, other.root}


def test_a_dead_service_becomes_the_exit_code_that_says_so(capsys):
    with pytest.raises(SystemExit) as end, client.leased():
        raise ServerDied("http://x does not answer any more")
    assert end.value.code == 75
    assert "does not answer" in capsys.readouterr().err


def test_idle_connections_are_opened_again(fake):
    connection = Connection(fake.url)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    assert client.ask(connection, body)["output_ids"]
    connection._open.sock.shutdown(2)
    assert client.ask(connection, body)["output_ids"]
    connection.close()


def test_tokens_under_way_stay_within_the_pool(fake):
    """The server played here counts a request a moment longer than the client does, so one more may be seen."""
    for kv_tokens, chunk, allowed in ((60, 8192, 1), (100, 8192, 2), (4000, 32, 3)):
        fake.most = 0
        capture(fake, requests(20, tokens=40), concurrency=16, kv_tokens=kv_tokens, chunk=chunk)
        assert fake.most <= allowed + 1


def test_files_that_nobody_deletes_hold_the_next_requests(fake, monkeypatch):
    usage = namedtuple("usage", "total used free")
    token = 4 * fake.info.hidden_size * 4
    monkeypatch.setattr(client.shutil, "disk_usage", lambda path: usage(0, 0, 8 * 40 * token))  # room for 40 tokens
    about = info.read(fake.url)
    asked = [Request(Wanted(f"s{i}", 10), [1 + i] * 10) for i in range(12)]
    replies = client.capture([fake.endpoint], asked, info=about, concurrency=8, vocab_size=259)
    next(replies)
    time.sleep(0.6)
    assert len(list(fake.root.glob("*.safetensors"))) <= 5  # four fit, and one is always under way
    got = 1
    for path in fake.root.glob("*.safetensors"):
        path.unlink()
    for reply in replies:
        reply.path.unlink(missing_ok=True)
        got += 1
    assert got == 12


def test_an_address_that_is_none(tmp_path):
    with pytest.raises(UserError, match="is no address of a server"):
        generate("localhost:30000", {})
    with pytest.raises(ServerDied):
        generate("http://127.0.0.1:9", {})


def test_every_rank_writes_where_that_is_asked(fake):
    fake.tp = 2
    fake.say()
    wanted = Wanted("r", 3, every_rank=True)
    (reply,) = capture(fake, [Request(wanted, [1, 2, 3])])
    assert [p.name for p in sorted(fake.root.iterdir())] == ["r.rank0.safetensors", "r.rank1.safetensors"]
    assert reply.path == wanted.file(fake.root, 0)
    client.discard(wanted, fake.root, 2)
    assert list(fake.root.iterdir()) == []


def test_a_path_outside_the_root_is_not_read(fake, tmp_path):
    (outside := tmp_path / "outside.safetensors").write_bytes(b"x")

    def link(wanted, tensors, server):
        wanted.file(server.root).symlink_to(outside)

    fake.fault = link
    (reply,) = capture(fake, requests(1))
    with pytest.raises(UserError, match="lies outside of the capture root"):
        capturefile.read(reply.path, fake.root)
    assert Path(reply.path).is_symlink()
    assert json.dumps(outside.read_text()) == '"x"'
