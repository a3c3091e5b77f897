"""What serving engines are asked for a reply, and how each one tells token ids and log-probabilities.

vLLM and SGLang share a form of /v1/completions. llama.cpp's own endpoint is asked, because its OpenAI one leaves out the
tokens that end inside a character.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.heads.facts import TargetFacts
from headstart.heads.sampling import Sampling
from headstart.trainer.generation import Reply, Request
from headstart.trainer.settings import ServerSettings

# Ids that the tokenizer cannot produce are biased away; a longer list would weigh more than the request.
MAX_BIASED = 2048


class BadAnswer(Exception):
    """Why an answer of a server is no reply that can be recorded."""


@dataclass(frozen=True)
class Answer:
    """A server's answer, whatever its form."""

    text: str
    token_ids: list[int]
    logprobs: list[float] | None  # one a token under the raw target; None where they are not told for every token
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int | None


class Dialect:
    """One engine's form of request and answer."""

    path: str
    hint: str  # what to do about missing token ids

    def payload(self, request: Request, limit: int, sampling: Sampling, asked: "Asked") -> dict[str, Any]:
        raise NotImplementedError

    def read(self, content: Mapping[str, Any]) -> Answer:
        """Raises BadAnswer: it is not of this form, or without token ids."""
        raise NotImplementedError


class Completions(Dialect):
    """/v1/completions of vLLM and SGLang, which take and give token ids."""

    path = "/v1/completions"
    hint = "vLLM from 0.10.2 on and recent SGLang give them when asked by return_token_ids"

    def payload(self, request: Request, limit: int, sampling: Sampling, asked: "Asked") -> dict[str, Any]:
        # Every value is given: a server's own defaults come from the model's generation_config.json.
        return {
            "model": asked.model,
            "prompt": request.token_ids,
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": asked.facts.stop_ids,
            "logit_bias": {str(i): -100 for i in asked.biased},
            "logprobs": 1,
            "return_token_ids": True,
            **({"seed": asked.seed_of(request)} if sampling.temperature > 0 else {}),
        }

    def read(self, content: Mapping[str, Any]) -> Answer:
        try:
            choice = content["choices"][0]
            text, finish = str(choice["text"]), choice["finish_reason"]
        except (KeyError, IndexError, TypeError):
            raise BadAnswer("found no choices[0].text and .finish_reason, expected a completion") from None
        if finish not in ("stop", "length"):
            raise BadAnswer(f"found finish_reason {finish!r}, expected stop or length")
        told, usage = (
            value if isinstance(value, dict) else {} for value in (choice.get("logprobs"), content.get("usage"))
        )
        logprobs, prompt_ids = told.get("token_logprobs"), choice.get("prompt_token_ids")
        return Answer(
            text,
            int_list(choice.get("token_ids"), "choices[0].token_ids", self.hint),
            logprobs,
            None if prompt_ids is None else int_list(prompt_ids, "choices[0].prompt_token_ids", self.hint),
            usage.get("prompt_tokens"),
        )


class LlamaCpp(Dialect):
    """/completion of llama.cpp's server."""

    path = "/completion"
    hint = "llama.cpp gives them when asked by return_tokens"

    def payload(self, request: Request, limit: int, sampling: Sampling, asked: "Asked") -> dict[str, Any]:
        return {
            "prompt": request.token_ids,
            "n_predict": limit,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            # Its own order applies the temperature last, which is another law.
            "samplers": ["temperature", "min_p", "top_k", "top_p"],
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": [[i, False] for i in asked.biased],
            "n_probs": 1,
            "return_tokens": True,
            "cache_prompt": False,
            **({"seed": asked.seed_of(request)} if sampling.temperature > 0 else {}),
        }

    def read(self, content: Mapping[str, Any]) -> Answer:
        if "content" not in content:
            raise BadAnswer("found no content, expected a completion")
        token_ids = int_list(content.get("tokens"), "tokens", self.hint)
        told = content.get("completion_probabilities")
        told = [entry for entry in told if isinstance(entry, dict)] if isinstance(told, list) else []
        ids = [entry.get("id") for entry in told]
        logprobs = [entry.get("logprob") for entry in told] if ids == token_ids else None
        return Answer(str(content["content"]), token_ids, logprobs, None, content.get("tokens_evaluated"))


DIALECTS: dict[str, Dialect] = {"vllm": Completions(), "sglang": Completions(), "llamacpp": LlamaCpp()}


@dataclass(frozen=True)
class Asked:
    """What all requests of a stage have in common."""

    facts: TargetFacts
    tokenizer: Any
    settings: ServerSettings
    seed: int

    @property
    def model(self) -> str:
        return self.settings.model

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.settings.engine]

    @property
    def biased(self) -> range:
        """Rows of the output head that stand for no token; no reply may hold one."""
        unused = range(self.facts.num_tokens, self.facts.vocab_size)
        return unused if len(unused) <= MAX_BIASED else range(0)

    def seed_of(self, request: Request) -> int:
        """A request's own random numbers, whatever runs beside it."""
        digest = hashlib.sha256(f"{self.seed}/{request.prompt_id}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def reply(self, content: Any, request: Request, limit: int) -> Reply:
        """An answer as the target's own reply: cut at its first stop token, or `limit` tokens long.

        Raises:
            BadAnswer: another prompt was read, ids are not those of the text, or the reply ends where the target would not.
        """
        if not isinstance(content, dict):
            raise BadAnswer("found no JSON object")
        answer = self.dialect.read(content)
        token_ids, logprobs = answer.token_ids, answer.logprobs
        if strange := [token for token in token_ids if not 0 <= token < self.facts.num_tokens]:
            raise BadAnswer(f"found token id {strange[0]}, expected ids from 0 below {self.facts.num_tokens}")
        check_prompt(answer, request)
        check_text(answer, self.tokenizer)
        check_logprobs(answer)
        stops = set(self.facts.stop_ids)
        stop = next((i for i, token in enumerate(token_ids) if token in stops), None)
        if stop is None and len(token_ids) != limit:
            last = f"{token_ids[-1]}, which is none" if token_ids else "nothing"
            raise BadAnswer(f"ends after {len(token_ids)} of {limit} tokens without a stop token (last: {last})")
        number = limit if stop is None else stop + 1
        told: list[Any] = [None] * number if logprobs is None else logprobs[:number]
        return Reply(token_ids[:number], told, "length" if stop is None else "stop")


def int_list(value: Any, name: str, hint: str) -> list[int]:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise BadAnswer(f"gives no token ids ({name}); {hint}. Text alone cannot be recorded: it has other ids again")
    return value


def check_prompt(answer: Answer, request: Request) -> None:
    """The server read the very token ids that it was sent."""
    sent, read = request.token_ids, answer.prompt_token_ids
    if read is not None and read != sent:
        raise BadAnswer(f"read another prompt: {len(read)} token ids, {len(sent)} were sent")
    if answer.num_prompt_tokens not in (None, len(sent)):
        raise BadAnswer(f"read {answer.num_prompt_tokens} prompt tokens, {len(sent)} were sent")


def check_logprobs(answer: Answer) -> None:
    """There is one for every token, where they are told; null for a token that has none."""
    told: Any = answer.logprobs
    if told is None:
        return
    if not isinstance(told, list) or any(type(p) not in (int, float, type(None)) or p != p for p in told):
        raise BadAnswer("found log-probabilities that are no list of numbers")
    if len(told) != len(answer.token_ids):
        raise BadAnswer(f"found {len(told)} log-probabilities for {len(answer.token_ids)} tokens")


def check_text(answer: Answer, tokenizer: Any) -> None:
    """The token ids decode to the text, but for what ends the reply and for broken characters."""
    told = plain(answer.text)
    for ids in (answer.token_ids, answer.token_ids[:-1]):
        if plain(tokenizer.decode(ids, skip_special_tokens=True)) == told:
            return
    raise BadAnswer(f"token ids do not decode to the text {answer.text[:60]!r}: the server has another tokenizer")


def plain(text: str) -> str:
    return text.replace("\ufffd", "").strip()
