"""The target writes its own user turns: its chat template up to the start of a user turn is all it is given.

An instruction-tuned model continues that prefix with what its users ask (Magpie, arXiv 2406.08464). It does so for chat
and code; other routes come from written prompts and templates.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.heads.errors import WrongInput
from headstart.heads.paths import Prompt
from headstart.heads.sampling import Sampling
from headstart.heads.target import TargetLoader
from headstart.trainer.generation import Generator, Request
from headstart.trainer.progress import Progress
from headstart.trainer.similarity import NEAR, NearIndex, grams

SAMPLING = Sampling(temperature=1.0, top_p=0.95)
MAX_TOKENS = 96  # a user turn that has not ended by then is not kept
MIN_WORDS = 4
MAX_FOREIGN = 0.02  # share of characters that are not readable ASCII; above it, small models are babbling
MIN_DISTINCT = 0.5  # share of distinct words in a turn that does not go round in circles
ROUND = 256  # turns sampled before the filters are asked how many are still missing
MAX_ROUNDS = 8  # times the rounds that would do if every turn were kept

ROUTES = ("chat", "code")
MARK = "\u2063user turn\u2063"

_CODE = re.compile(
    r"```|\b(code|coding|function|python|java|javascript|typescript|c\+\+|c#|html|css|sql|bash|shell script|regex|"
    r"algorithm|program that|program to|script that|script to|class named|api|json|compiler|array of|linked list)\b",
    re.IGNORECASE,
)


@dataclass
class Synthesis:
    """Prompts the target wrote, and why its other turns were not kept."""

    prompts: list[Prompt] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    num_sampled: int = 0


class Unfit(Exception):
    """Why a sampled turn is not kept."""


def synthesize(
    load_target: TargetLoader, number: int, seed: int, known: Sequence[Prompt], routes: Sequence[str] = ()
) -> Synthesis:
    """Up to `number` distinct user turns written by the target, the same ones for the same seed.

    Args:
        known: prompts of every split; a turn that is near one of them is not kept.
        routes: keep only these of chat and code; none keeps both.

    Raises:
        WrongInput: no route is left, or the chat template does not show where a user turn begins.
    """
    wanted = [route for route in ROUTES if not routes or route in routes]
    if not wanted:
        raise WrongInput(
            f"prompts.num_synthesized: found routes {', '.join(routes)}, expected chat or code among them: the target "
            "writes no others.\nSet it to 0, or add one of them to prompts.routes."
        )
    prefix_ids, end = user_turn(load_target)
    filters = Filters(load_target.tokenizer.all_special_tokens, end, wanted, known)
    found = Synthesis()
    progress = Progress("synthesis", number)
    for texts in sampled_turns(load_target, prefix_ids, number, seed):
        before = len(found.prompts)
        for text in texts:
            found.num_sampled += 1
            try:
                prompt = filters.check(text)
            except Unfit as reason:
                found.reasons[str(reason)] += 1
                continue
            found.prompts.append(prompt)
            if len(found.prompts) == number:
                break
        progress.add(0, len(found.prompts) - before)
        if len(found.prompts) == number:
            break
    return found


def user_turn(load_target: TargetLoader) -> tuple[list[int], str]:
    """Token ids up to the start of an empty user turn, and the text that ends such a turn."""
    tokenizer: Any = load_target.tokenizer
    load_target.render(Prompt("chat", ({"role": "user", "content": MARK},)))  # refuses a target without template
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    prefix, mark, suffix = text.partition(MARK)
    if not mark or not prefix.strip():
        raise WrongInput(
            f"prompts.num_synthesized: found a chat template of {load_target.facts.name} that does not say where a "
            "user turn begins, expected one that does.\nSet it to 0 and bring prompts of your own."
        )
    lines = suffix.strip().splitlines()
    return tokenizer(prefix, add_special_tokens=False)["input_ids"], lines[0] if lines else ""


def sampled_turns(load_target: TargetLoader, prefix_ids: list[int], number: int, seed: int) -> Iterator[list[str]]:
    """Rounds of sampled turns, special tokens included; the text of one that did not end is empty.

    A round always has `ROUND` turns: in bfloat16 the batch they share is part of what makes a seed repeat.
    """
    target = load_target()
    generator = Generator(target, SAMPLING, MAX_TOKENS, ROUND // 4, len(prefix_ids) + MAX_TOKENS, seed)
    for round_ in range(MAX_ROUNDS * -(-number // ROUND)):
        requests = [Request(f"synthesis {round_}/{i}", prefix_ids) for i in range(ROUND)]
        replies = generator.generate(requests)
        yield [target.tokenizer.decode(reply.token_ids) if reply.finish_reason == "stop" else "" for reply in replies]


def readable(character: str) -> bool:
    return character.isascii() and (character.isprintable() or character in "\n\t")


class Filters:
    """What a sampled turn has to pass."""

    def __init__(self, specials: list[str], end: str, routes: Sequence[str], known: Sequence[Prompt]) -> None:
        self._specials = specials
        self._end = end
        self._routes = routes
        self._index = NearIndex.of(known)

    def check(self, text: str) -> Prompt:
        """The turn as a prompt.

        Raises:
            Unfit: the first filter that it does not pass.
        """
        content = self._content(text)
        words = content.split()
        if len(words) < MIN_WORDS:
            raise Unfit("too short")
        if sum(not readable(character) for character in content) > MAX_FOREIGN * len(content):
            raise Unfit("not ASCII")
        if len(set(words)) < MIN_DISTINCT * len(words):
            raise Unfit("repeats itself")
        route = "code" if _CODE.search(content) else "chat"
        if route not in self._routes:
            raise Unfit("another route")
        prompt = Prompt(route, ({"role": "user", "content": content},))
        found = grams(content)
        similarity, _ = self._index.closest(found)
        if similarity == 1.0:
            raise Unfit("the same request again")
        if similarity > NEAR:
            raise Unfit("near-duplicate")
        self._index.add(found)
        return prompt

    def _content(self, text: str) -> str:
        """The turn without what ends it."""
        if not text:
            raise Unfit(f"not ended after {MAX_TOKENS} tokens")
        if self._end:
            text = text.split(self._end)[0]
        for special in self._specials:
            text = text.removesuffix(special)
        if any(special in text for special in self._specials):
            raise Unfit("special tokens inside")
        return text.strip()
