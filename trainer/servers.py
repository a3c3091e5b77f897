"""Requests to servers: so many at a time at each, asked again after errors, answers in the order of the requests.

Each server has lanes, threads with a connection of their own, which take requests from one queue. A server that is away
costs its lanes a pause and no request anything; what it was answering is asked again, there or elsewhere.
"""

import contextlib
import http.client
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from headstart.heads.errors import WrongInput
from headstart.heads.sampling import Sampling
from headstart.trainer.dialects import Asked, BadAnswer
from headstart.trainer.generation import Reply, Request
from headstart.trainer.progress import Stopped
from headstart.trainer.settings import address_problem

API_KEY = "HEADSTART_API_KEY"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
CONNECT_S = 10
LOADING = (429, 503)  # not now; nothing is wrong with the request
TROUBLE = (408, 425, 500, 502, 504)  # the server's, perhaps because of this request
QUOTED = 200  # characters of a server's message


class Away(Exception):
    """Nobody listens at the address, or it is not ready."""


class Broken(Exception):
    """The connection ended, or the time, before the answer."""


class Refused(Exception):
    """An HTTP status that is no success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


def api_key() -> str:
    """What goes with every request as its key; "" where none is set.

    Raises:
        WrongInput: no HTTP header can hold it. The message does not quote it.
    """
    key = os.environ.get(API_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise WrongInput(
            f"{API_KEY}: found characters that no HTTP header holds, expected ASCII on one line.\nSet it again."
        )
    return key


class Connection:
    """One connection to a server, opened when needed and used again."""

    def __init__(self, url: str, timeout: float) -> None:
        """`timeout` bounds every call as a whole, in seconds, however its answer trickles in.

        Raises:
            WrongInput: no http(s) address, or a key that cannot be sent.
        """
        if problem := address_problem(url):
            raise WrongInput(f"traffic.server.urls: {problem}")
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        self.url, self.timeout, self._prefix, self._key = url, timeout, parts.path, api_key()
        self._over = False
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=timeout)

    def call(self, path: str, payload: dict[str, Any] | None = None) -> Any:
        """POST JSON (GET without a payload) and return the JSON of the answer.

        Raises:
            Away, Broken, Refused: no connection, no whole answer, another status than success.
            BadAnswer: the answer is no JSON.
        """
        reused = self._connection.sock is not None
        try:
            status, body = self._exchange(path, payload)
        except TimeoutError:
            self.close()
            raise Broken(f"no whole answer in {self.timeout:g} s (traffic.server.timeout)") from None
        except (http.client.HTTPException, OSError) as error:
            self.close()
            # A server may close a connection that rests; what was sent then reached nobody.
            if reused and not self._over and isinstance(error, ConnectionError | http.client.RemoteDisconnected):
                return self.call(path, payload)
            raise Broken(f"{type(error).__name__}: {error}") from None
        if status != 200:
            refused = Refused(status, self._quoted(body))
            raise Away(str(refused)) if status in LOADING else refused
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise BadAnswer(f"found no JSON: {self._quoted(body)!r}") from None

    def _quoted(self, body: bytes) -> str:
        """The beginning of a server's message; servers may repeat the key in it."""
        text = body.decode("utf-8", "replace").strip()
        return (text.replace(self._key, f"[{API_KEY}]") if self._key else text)[:QUOTED]

    def _exchange(self, path: str, payload: dict[str, Any] | None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if payload is None else json.dumps(payload).encode()
        if self._connection.sock is None:
            self._connection.timeout = min(CONNECT_S, self.timeout)
            try:
                self._connection.connect()
            except OSError as error:
                self.close()
                raise Away(f"{type(error).__name__}: {error}") from None
            assert self._connection.sock is not None
            self._connection.sock.settimeout(self.timeout)
        with within(self.timeout, self._connection.sock):
            self._connection.request("GET" if data is None else "POST", self._prefix + path, data, headers)
            answer = self._connection.getresponse()
            body = answer.read()
        return answer.status, body

    def end(self) -> None:
        """Close it for good, also while another thread waits for an answer, which gets none."""
        self._over = True
        self.close()

    def close(self) -> None:
        """Close it; the next call opens it again."""
        if (sock := self._connection.sock) is not None:
            cut(sock)
        self._connection.close()


def cut(sock: socket.socket) -> None:
    """End what another thread waits for at a socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def within(seconds: float, sock: socket.socket) -> Iterator[None]:
    """Bound what is done at a socket as a whole; its own time-out begins anew with every byte.

    Raises:
        TimeoutError: it was cut off.
    """
    late = threading.Event()

    def cut_off() -> None:
        late.set()
        cut(sock)

    timer = threading.Timer(seconds, cut_off)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (http.client.HTTPException, OSError, ValueError):  # ValueError: TLS that is read when it is cut
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():  # also where an answer of no told length seems whole
        raise TimeoutError


@dataclass(order=True)
class Job:
    """One request of a batch; those of earlier chunks go first."""

    chunk: int
    number: int
    request: Request = field(compare=False)
    limit: int = field(compare=False)
    batch: "Batch" = field(compare=False)
    place: int = field(compare=False)
    attempts: int = field(default=0, compare=False)


class Batch:
    """Requests that were sent off together, and their replies as they come."""

    def __init__(self, number: int) -> None:
        self.replies: list[Reply | None] = [None] * number
        self._missing = number
        self._lock = threading.Lock()

    def put(self, place: int, reply: Reply) -> None:
        with self._lock:
            self.replies[place] = reply
            self._missing -= 1

    @property
    def complete(self) -> bool:
        return self._missing == 0


class Servers:
    """Lanes to all servers; a context manager, which ends them whatever happened."""

    def __init__(
        self,
        asked: Asked,
        sampling: Sampling,
        max_new_tokens: int,
        progress: Callable[[int, int], None] = lambda tokens, finished: None,
    ) -> None:
        self.asked, self.sampling, self.max_new_tokens, self._progress = asked, sampling, max_new_tokens, progress
        self._jobs: queue.PriorityQueue[Job] = queue.PriorityQueue()
        self._numbers = count()
        self._ended = threading.Event()
        self._news = threading.Condition()  # a reply came, or the run has to end
        self._failure: Exception | None = None
        self._away_since: float | None = None  # since when servers have been away with none answering
        settings = asked.settings
        self._connections = [
            Connection(url, settings.timeout) for url in settings.urls for _ in range(settings.concurrency)
        ]
        self._lanes = [threading.Thread(target=self._run, args=(own,), daemon=True) for own in self._connections]

    def __enter__(self) -> "Servers":
        for lane in self._lanes:
            lane.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._fail(Stopped())
        for connection in self._connections:
            connection.end()

    def send(self, requests: Sequence[Request], chunk: int = 0) -> Batch:
        """Queue requests; lanes answer those of earlier chunks first."""
        batch = Batch(len(requests))
        context = self.asked.facts.max_position
        for place, request in enumerate(requests):
            limit = min(self.max_new_tokens, context - len(request.token_ids))
            self._jobs.put(Job(chunk, next(self._numbers), request, limit, batch, place))
        return batch

    def wait(self, batch: Batch) -> list[Reply]:
        """The replies of a batch in the order of its requests; a request that stayed without one has finish_reason `error`.

        Raises:
            WrongInput: no server has answered for `timeout` seconds.
        """
        with self._news:
            while not batch.complete and self._failure is None:
                self._news.wait(1.0)
        if not batch.complete and self._failure is not None:
            raise self._failure
        return [reply for reply in batch.replies if reply is not None]

    def _run(self, connection: Connection) -> None:
        """A lane: one request after another until the end."""
        pause = FIRST_PAUSE_S
        while not self._ended.is_set():
            try:
                job = self._jobs.get(timeout=0.5)
            except queue.Empty:
                continue
            try:
                self._finish(job, self._ask(connection, job))
                pause = FIRST_PAUSE_S
                continue
            except Away as error:
                self._jobs.put(job)
                self._check_patience(connection, error)
            except (Broken, Refused, BadAnswer) as error:
                self._again(connection, job, error)
            except Exception as error:  # a fault of ours ends the run, not one thread of it
                self._fail(error)
            self._ended.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _ask(self, connection: Connection, job: Job) -> Reply:
        asked = self.asked
        payload = asked.dialect.payload(job.request, job.limit, self.sampling, asked)
        content = connection.call(asked.dialect.path, payload)
        self._away_since = None
        return asked.reply(content, job.request, job.limit)

    def _again(self, connection: Connection, job: Job, error: Exception) -> None:
        """Put a request back, or give it up: after `retries`, or where asking again cannot help."""
        if self._ended.is_set():
            return
        job.attempts += 1
        hopeless = isinstance(error, Refused) and error.status not in TROUBLE
        if not isinstance(error, Broken):
            self._away_since = None
        if isinstance(error, Refused) and error.status in (401, 403, 404):
            self._fail(WrongInput(f"traffic.server: {connection.url} answers {error}.\n{ADVICE[error.status]}"))
        elif hopeless or job.attempts > self.asked.settings.retries:
            self._finish(job, Reply(finish_reason="error", error=f"{connection.url}: {error}"))
        else:
            # Behind the others of its chunk: what makes a server fall does not meet the same neighbours again.
            self._jobs.put(replace(job, number=next(self._numbers)))

    def _finish(self, job: Job, reply: Reply) -> None:
        job.batch.put(job.place, reply)
        self._progress(len(reply.token_ids), 1)
        self._tell()

    def _check_patience(self, connection: Connection, error: Exception) -> None:
        """End the run where no server has answered since one was first found away; a pause in the asking is no silence."""
        now = time.monotonic()
        self._away_since = since = self._away_since or now
        if (away := now - since) > self.asked.settings.timeout:
            self._fail(
                WrongInput(
                    f"traffic.server.urls: no server has answered for {away:.0f} s, the last one tried is {connection.url} "
                    f"({error}).\nStart it again; the same command continues from here."
                )
            )

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._ended.set()
        self._tell()

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()


ADVICE = {
    401: f"Set {API_KEY} to a key that it takes.",
    403: f"Set {API_KEY} to a key that it takes.",
    404: "Check traffic.server.urls, .engine and .model against what it serves (its /v1/models).",
}
