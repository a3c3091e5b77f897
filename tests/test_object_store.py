"""Stages kept in an object store: what is there is computed nowhere again, and whatever is not whole there is made again."""

import json
import re
import shutil

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from headstart.heads import object_store
from headstart.heads.errors import StoreFailed, WrongInput
from headstart.heads.object_store import ObjectStore
from headstart.heads.store import MANIFEST, STAGES, Stage, read_json, write_json
from headstart.heads.target import TargetLoader
from headstart.launch import cli
from headstart.launch.recipe import find_recipe, load_recipe
from headstart.launch.run import RunFolder
from headstart.launch.stages import run_traffic

RECIPE = [
    "prompts.num_train=8",
    "prompts.num_validation=3",
    "prompts.num_heldout=3",
    "traffic.max_new_tokens=5",
    "traffic.slots=2",
    "traffic.chunk=4",
]


class Failing(MemoryFileSystem):
    """A store in memory that stops taking files after some, and answers some reads only when they are asked again."""

    protocol = "failing"
    store, pseudo_dirs = {}, [""]
    puts_left, refusals = 10**9, 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("failing://", "memory://"))

    def put_file(self, *arguments, **options):
        if Failing.puts_left == 0:
            raise ConnectionResetError("the network is gone")
        Failing.puts_left -= 1
        super().put_file(*arguments, **options)

    def cat_file(self, *arguments, **options):
        if Failing.refusals:
            Failing.refusals -= 1
            raise TimeoutError("slow down")
        return super().cat_file(*arguments, **options)


register_implementation("failing", Failing, clobber=True)


def never(loader, dtype):
    raise AssertionError("the target was loaded")


def make(root, *settings, load_by=None):
    """Prompts, replies and states of a small recipe under `root`; the content of every recorded file."""
    path = find_recipe("smoke")
    recipe = load_recipe(path, [*RECIPE, *settings])
    targets, run = TargetLoader(recipe.target, [1, 2]), RunFolder(root / "run")
    if load_by is not None:
        targets.load_by(load_by)
    run.folder.mkdir(parents=True, exist_ok=True)
    run_traffic(recipe, path, run, targets)
    return contents(root / STAGES)


def contents(folder):
    found = {}
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        stage = Stage(manifest.parent, read_json(manifest))
        assert stage.damaged() == []
        found |= {f"{manifest.parent.name}/{name}": (manifest.parent / name).read_bytes() for name in stage.outputs}
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder that is a store, the root that was made with it, and what both hold."""
    folder = tmp_path_factory.mktemp("kept")
    whole = make(folder / "first", f"run.store=file://{folder / 'store'}")
    assert len(whole) == 2 + 2 * 4  # files of prompts; parts and shards
    assert contents(folder / "store") == whole
    return folder / "store", folder / "first", whole


def test_what_a_store_has_is_computed_nowhere_again(kept, tmp_path):
    store, first, whole = kept
    assert make(tmp_path / "second", f"run.store=file://{store}", load_by=never) == whole
    for manifest in store.glob(f"*/{MANIFEST}"):
        assert (tmp_path / "second" / STAGES / manifest.parent.name / MANIFEST).read_bytes() == manifest.read_bytes()
    assert make(first, load_by=never) == whole  # and the store is in no key


def test_damage_in_a_store_is_named_and_made_again(kept, tmp_path, capsys):
    store, _, whole = kept
    shutil.copytree(store, damaged := tmp_path / "damaged")
    (shard,) = damaged.glob("features-*/shard-00001.safetensors")
    (part,) = damaged.glob("traffic-*/part-00003.parquet")
    content = bytearray(shard.read_bytes())
    content[-40] ^= 1
    shard.write_bytes(content)
    part.unlink()
    assert make(tmp_path / "root", f"run.store=file://{damaged}") == whole == contents(damaged)
    told = capsys.readouterr().out
    for name in ("shard-00001.safetensors", "part-00003.parquet"):
        assert f"{name} missing or damaged, put aside" in told
    (tmp_path / "root" / STAGES / shard.parent.name / shard.name).unlink()
    assert make(tmp_path / "root", f"run.store=file://{damaged}", load_by=never) == whole


def test_states_of_other_replies_are_not_taken(kept, tmp_path, capsys):
    store, _, whole = kept
    shutil.copytree(store, mixed := tmp_path / "mixed")
    (manifest,) = mixed.glob(f"features-*/{MANIFEST}")
    value = read_json(manifest)
    value["outputs"]["shard-00002.safetensors"]["replies"] = "of a machine of another kind"
    write_json(manifest, value)
    assert make(tmp_path / "root", f"run.store=file://{mixed}") == whole == contents(mixed)
    assert "shard-00002.safetensors of other replies" in capsys.readouterr().out


@pytest.mark.parametrize("puts", [2, 9])
def test_a_run_that_loses_its_store_loses_nothing_and_goes_on_anywhere(kept, tmp_path, monkeypatch, puts):
    whole, url = kept[2], f"run.store=failing://{puts}"
    monkeypatch.setattr(object_store, "PAUSE", 0)
    monkeypatch.setattr(Failing, "puts_left", puts)
    with pytest.raises(StoreFailed, match="ConnectionResetError: the network is gone"):
        make(tmp_path / "here", url)
    here = contents(tmp_path / "here" / STAGES)
    named = {
        f"{name.split('/')[2]}/{output}"
        for name, file in Failing.store.items()
        if name.startswith(f"/{puts}/") and name.endswith(MANIFEST)
        for output in json.loads(file.getvalue())["outputs"]
    }
    there = {name.removeprefix(f"/{puts}/"): file.getvalue() for name, file in Failing.store.items()}
    assert {name: there[name] for name in named}.items() <= here.items() <= whole.items()
    monkeypatch.setattr(Failing, "puts_left", 10**9)
    monkeypatch.setattr(Failing, "refusals", 2)
    assert make(tmp_path / "elsewhere", url) == whole
    assert make(tmp_path / "here", url, load_by=never) == whole


def test_a_store_that_cannot_be_used_is_refused_before_anything_is_computed(tmp_path, capsys):
    (tmp_path / "file").touch()
    for url, told in [
        ("nowhere://bucket", "Protocol not known: nowhere"),
        ("file:///proc/heads", "cannot be used"),
        (f"file://{tmp_path}/file/heads", "cannot be used"),
    ]:
        assert cli.run(["train", "smoke", f"run.root={tmp_path / 'runs'}", f"run.store={url}"]) == 2
        message = capsys.readouterr().err
        assert "run.store" in message
        assert told in message
    assert not (tmp_path / "runs").exists()


def test_a_command_that_loses_its_store_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(object_store, "PAUSE", 0)
    monkeypatch.setattr(Failing, "puts_left", 1)
    command = ["train", "smoke", *RECIPE, f"run.root={tmp_path}", "run.store=failing://lost"]
    monkeypatch.setattr("sys.argv", ["headstart", *command])
    assert cli.run(command) == 1
    message = capsys.readouterr().err
    assert "\nerror: failing://lost cannot be used: ConnectionResetError: the network is gone\n" in message
    assert "to continue from here: " in message
    assert message.rstrip().endswith("run.store=failing://lost")


def test_a_plan_says_what_comes_from_a_store(kept, tmp_path, capsys, monkeypatch):
    store, first, whole = kept
    monkeypatch.chdir(tmp_path)
    size = sum(len(content) for name, content in whole.items() if name.startswith("traffic"))
    shutil.copytree(first, tmp_path / "copy")
    (tmp_path / "none").mkdir()
    for root, url, told in [
        (tmp_path, store, f"complete there; 4 files come, {size / 1e6:.2f} MB"),
        ("copy", tmp_path / "none", f"0 files come, 0.00 MB; 4 files of here go there, {size / 1e6:.2f} MB"),
    ]:
        assert cli.run(["check", "smoke", "--dry-run", *RECIPE, f"run.root={root}", f"run.store=file://{url}"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "store: traffic" in line]
        assert line.endswith(told)


def test_a_store_is_probed_and_left_as_it_was(tmp_path):
    ObjectStore(f"file://{tmp_path}/new").check()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"key": "another"}, "of the key 'another', expected"),
        ({"schema": "headstart.manifest/9"}, "found 'headstart.manifest/9'"),
        ({"outputs": {"../../recipe.yaml": {}}}, "found the file '../../recipe.yaml', expected names without folders"),
    ],
)
def test_a_manifest_of_something_else_is_refused(kept, tmp_path, change, told):
    (manifest,) = kept[0].glob(f"traffic-*/{MANIFEST}")
    value = read_json(manifest)
    (tmp_path / "traffic").mkdir()
    write_json(tmp_path / "traffic" / MANIFEST, value | change)
    with pytest.raises(WrongInput, match=re.escape(told)):
        ObjectStore(f"file://{tmp_path}").copy_of("traffic").manifest(value["key"])


@pytest.mark.parametrize("url", ["s3://KEY:SE/CRET@bucket/heads", "s3://bucket/heads?key=SECRET", "bucket/SECRET"])
def test_keys_and_passwords_are_no_part_of_a_recipe(url, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"run: {{store: '{url}'}}\n")
    with pytest.raises(WrongInput, match="run.store: found a text that is no plain URL") as refused:
        load_recipe(tmp_path / "mine.yaml")
    assert "CRET" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket/heads", "abfs://heads@account.example/runs", "webhdfs://node:50070/heads", "file:///mnt/heads"]
)
def test_plain_urls_are_taken(url):
    assert load_recipe(find_recipe("smoke"), [f"run.store={url}"]).run.store == url
