"""One connection to a server, kept alive. Token ids and figures go over it; states never do."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from eyas.errors import UserError

CONNECT_SECONDS = 10.0
LIVE_TRIES, LIVE_PAUSE = 3, 0.5
REFUSED = (400, 401, 403, 404, 405, 413, 422)


class ServerDied(Exception):  # noqa: N818
    """The connection broke and the server does not answer any more."""


class Transient(Exception):  # noqa: N818
    """The request failed, the server lives: worth another try."""


class Stopped(Exception):  # noqa: N818
    """The caller wants no more of this connection."""


class Connection:
    """A connection to the server at `url`, made when it is needed and again when it has gone."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError:  # An impossible port, or brackets of an IPv6 address that do not close.
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise UserError(f"server.url: {url!r} is no address of a server; write http://host:port")
        self._secure, self._path = parts.scheme == "https", parts.path
        self._host, self._port = host, port or (443 if self._secure else 80)
        self._open: http.client.HTTPConnection | None = None
        self._stopped = threading.Event()

    def post(self, path: str, body: dict[str, Any], timeout: float = 600.0) -> dict[str, Any]:
        """POST `body` as JSON; the reply.

        Raises UserError: the server refuses the request (its message), or is none. Transient: it is overloaded, failed
        or broke the connection. ServerDied.
        """
        response = self._send(path, body, timeout)
        try:
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error, timeout) from error
        self._require_ok(response.status, content)
        try:
            reply = json.loads(content)
        except ValueError as error:
            raise UserError(f"{self.url}{path}: the reply is no JSON: is this an SGLang server?") from error
        if not isinstance(reply, dict):
            raise UserError(f"{self.url}{path}: the reply is no JSON object: is this an SGLang server?")
        return reply

    def stream(self, path: str, body: dict[str, Any], timeout: float = 600.0) -> Iterator[dict[str, Any]]:
        """POST `body` as JSON; the server-sent events of the reply, to the last. Raises as `post` does."""
        response = self._send(path, body, timeout)
        try:
            if response.status != 200:
                self._require_ok(response.status, response.read())
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise UserError(f"{self.url}{path}: refused: {_message(data)}")
                    yield event
        except ValueError as error:
            raise self._broken(error, timeout) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error, timeout) from error
        except GeneratorExit:
            self.close()
            raise

    def close(self) -> None:
        """Close it; the next request opens it anew."""
        if self._open is not None:
            self._open.close()
        self._open = None

    def abort(self) -> None:
        """End a request that another thread waits for; it, and each later one, raises Stopped."""
        self._stopped.set()
        connection = self._open
        if connection is not None and connection.sock is not None:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def pause(self, seconds: float) -> None:
        """Wait. Raises Stopped as soon as the connection is aborted."""
        if self._stopped.wait(seconds):
            raise Stopped(self.url)

    def _send(self, path: str, body: dict[str, Any], timeout: float) -> http.client.HTTPResponse:
        content = json.dumps(body, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json"}
        reused = self._open is not None
        try:
            return self._request(path, content, headers, timeout)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            # A server closes connections that were idle for some seconds; the request never arrived.
            if not reused or isinstance(error, TimeoutError):
                raise self._broken(error, timeout) from error
        try:
            return self._request(path, content, headers, timeout)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error, timeout) from error

    def _request(self, path: str, content: bytes, headers: dict[str, str], timeout: float) -> http.client.HTTPResponse:
        self.pause(0)
        if self._open is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            self._open = kind(self._host, self._port, timeout=CONNECT_SECONDS)
            self._open.connect()
            self._open.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.pause(0)  # what has no socket yet, `abort` cannot end
        self._open.sock.settimeout(timeout)
        self._open.request("POST", self._path + path, content, headers)
        return self._open.getresponse()

    def _broken(self, error: Exception, timeout: float) -> Exception:
        """What a broken connection means: a dead server, or one that lives and is worth another try."""
        self.close()
        if self._stopped.is_set():
            return Stopped(self.url)
        if not self.lives():
            return ServerDied(f"{self.url} does not answer any more ({type(error).__name__}: {error})")
        if isinstance(error, TimeoutError):
            return Transient(f"no answer within {timeout:g} s")
        return Transient(f"the connection broke ({type(error).__name__}: {error})")

    def lives(self) -> bool:
        """Whether anything listens. A server under a long prefill still does, whatever its health check says."""
        for turn in range(LIVE_TRIES):
            if turn:
                time.sleep(LIVE_PAUSE)
            try:
                socket.create_connection((self._host, self._port), CONNECT_SECONDS).close()
            except OSError:
                continue
            return True
        return False

    def _require_ok(self, status: int, content: bytes) -> None:
        if status in REFUSED:
            raise UserError(f"{self.url}: the server refuses the request (HTTP {status}): {_message(content)}")
        if status != 200:
            raise Transient(f"HTTP {status}: {_message(content)}")


def _message(content: bytes) -> str:
    """The server's own words, from whatever it wraps them in."""
    text = content.decode("utf-8", "replace").strip()
    try:
        found = json.loads(text)
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and key in found:
                found = found[key]
        text = found if isinstance(found, str) else json.dumps(found)
    except ValueError:
        pass
    return text[:500]
