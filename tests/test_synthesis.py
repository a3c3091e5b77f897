"""Prompts that the target writes itself: where they start, what is kept of them, and that a seed repeats."""

from pathlib import Path

import pytest

from headstart.heads.errors import WrongInput
from headstart.heads.paths import Prompt
from headstart.heads.settings import TargetSettings
from headstart.heads.target import TargetLoader
from headstart.trainer.prompts import gather, make_prompts, prompt_inputs, read_prompts
from headstart.trainer.settings import PromptSettings
from headstart.trainer.synthesis import Filters, Unfit, synthesize, user_turn

END = "<|im_end|>"
SPECIALS = ["<|im_start|>", END, "<|endoftext|>"]


@pytest.fixture(scope="module")
def tiny_loader() -> TargetLoader:
    return TargetLoader(TargetSettings(model="tiny", dtype="float32", device="cpu"))


def kept(text: str, known: str = "", routes: tuple[str, ...] = ("chat", "code")) -> Prompt:
    others = [Prompt("chat", ({"role": "user", "content": known},))] if known else []
    return Filters(SPECIALS, END, routes, others).check(text)


def test_the_prefix_and_a_turn_are_what_the_template_makes_of_that_turn(tiny_loader):
    prefix_ids, end = user_turn(tiny_loader)
    tokenizer = tiny_loader.tokenizer
    ids = prefix_ids + tokenizer("Why is the sea salty?", add_special_tokens=False)["input_ids"]
    ids += tokenizer(end, add_special_tokens=False)["input_ids"]
    rendered = tiny_loader.render(Prompt("chat", ({"role": "user", "content": "Why is the sea salty?"},)))
    assert rendered[: len(ids)] == ids


def test_a_good_turn_loses_what_ends_it_and_gets_its_route():
    prompt = kept(f"  Can you help me plan a birthday party?{END}")
    assert prompt.messages == ({"role": "user", "content": "Can you help me plan a birthday party?"},)
    assert prompt.route == "chat"
    assert kept(f"Write a Python function that adds two numbers.{END}").route == "code"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not ended after 96 tokens"),
        (f"Hi there!{END}", "too short"),
        (f"что такое любовь и зачем она нужна{END}", "not ASCII"),
        (f"tell \x03 me \x04 about \x05 it{END}", "not ASCII"),
        (f"the cat the cat the cat the cat the cat{END}", "repeats itself"),
        (f"What is <|im_start|> good for in a template?{END}", "special tokens inside"),
        (f"Tell me a story about a brave little fox.{END}", "the same request again"),
        (f"Please tell me a story about a brave little fox.{END}", "near-duplicate"),
    ],
)
def test_an_unfit_turn_is_refused_with_its_reason(text, reason):
    with pytest.raises(Unfit, match=reason):
        kept(text, known="Tell me a story about a brave little fox.")


def test_a_turn_of_an_unwanted_route_is_refused():
    with pytest.raises(Unfit, match="another route"):
        kept(f"Write a Python function that adds two numbers.{END}", routes=("chat",))


def test_a_turn_is_kept_once():
    filters = Filters(SPECIALS, END, ("chat", "code"), [])
    filters.check(f"Why do cats purr at night?{END}")
    with pytest.raises(Unfit, match="the same request again"):
        filters.check(f"why do cats purr, at night{END}")


def test_routes_the_target_cannot_write_are_refused(tiny_loader):
    with pytest.raises(WrongInput, match="expected chat or code"):
        synthesize(tiny_loader, 1, 0, [], ["maths"])


def test_written_prompts_join_the_training_split_and_a_seed_repeats(tmp_path: Path, tiny_loader):
    settings = PromptSettings(routes=["chat"], num_train=4, num_validation=2, num_heldout=2, num_synthesized=1)
    stage = make_prompts(settings, tmp_path, tmp_path, 1, tiny_loader)
    prompts = read_prompts(stage.folder)
    found = gather(settings, tmp_path).prompts
    written = [prompt for prompt in prompts if prompt not in found]
    assert len(written) == 1
    assert written[0].split == "train"
    assert [prompt for prompt in prompts if prompt not in written] == found
    assert written == [
        Prompt(p.route, p.messages) for p in synthesize(tiny_loader, 1, 1, found, settings.routes).prompts
    ]

    made = (stage.folder / "prompts.jsonl").stat().st_mtime_ns
    assert make_prompts(settings, tmp_path, tmp_path, 1, tiny_loader).folder == stage.folder
    assert (stage.folder / "prompts.jsonl").stat().st_mtime_ns == made
    assert prompt_inputs(settings, tmp_path, 2, tiny_loader) != prompt_inputs(settings, tmp_path, 1, tiny_loader)
    with pytest.raises(WrongInput, match="no target"):
        make_prompts(settings, tmp_path, tmp_path, 1)
