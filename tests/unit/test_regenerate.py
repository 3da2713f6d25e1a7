"""Answers again, by each kind of answerer: turn by turn, with their ids, and resumed by content."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.cli import app
from eyas.corpus import work
from eyas.corpus.conversation import conversation
from eyas.corpus.prepare import prepare
from eyas.corpus.read import read
from eyas.corpus.talk import Answer, Kit, Talk
from eyas.corpus.template import Template
from eyas.errors import UserError
from eyas.progress import Silent
from fakesglang import FakeServer


class Chat:
    """A server of the chat API, with the tiny model's tokenizer: answers `re: ` and the question."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = work.load_tokenizer(model)
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.ids = True
        self.shift = 0
        self.free: int | None = None
        """How many more are answered before all have to wait for `go`."""
        self.lock, self.go = threading.Lock(), threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        text = f"re: {body['messages'][-1]['content']}"
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        if self.ids:
            choice["token_ids"] = [*self.tokenizer.encode(text), 2]
        return {"choices": [choice], **({"prompt_token_ids": ids[self.shift :]} if self.ids else {})}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        chat = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._say(200, {"data": [{"id": "the-model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with chat.lock:
                    chat.bodies.append(body)
                    status = chat.statuses.pop(0) if chat.statuses else 200
                    waits = chat.free is not None and (chat.free <= 0 or body["messages"][-1]["content"] == "q0")
                    if chat.free is not None and not waits:
                        chat.free -= 1
                if waits:
                    chat.go.wait(60)
                self._say(status, chat.reply(body) if status == 200 else {"error": {"message": "busy"}})

            def _say(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


@pytest.fixture
def chat(tiny_llama: Path) -> Iterator[Chat]:
    server = Chat(tiny_llama)
    yield server
    server.go.set()
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(scope="module")
def kit(tiny_llama: Path) -> Kit:
    tokenizer = work.load_tokenizer(tiny_llama)
    return Kit(tokenizer, Template(tokenizer, {}), (2,))


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["regenerate", *map(str, arguments)])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


SAID = [("system", "s"), ("user", "a"), ("assistant", "old"), ("user", "b"), ("assistant", "older")]
TALK = {"messages": [{"role": role, "content": text} for role, text in SAID]}


def test_turn_by_turn_through_the_chat_api(chat: Chat, tiny_llama: Path, tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", TALK, {"prompt": "only"}, 7, TALK)
    chat.statuses = [503]
    said = command(
        name, "--target", tiny_llama, "--out", tmp_path / "new.jsonl", "--url", chat.url, "--max-rejected", 0.5
    )
    first, second = rows(tmp_path / "new.jsonl")
    assert [m["content"] for m in first["messages"]] == ["s", "a", "re: a", "b", "re: b"]
    assert (first["source"], second["source"], first["finish"]) == (f"{name}:1", f"{name}:2", "stop")
    tokenizer = chat.tokenizer
    assert [tokenizer.decode(first["ids"][a:b]) for a, b in first["spans"]] == ["re: a<|end|>", "re: b<|end|>"]
    whole = tokenizer.apply_chat_template(first["messages"], return_dict=False)
    assert first["ids"] == whole
    assert "exact duplicate" in said
    assert chat.bodies[-1]["model"] == "the-model"
    assert len(chat.bodies) == 4  # one was refused and sent again
    assert rows(tmp_path / "new.rejected.jsonl")[0]["line"] == 3
    assert not (tmp_path / "new.jsonl.partial").exists()


def test_what_comes_out_goes_into_prepare_and_a_run(chat: Chat, tiny_llama: Path, tmp_path: Path) -> None:
    """Pitfall 29."""
    command(write(tmp_path / "a.jsonl", TALK), "--target", tiny_llama, "--out", tmp_path / "n.jsonl", "--url", chat.url)
    (made,) = rows(tmp_path / "n.jsonl")
    orders = work.orders(str(tiny_llama), Silent(), {}, None, None)
    prepare([str(tmp_path / "n.jsonl")], orders, tmp_path / "out", Silent())
    (sample,) = rows(tmp_path / "out" / "samples.jsonl")
    assert (sample["ids"], sample["spans"]) == (made["ids"], made["spans"])
    assert [row.ids for row in read(str(tmp_path / "n.jsonl"), "train")[0]] == [
        made["ids"][:start] for start, _ in made["spans"]
    ]


def test_a_server_that_gives_no_ids(chat: Chat, tiny_llama: Path, tmp_path: Path) -> None:
    chat.ids = False
    said = command(
        write(tmp_path / "a.jsonl", TALK), "--target", tiny_llama, "--out", tmp_path / "n.jsonl", "--url", chat.url
    )
    (row,) = rows(tmp_path / "n.jsonl")
    assert "ids" not in row
    assert len(row["messages"]) == 5
    assert "without ids  1" in said


def test_a_server_that_renders_otherwise(chat: Chat, tiny_llama: Path, tmp_path: Path) -> None:
    chat.shift = 1
    with pytest.raises(
        UserError, match=r"renders .*a\.jsonl:1 otherwise than the tokenizer here: token 0 is \d+ there, 1"
    ):
        command(
            write(tmp_path / "a.jsonl", TALK), "--target", tiny_llama, "--out", tmp_path / "n.jsonl", "--url", chat.url
        )


def test_killed_after_seven_of_twenty(chat: Chat, tiny_llama: Path, tmp_path: Path) -> None:
    """Pitfall 16: rows came back out of order, and exactly the other thirteen are asked for."""
    name = write(tmp_path / "a.jsonl", *({"prompt": f"q{i}"} for i in range(20)))
    out = tmp_path / "new.jsonl"
    arguments = [name, "--target", str(tiny_llama), "--out", str(out), "--url", chat.url, "--concurrency", "9"]
    chat.free = 7
    process = subprocess.Popen([sys.executable, "-m", "eyas", "regenerate", *arguments], stderr=subprocess.DEVNULL)
    journal = tmp_path / "new.jsonl.partial"
    limit = time.monotonic() + 120
    while not journal.exists() or journal.read_bytes().count(b"\n") < 7:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert journal.read_bytes().count(b"\n") == 7
    with journal.open("ab") as file:
        file.write(b'{"key": "torn')
    done = {row["rows"][0]["messages"][0]["content"] for row in map(json.loads, journal.read_bytes().splitlines()[:7])}
    assert "q0" not in done
    chat.bodies, chat.free = [], None
    chat.go.set()
    said = command(*arguments)
    assert sorted(body["messages"][0]["content"] for body in chat.bodies) == sorted({f"q{i}" for i in range(20)} - done)
    assert len(chat.bodies) == 13
    assert [row["messages"][0]["content"] for row in rows(out)] == [f"q{i}" for i in range(20)]
    assert "resumed      7" in said


def test_sglang_and_in_process_give_the_same(tiny_llama: Path, tmp_path: Path) -> None:
    server = FakeServer(tiny_llama, tmp_path)
    name = write(tmp_path / "a.jsonl", TALK, {"prompt": "only"})
    more = ["--target", tiny_llama, "--max-tokens", 12]
    try:
        command(name, *more, "--out", tmp_path / "served.jsonl", "--url", server.url, "--api", "sglang")
    finally:
        server.close()
    command(name, *more, "--out", tmp_path / "local.jsonl")
    assert rows(tmp_path / "served.jsonl") == rows(tmp_path / "local.jsonl")
    assert len(rows(tmp_path / "local.jsonl")) >= 2


def test_answers_that_change_when_they_are_history(kit: Kit) -> None:
    """An answer whose text does not encode to its ids again: each turn is a sample of its own."""
    talk = Talk("k", "a:1", conversation(TALK["messages"]), kit)
    asked = talk.ask()
    assert asked is not None
    plain = kit.tokenizer.encode("x y")
    talk.give(Answer([*plain, 1, 2], "stop"))
    again = talk.ask()
    assert again is not None
    talk.give(Answer([*plain, 2], "stop"))
    assert [row["spans"] for row in talk.rows()] == [[[len(asked), len(asked) + 5]], [[len(again), len(again) + 4]]]
    assert talk.ask() is None


def test_reasoning_is_taken_apart(kit: Kit) -> None:
    ids = kit.tokenizer.encode("<think>\nwhy\n</think>\n\nbecause")
    assert kit.message(Answer([*ids, 2], "stop")) == {
        "role": "assistant",
        "content": "because",
        "reasoning_content": "why",
    }
    assert kit.message(Answer(None, "stop", "because", "why"))["reasoning_content"] == "why"


def test_tool_calls_stay(kit: Kit) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    messages = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "x"}]
    talk = Talk("k", "a:1", conversation(messages), kit)
    assert talk.ask() is not None
    talk.give(Answer([5, 2], "stop"))
    assert [message["role"] for message in talk.rows()[0]["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_empty_answers_are_put_down(kit: Kit) -> None:
    talk = Talk("k", "a:1", conversation(TALK["messages"]), kit)
    talk.ask()
    talk.give(Answer([2], "stop"))
    assert talk.ask() is None
    assert talk.rows() == []


def test_what_is_refused(chat: Chat, tiny_llama: Path, tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", TALK)
    base = [name, "--target", tiny_llama, "--out", tmp_path / "n.jsonl"]
    for more, message in [
        (["--temperature", 1], "in-process answers are greedy"),
        (["--url", chat.url, "--api", "other"], "choose openai"),
        (["--url", "http://127.0.0.1:9/v1"], "names no model"),
    ]:
        with pytest.raises(UserError, match=message):
            command(*base, *more)
    chat.statuses = [400]
    with pytest.raises(UserError, match="busy"):
        command(*base, "--url", chat.url)
    ids = write(tmp_path / "b.jsonl", {"ids": [1, 2], "spans": [[1, 2]]})
    with pytest.raises(UserError, match="1 of 1 rows have no answer"):
        command(ids, *base[1:], "--url", chat.url)


def test_what_is_read_is_never_written_over(tiny_llama: Path, tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", TALK)
    before = Path(name).read_bytes()
    for out, message in [(name, "is read here"), (tmp_path, "is a folder")]:
        with pytest.raises(UserError, match=message):
            command(name, "--target", tiny_llama, "--out", out)
    assert Path(name).read_bytes() == before
    assert list(tmp_path.iterdir()) == [Path(name)]
