"""A small server with a real model behind a real socket: the tiny target answers in the form of vLLM or of llama.cpp.

It can be killed, connections and all, and started again at the same port. `spoil` changes an answer on its way out,
`pause` lets it trickle.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from headstart.heads.sampling import Sampling
from headstart.heads.target import Target
from headstart.trainer.generation import Generator, Reply, Request

MODEL = "tiny-model"

_decoding = threading.Lock()
_replies: dict[tuple[str, tuple[int, ...], int, Sampling], Reply] = {}


class ReplyServer(ThreadingHTTPServer):
    """Serves until `kill`; `answered` counts replies, and `die_after` of them it kills itself."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, target: Target, engine: str = "vllm", port: int = 0, die_after: int | None = None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.target, self.engine, self.die_after = target, engine, die_after
        self.spoil: Callable[[dict[str, Any], dict[str, Any]], Any] = lambda request, answer: answer
        self.pause = 0.0  # seconds before every byte of an answer; 0 sends it whole
        self.answered, self.open, self.dead = 0, set(), False  # type: ignore[var-annotated]
        self.when_dead: Callable[[], Any] = lambda: None
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def kill(self) -> None:
        """End as a killed process does: nobody listens, and every open connection is cut."""
        self.dead = True
        self.shutdown()
        self.server_close()
        for connection in list(self.open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def handle_error(self, *_: Any) -> None:
        """A connection that was cut is nothing to report."""

    def die(self) -> None:
        self.kill()
        self.when_dead()

    def reply(self, token_ids: list[int], limit: int, sampling: Sampling) -> Reply:
        """The target's reply, kept for whoever asks again: tests are about what goes on around it."""
        with _decoding:
            key = (self.target.facts.name, tuple(token_ids), limit, sampling)
            if key not in _replies:
                generator = Generator(self.target, sampling, limit, 1, len(token_ids) + limit)
                (_replies[key],) = generator.generate([Request(str(token_ids), token_ids)])
        return _replies[key]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ReplyServer

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        owner = "vllm" if self.server.engine == "vllm" else "llamacpp"
        self.send({"object": "list", "data": [{"id": MODEL, "owned_by": owner}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        form = vllm_answer if self.server.engine == "vllm" else llama_answer
        answer = self.server.spoil(request, form(self.server, request))
        if self.server.dead:
            return
        if isinstance(answer, int):
            self.send({"error": {"message": f"no: {self.headers['Authorization']}"}}, answer)
            return
        self.send(answer)
        self.server.answered += 1
        if self.server.answered == self.server.die_after:
            threading.Thread(target=self.server.die, daemon=True).start()

    def send(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not self.server.pause:
            self.wfile.write(data)
            return
        for byte in data:
            time.sleep(self.server.pause)
            self.wfile.write(bytes([byte]))

    def log_message(self, *arguments: Any) -> None:
        pass


def said(server: ReplyServer, reply: Reply) -> str:
    """The text that engines tell: without special tokens, as the stop token is here."""
    return str(server.target.tokenizer.decode(reply.token_ids, skip_special_tokens=True))


def vllm_answer(server: ReplyServer, request: dict[str, Any]) -> dict[str, Any]:
    sampling = Sampling(request["temperature"], max(request["top_k"], 0), request["top_p"])
    reply = server.reply(request["prompt"], request["max_tokens"], sampling)
    choice = {
        "index": 0,
        "text": said(server, reply),
        "finish_reason": reply.finish_reason,
        "logprobs": {"token_logprobs": list(reply.logprobs)},
        "token_ids": list(reply.token_ids),
        "prompt_token_ids": list(request["prompt"]),
    }
    return {"choices": [choice], "usage": {"prompt_tokens": len(request["prompt"])}}


def llama_answer(server: ReplyServer, request: dict[str, Any]) -> dict[str, Any]:
    sampling = Sampling(request["temperature"], request["top_k"], request["top_p"])
    reply = server.reply(request["prompt"], request["n_predict"], sampling)
    told = [{"id": i, "logprob": p} for i, p in zip(reply.token_ids, reply.logprobs, strict=True)]
    # Tokens that end inside a character are left out, as llama.cpp does.
    whole = [entry for entry in told if "\ufffd" not in server.target.tokenizer.decode([entry["id"]])]
    return {
        "content": said(server, reply),
        "tokens": list(reply.token_ids),
        "completion_probabilities": whole,
        "stop_type": "eos" if reply.finish_reason == "stop" else "limit",
        "tokens_evaluated": len(request["prompt"]),
    }
