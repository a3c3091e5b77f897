"""What draft vocabularies cover: counted on generated tokens alone, bounded by what was seen, monotone in their size."""

from dataclasses import replace

import numpy as np

from headstart.eval.coverage import coverage_text, default_sizes, smallest_size, unseen_counts
from headstart.heads.target import TargetLoader
from headstart.heads.vocabulary import always_drafted, choose_draft_vocabulary, count_tokens, coverage
from headstart.launch import cli
from headstart.launch.recipe import dump_recipe, find_recipe, load_recipe
from headstart.trainer.traffic import make_traffic
from tests.small_decoding import make_path
from tests.test_traffic import SETTINGS, TINY, prompts_stage, some_prompts

SIZES = [8, 40, 120, 499]


def replies(seed, number=12):
    random = np.random.default_rng(seed)
    return [
        replace(make_path([400 + i, 401], (5 + random.zipf(1.5, 20) % 300).tolist(), f"{seed}/{i}"), route="ab"[i % 2])
        for i in range(number)
    ]


def test_shares_are_those_of_counting_by_hand(tiny_target):
    facts = tiny_target.facts
    train, others = replies(0), replies(1)
    text = coverage_text(train, others, SIZES, facts)
    counts_V = count_tokens(train, facts)
    for size in SIZES:
        held = set(choose_draft_vocabulary(counts_V, size, facts).tolist())
        line = next(line for line in text.splitlines() if line.startswith(f"{size} "))
        for route, told in zip(("all", "a", "b"), line.split()[3:], strict=True):
            said = [
                t for path in others if route in ("all", path.route) for t in path.token_N[path.generated_N].tolist()
            ]
            assert told == f"{np.mean([token in held for token in said]):.2%}"
    assert f"chosen from {sum(path.num_reply_tokens for path in train)} generated tokens" in text


def test_more_draft_tokens_cover_more_and_the_smallest_is_the_smallest(tiny_target):
    facts = tiny_target.facts
    counts_V, unseen_V = count_tokens(replies(0), facts), unseen_counts(replies(1), facts)["all"]

    def covered(size):
        return coverage(unseen_V, choose_draft_vocabulary(counts_V, size, facts))

    shares = [covered(size) for size in range(len(always_drafted(facts)), facts.num_tokens + 1, 7)]
    assert shares == sorted(shares)
    for share in (0.3, 0.8, 1.0):
        size = smallest_size(counts_V, unseen_V, share, facts)
        assert covered(size) >= share > covered(size - 1)


def test_the_command_reads_traffic_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stage = prompts_stage(tmp_path / "runs", some_prompts(12, ("train", "train", "validation", "heldout")))
    traffic, _ = make_traffic(TargetLoader(TINY), stage, SETTINGS, tmp_path / "runs")
    run = tmp_path / "runs" / "mine"
    run.mkdir()
    (run / "traffic").symlink_to(traffic.folder)
    recipe = load_recipe(find_recipe("smoke"))
    (run / "recipe.yaml").write_text(dump_recipe(recipe, "for a test"))
    assert cli.run(["vocab", "mine", "--sizes", "16,400"]) == cli.DONE
    told = capsys.readouterr().out
    assert "training replies" in told
    assert [line.split()[0] for line in told.splitlines() if line[:1].isdigit()] == ["16", "400"]
    assert cli.run(["vocab", "mine"]) == cli.DONE
    facts = TargetLoader(TINY).facts
    assert default_sizes(facts, recipe.head.draft_vocab_size) == sorted({256, recipe.head.draft_vocab_size} - {0})
    assert cli.run(["vocab", "mine", "--sizes", "501"]) == cli.WRONG_INPUT
    assert "--sizes = 501" in capsys.readouterr().err
    (traffic.folder / "part-00000.parquet").unlink()
    assert cli.run(["vocab", "mine"]) == cli.WRONG_INPUT
