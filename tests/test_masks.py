"""Laws of loss masks: of a conversation made elsewhere, exactly what the target would have said is its reply."""

import random

import pytest

from headstart.heads.errors import WrongInput
from headstart.heads.paths import Prompt
from headstart.heads.rendering import render
from headstart.trainer.masks import BadReply, mark_reply
from tests.chat_styles import STYLES, byte_tokenizer, chatml, style_facts, style_tokenizer

LONG = 10**6


def turn(role: str, content: str, **fields) -> dict:
    return {"role": role, "content": content, **fields}


def styled(name: str):
    """Style, tokenizer and facts of a target of that style."""
    style = STYLES[name]
    tokenizer = style_tokenizer(style.template, style.stop, style.bos)
    return style, tokenizer, style_facts(tokenizer, [style.stop])


def marked(name: str, *messages: dict, limit: int = LONG, **kwargs):
    """Texts of prompt and reply as marked, and the mark; the last message is the reply."""
    _, tokenizer, facts = styled(name)
    found = mark_reply(facts, tokenizer, Prompt("chat", messages[:-1], template_kwargs=kwargs), messages[-1], limit)
    return tokenizer.decode(found.prompt_ids), tokenizer.decode(found.reply_ids), found


def refused(name: str, *messages: dict, **kwargs) -> str:
    with pytest.raises(BadReply) as error:
        marked(name, *messages, **kwargs)
    return str(error.value)


def random_conversation(random_: random.Random, style) -> list[dict]:
    """Turns of random words, short and repeated on purpose, so that texts occur in several places."""
    words = [
        "tea",
        "Yes.",
        "I",
        "model",
        "user\n",
        "assistant",
        "<b>",
        "Ünïcode 茶",
        "95",
        "  ",
        "INST",
        "a=b;\n\n",
        ": I",
    ]

    def text() -> str:
        return "".join(random_.choice(words) + random_.choice(["", " "]) for _ in range(random_.randint(1, 5))) + "."

    turns = [turn("system", text())] if style.system and random_.random() < 0.5 else []
    for _ in range(random_.randint(1, 3)):
        turns += [turn("user", text()), turn("assistant", text())]
    return turns


@pytest.mark.parametrize("name", STYLES)
def test_the_mask_marks_exactly_what_the_target_says_in_random_conversations(name):
    """By construction: header, then the reply and its end, whatever stands in the turns (cases 2, 3, 13, 25)."""
    style, tokenizer, facts = styled(name)
    random_ = random.Random(name)
    thinking = {"deepseek": "I see.</think>", "qwen": "<think>\nI see.\n</think>\n\n"}.get(name, "")
    for _ in range(25):
        *messages, reply = random_conversation(random_, style)
        reply["content"] = thinking + reply["content"]
        prompt = Prompt("chat", tuple(messages))
        found = mark_reply(facts, tokenizer, prompt, reply, LONG)
        assert found.prompt_ids == render(facts, tokenizer, prompt)
        assert tokenizer.decode(found.prompt_ids).endswith(style.header)
        said = tokenizer.decode(found.reply_ids).removeprefix(style.said)
        assert said.strip() == reply["content"].strip() + style.end
        assert (found.finish_reason, found.notes) == (
            "stop",
            ["the chat template drops the think block of a reply: it is kept as the row has it"] * (name == "deepseek"),
        )
        if name != "deepseek":  # whose template would lose the reasoning
            whole = tokenizer.apply_chat_template([*messages, reply], tokenize=True, return_dict=True)["input_ids"]
            assert whole[: len(found.prompt_ids) + len(found.reply_ids)] == found.prompt_ids + found.reply_ids


@pytest.mark.parametrize("name", [name for name in STYLES if name not in ("deepseek", "qwen")])
def test_a_reply_that_repeats_the_conversation_is_told_apart(name):
    """Cases 13 and 25: user text, earlier reply and reply are the same."""
    same = "Boil water."
    prompt, said, _ = marked(
        name, turn("user", same), turn("assistant", same), turn("user", same), turn("assistant", same)
    )
    assert (prompt.count(same), said.count(same)) == (3, 1)


def test_a_template_without_tags_gives_the_mask_of_one_with_tags():
    """Cases 2 and 3."""
    turns = (
        turn("system", "Be kind."),
        turn("user", "Tea?"),
        turn("assistant", "Yes."),
        turn("user", "Now?"),
        turn("assistant", "No."),
    )
    without, tagged = marked("chatml", *turns)[2], marked("chatml-tags", *turns)[2]
    assert without == tagged
    _, tokenizer, _ = styled("chatml-tags")
    mask = tokenizer.apply_chat_template(list(turns), return_dict=True, return_assistant_tokens_mask=True)[
        "assistant_masks"
    ]
    begin = len(tagged.prompt_ids)
    assert mask[begin : begin + len(tagged.reply_ids)] == [1] * len(tagged.reply_ids)
    assert not any(mask[begin + len(tagged.reply_ids) :])


HEADER, ASKED = "{{- '<|im_start|>' + message.role + '\n' }}", "{{- message.content + '<|im_end|>\n' }}"


def tagged(text: str) -> str:
    return "{% generation %}" + text + "{% endgeneration %}"


TAGGED = {
    "closes before the end of turn": (chatml("inside"), "close before the end of turn, which is trained"),
    "holds the header": (
        chatml("outside").replace(HEADER, tagged(HEADER)),
        "hold a part of the generation prompt, which is not trained",
    ),
    "marks the user": (chatml().replace(ASKED, tagged(ASKED)), "mark no token of the reply"),
}


@pytest.mark.parametrize("case", TAGGED)
def test_generation_tags_that_disagree_are_named(case):
    """Case 12, and tags on the wrong side: the target emits the end of turn, and never the prompt."""
    template, message = TAGGED[case]
    tokenizer = style_tokenizer(template, "<|im_end|>")
    arguments = (
        style_facts(tokenizer, ["<|im_end|>"]),
        tokenizer,
        Prompt("chat", (turn("user", "Tea?"),)),
        turn("assistant", "Yes."),
    )
    if "no token" in message:
        with pytest.raises(BadReply, match=message):
            mark_reply(*arguments, LONG)
        return
    found = mark_reply(*arguments, LONG)
    assert tokenizer.decode(found.reply_ids) == "Yes.<|im_end|>"
    assert [message in note for note in found.notes] == [True]


def test_a_cut_reply_keeps_its_tokens_and_gets_no_stop_token():
    """Cases 5 and 19."""
    turns = turn("user", "Count."), turn("assistant", " ".join(str(i) for i in range(40)))
    whole = marked("chatml", *turns)[2]
    cut = marked("chatml", *turns, limit=20)[2]
    assert (cut.reply_ids, cut.finish_reason) == (whole.reply_ids[:20], "length")
    assert marked("chatml", *turns, limit=len(whole.reply_ids))[2].finish_reason == "stop"
    said = turn("assistant", turns[1]["content"], finish_reason="length")
    recorded = marked("chatml", turns[0], said)[2]
    assert (recorded.reply_ids, recorded.finish_reason) == (whole.reply_ids[:-1], "length")
    tokenizer = style_tokenizer(chatml().replace("<|im_end|>", " <|im_end|>"), "<|im_end|>")  # a blank before each end
    prompt = Prompt("chat", turns[:1])
    padded = mark_reply(style_facts(tokenizer, ["<|im_end|>"]), tokenizer, prompt, said, LONG)
    assert (tokenizer.decode(padded.reply_ids), padded.finish_reason) == (turns[1]["content"], "length")


PLAIN, REASONED = turn("assistant", "Yes."), turn("assistant", "Yes.", reasoning_content="Hm.")
CLOSE_ONLY, PAIR = (turn("assistant", text + "Hm.\n</think>\n\nYes.") for text in ("", "<think>\n"))
OFF: dict = {"enable_thinking": False}
# (style, template kwargs, reply): the end of the prompt, the whole reply; or the reason of refusal
THINKING = {
    "off, plain reply": (("qwen", OFF, PLAIN), ("</think>\n\n", "Yes.<|im_end|>")),
    "on, plain reply": (("qwen", {}, PLAIN), "made with thinking off"),
    "off, reasoning": (("qwen", OFF, REASONED), "writes the conversation otherwise"),
    "a field of its own": (("qwen", {}, REASONED), ("assistant\n", "<think>\nHm.\n</think>\n\nYes.<|im_end|>")),
    "opened by the prompt, close only": (("deepseek", {}, CLOSE_ONLY), ("<think>\n", "Hm.\n</think>\n\nYes.<｜end｜>")),
    "opened by the prompt, both tags": (("deepseek", {}, PAIR), ("<think>\n", "Hm.\n</think>\n\nYes.<｜end｜>")),
    "opened by the prompt, never closed": (("deepseek", {}, PLAIN), "never closes it"),
    "dropped by the template": (("deepseek", {}, REASONED), "never closes it"),
    "another channel": (
        ("harmony", {}, REASONED),
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        ),
    ),
}


@pytest.mark.parametrize("case", THINKING)
def test_think_tokens_of_the_prompt_are_prompt_and_those_of_the_reply_are_reply(case):
    """Cases 8, 10 and 11."""
    (name, kwargs, reply), expected = THINKING[case]
    if isinstance(expected, str):
        assert expected in refused(name, turn("user", "Tea?"), reply, **kwargs)
        return
    prompt, said, _ = marked(name, turn("user", "Tea?"), reply, **kwargs)
    assert prompt.endswith(expected[0])
    assert said == expected[1]


@pytest.mark.parametrize("text", ["<think>Hm.</think>Yes.", "<think>\nHm.</think>Yes.", "Hm.</think>Yes."])
def test_a_block_that_the_prompt_opens_is_not_opened_again(text):
    """Case 11: with a template that writes replies as they are, whether or not they have the tag, and a line break."""
    template = chatml().replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    tokenizer = style_tokenizer(template, "<|im_end|>")
    facts, prompt = style_facts(tokenizer, ["<|im_end|>"]), Prompt("chat", (turn("user", "Tea?"),))
    found = mark_reply(facts, tokenizer, prompt, turn("assistant", text), LONG)
    assert tokenizer.decode(found.prompt_ids).endswith("assistant\n<think>\n")
    assert tokenizer.decode(found.reply_ids) == "Hm.</think>Yes.<|im_end|>"


def test_reasoning_that_the_template_ignores_is_told():
    """Case 10."""
    _, said, found = marked("llama3", turn("user", "Tea?"), turn("assistant", "Yes.", reasoning_content="Hm."))
    assert said == "Yes.<|eot_id|>"
    assert found.notes == ["the chat template ignores reasoning_content, so replies are without it"]


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'], ids=["object", "text"])
def test_calls_are_the_reply_and_results_are_the_prompt(arguments):
    """Case 17: through the target's own template, in one form however the file holds them."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    asked, called = turn("user", "Weather?"), turn("assistant", "", tool_calls=[call])
    for name in ("llama3", "mistral"):
        _, said, found = marked(name, asked, called)
        assert '"city": "Oslo"' in said
        assert found.finish_reason == "stop"
    prompt, said, _ = marked("mistral", asked, called, turn("tool", "-3"), turn("assistant", "Cold."))
    assert "weather" in prompt
    assert "-3" in prompt
    assert said == " Cold.</s>"
    assert "ignores tool_calls (weather)" in refused("chatml", asked, called)


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if style.bos])
def test_there_is_exactly_one_token_of_the_beginning(name):
    """Cases 20 and 21: whole, as a prompt, and where the reply is tokenised by itself."""
    style, _, _ = styled(name)
    base = byte_tokenizer("ASSISTANT: I see.\n" * 9, words=False)
    tokenizer = style_tokenizer(style.template, style.stop, style.bos, base)
    tokenizer.add_bos_token = True
    facts = style_facts(tokenizer, [style.stop])
    thinking = "Hm.</think>" * (name == "deepseek")
    found = mark_reply(
        facts, tokenizer, Prompt("chat", (turn("user", "Tea?"),)), turn("assistant", thinking + "I see."), LONG
    )
    assert (found.prompt_ids + found.reply_ids).count(tokenizer.bos_token_id) == 1
    assert found.prompt_ids[0] == tokenizer.bos_token_id
    tokenizer.chat_template = "{{- bos_token }}" + style.template
    with pytest.raises(WrongInput, match="twice at the beginning"):
        render(facts, tokenizer, Prompt("chat", (turn("user", "Tea?"),)))


def test_a_token_that_straddles_header_and_reply_is_split_where_an_engine_splits_it():
    """Case 26: the prompt keeps its ids, and the reply its first word."""
    template = (
        "{% for m in messages %}{{ m.role | upper + ': ' + m.content + ('</s>' if m.role == 'assistant' else '\n') }}"
        "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    tokenizer = style_tokenizer(template, "</s>", base=byte_tokenizer("ASSISTANT: I see.\n" * 9, words=False))
    facts = style_facts(tokenizer, ["</s>"])
    prompt, reply = Prompt("chat", (turn("user", "Tea?"),)), turn("assistant", "I see.")
    whole = tokenizer.apply_chat_template([*prompt.messages, reply], return_dict=True)["input_ids"]
    asked = render(facts, tokenizer, prompt)
    assert whole[: len(asked)] != asked, "no token straddles"
    found = mark_reply(facts, tokenizer, prompt, reply, LONG)
    assert found.prompt_ids == asked
    assert tokenizer.decode(found.reply_ids) == " I see.</s>"


def test_the_end_of_turn_need_not_be_the_end_of_sequence():
    """Case 13: two stop tokens, and a target that does not know its template's end of turn."""
    _, tokenizer, _ = styled("gemma")
    prompt, reply = Prompt("chat", (turn("user", "Tea?"),)), turn("assistant", "Yes.")
    both = mark_reply(style_facts(tokenizer, ["<eos>", "<end_of_turn>"]), tokenizer, prompt, reply, LONG)
    alone = mark_reply(style_facts(tokenizer, ["<eos>"]), tokenizer, prompt, reply, LONG)
    assert both.reply_ids == alone.reply_ids
    assert tokenizer.decode(alone.reply_ids) == "Yes.<end_of_turn>"
    assert (both.notes, len(alone.notes)) == ([], 1)
    assert "none of the target's stop tokens" in alone.notes[0]


REFUSED = {
    "an empty reply": ("chatml", turn("assistant", " \n")),
    "which ends it, before its last word": ("chatml", turn("assistant", "Yes.<|im_end|>No.")),
    "cannot render the reply": ("gemma", turn("system", "Yes.")),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_replies_that_the_target_could_not_have_given_are_refused(reason):
    name, reply = REFUSED[reason]
    assert reason in refused(name, turn("user", "Tea?"), reply)


BROKEN = {
    "leaves out the assistant's text": "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}",
    "changes the reply's text": "{% for m in messages %}{{ m.content | replace('Yes', 'No') }}{% endfor %}",
    "writes the conversation otherwise": "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_template_that_shows_no_boundary_gives_no_mask(reason):
    """Case 1 and 3: a reason that names the template, never a mask of nothing or of everything."""
    tokenizer = style_tokenizer(BROKEN[reason], "</s>")
    with pytest.raises(BadReply, match=reason):
        mark_reply(
            style_facts(tokenizer, ["</s>"]),
            tokenizer,
            Prompt("chat", (turn("user", "Tea?"),)),
            turn("assistant", "Yes."),
            LONG,
        )
