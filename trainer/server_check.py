"""Whether servers hold the very target: before many prompts are sent, and again with every chunk of replies.

A server of another model, quantisation, tokenizer or version answers just as fluently, and a head trained on its replies
serves badly. The target in this process scores what a server said: the log-probabilities have to be its own, and a greedy
reply its own choice or a near tie.
"""

from collections.abc import Sequence

import numpy as np

from headstart.heads.errors import WrongInput
from headstart.heads.sampling import Sampling
from headstart.heads.target import Target
from headstart.trainer.dialects import Asked, BadAnswer
from headstart.trainer.generation import Reply, Request
from headstart.trainer.recorded import score_with_gaps
from headstart.trainer.servers import ADVICE, Away, Broken, Connection, Refused, Servers

NUM_PROMPTS = 4
NUM_TOKENS = 32
# In nats. Two engines in bfloat16 differ by some hundredths in the mean; another model of the family by far more.
MAX_MEAN_DIFFERENCE = 0.1
MAX_GAP = 0.5  # between the target's likeliest token and the one said greedily: logits in bfloat16 are rounded to 1/8
# One reply among many may be another model's, of one server or since one was restarted.
MAX_REPLY_DIFFERENCE, MIN_TOKENS = 0.5, 8  # mean of a reply's tokens, from so many on
# Sum of a greedy reply's gaps: near ties are few, and another model gives as much away in a dozen tokens.
MAX_REPLY_GAP = 4.0


def mean_difference(told: Sequence[Sequence[float | None]], own: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Mean |difference| of told log-probabilities from ours, and over how many tokens; (0, 0) where none are told."""
    pairs = [pair for reply in zip(told, own, strict=True) for pair in zip(*reply, strict=True) if pair[0] is not None]
    return (float(np.mean([abs(a - b) for a, b in pairs if a is not None])), len(pairs)) if pairs else (0.0, 0)


def check_difference(
    told: Sequence[Sequence[float | None]], own: Sequence[Sequence[float]], where: str, asked: Asked
) -> None:
    """Refuse replies whose log-probabilities are not the target's.

    Raises:
        WrongInput: with what to look at.
    """
    difference, number = mean_difference(told, own)
    most = MAX_MEAN_DIFFERENCE
    if difference <= most:
        each = [mean_difference([reply], [ours]) for reply, ours in zip(told, own, strict=True)]
        difference, number = max((one for one in each if one[1] >= MIN_TOKENS), default=(0.0, 0))
        most = MAX_REPLY_DIFFERENCE
    if difference <= most:
        return
    hint = "It holds another model, version or quantisation than target.model: serve that one."
    if asked.settings.engine == "sglang":
        hint += " (At a temperature SGLang tells raw log-probabilities only with SGLANG_RETURN_ORIGINAL_LOGPROB=1.)"
    raise WrongInput(
        f"traffic.server: {where} tells log-probabilities that differ from the target's by {difference:.3f} nats in "
        f"the mean of {number:,} tokens, expected at most {most:g}.\n{hint}"
    )


def check_servers(servers: Servers, target: Target, requests: Sequence[Request]) -> None:
    """Ask every server a few prompts and hold the answers against the target.

    Raises:
        WrongInput: a server is away, lists other models, gives no token ids, or does not hold the target.
    """
    for url in servers.asked.settings.urls:
        connection = Connection(url, servers.asked.settings.timeout)
        try:
            check_listed(connection, servers.asked)
            answered = answers(connection, servers, requests[:NUM_PROMPTS])
        except (Away, Broken) as error:
            raise WrongInput(
                f"traffic.server.urls: found no server at {url} ({error}).\nStart it, or name the address it listens at."
            ) from None
        except (Refused, BadAnswer) as error:
            status = error.status if isinstance(error, Refused) else 0
            advice = ADVICE.get(status, "Compare traffic.server with what is served there.")
            raise WrongInput(f"traffic.server: {url} {error}.\n{advice}") from None
        finally:
            connection.close()
        final = [x.final for x in target.read([np.array(q.token_ids + r.token_ids) for q, r in answered])]
        said_from = [x[len(q.token_ids) - 1 :] for x, (q, _) in zip(final, answered, strict=True)]
        scored = [score_with_gaps(target, x, r.token_ids) for x, (_, r) in zip(said_from, answered, strict=True)]
        told = [reply.logprobs for _, reply in answered]
        check_difference(told, [own for own, _ in scored], url, servers.asked)
        check_evidence(told, url, servers.sampling)
        if servers.sampling.temperature == 0:
            check_choices([gaps for _, gaps in scored], url, MAX_GAP)


def answers(connection: Connection, servers: Servers, requests: Sequence[Request]) -> list[tuple[Request, Reply]]:
    """Replies to a few prompts; a prompt that the server refuses says nothing about the others.

    Raises:
        Refused: every prompt is.
        Away, Broken, BadAnswer: no server, or none whose answers can be recorded.
    """
    answered, refused = [], None
    for request in requests:
        try:
            answered.append((request, ask(connection, servers, request)))
        except Refused as error:
            refused = error
    if refused is not None and not answered:
        raise refused
    return answered


def check_listed(connection: Connection, asked: Asked) -> None:
    """The server lists the model, and is the engine it is said to be."""
    settings = asked.settings
    content = connection.call("/v1/models")
    listed = content.get("data") if isinstance(content, dict) else None
    models = [model for model in listed or [] if isinstance(model, dict)]
    names = [str(model.get("id")) for model in models]
    if settings.model not in names:
        raise WrongInput(
            f"traffic.server.model: found {settings.model!r}, expected a model that {connection.url} lists: "
            f"{', '.join(names) or 'none'}."
        )
    owner = models[names.index(settings.model)].get("owned_by")
    if owner in ("vllm", "sglang", "llamacpp") and owner != settings.engine:
        raise WrongInput(
            f"traffic.server.engine: found {settings.engine}, but {connection.url} is {owner}: traffic.server.engine={owner}"
        )


def ask(connection: Connection, servers: Servers, request: Request) -> Reply:
    asked = servers.asked
    limit = min(NUM_TOKENS, servers.max_new_tokens, asked.facts.max_position - len(request.token_ids))
    payload = asked.dialect.payload(request, limit, servers.sampling, asked)
    return asked.reply(connection.call(asked.dialect.path, payload), request, limit)


def check_evidence(told: Sequence[Sequence[float | None]], where: str, sampling: Sampling) -> None:
    """Refuse drawn replies that no log-probability comes with: any model could have said them.

    Raises:
        WrongInput: with what to do.
    """
    every = [p for reply in told for p in reply]
    if sampling.temperature > 0 and every and all(p is None for p in every):
        raise WrongInput(
            f"traffic.server: {where} tells no log-probabilities, and nothing else shows of replies drawn at temperature "
            f"{sampling.temperature:g} that they are the target's.\nLet it tell them (the engine's own server does), or "
            "ask for greedy replies: traffic.temperature=0"
        )


def check_choices(gaps: Sequence[Sequence[float]], where: str, most: float = float("inf")) -> None:
    """Refuse greedy replies that are not the target's choice, but for near ties.

    Args:
        gaps: of every token of every reply, the nats by which the target finds its likeliest token likelier.
        most: of a single token; rounding may make one of very many tokens large, so only a few are held against it.

    Raises:
        WrongInput: with what to look at.
    """
    every = [gap for reply in gaps for gap in reply] or [0.0]
    if max(every) > most:
        what = f"a token that the target finds {max(every):.2f} nats less likely than its own choice"
    elif (mean := float(np.mean(every))) > MAX_MEAN_DIFFERENCE:
        what = f"tokens that the target finds {mean:.2f} nats less likely than its own choices, in the mean"
    elif max(map(sum, gaps), default=0.0) > MAX_REPLY_GAP:
        what = "a whole reply that the target would not give"
    else:
        return
    raise WrongInput(
        f"traffic.server: {where} says {what}, expected its choices or near ties.\n"
        "It holds another model or changes its logits (penalties, a bias, a grammar): serve target.model plainly."
    )
