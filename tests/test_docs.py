"""docs/checkpoint-format.md is true: its tables are compared with a new run, and its code is
run.
"""

import io
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import fsspec.core
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from holdfast.engine import PublishedCopy, WeightUpdateMeta
from holdfast.engine.api import SaveLoadMeta
from holdfast.engine.hf.save import save_hf
from holdfast.engine.hf.versions import version_path, write_version
from holdfast.recover import GenerationStore
from holdfast.recover.engines import RankEngines
from holdfast.recover.storage.generations import OWNER_NAME, TRACKER_NAME
from holdfast.utils.files import remove_folder
from holdfast.utils.json_lines import read_lines
from holdfast.utils.manifest import FORMAT_VERSION, MANIFEST_NAME
from tests.engine.models import build_reference, tiny_qwen3, write_model_folder
from tests.helpers import run_ranks, unique_name
from tests.recover.runs import Diary, Job, Tiny, make_handler, make_loader, step_info, stream

pytestmark = pytest.mark.timeout(120)

DOCUMENT = Path(__file__).parents[1] / "docs" / "checkpoint-format.md"
TEXT = DOCUMENT.read_text()

PLACEHOLDERS = {
    "engine": r"[A-Za-z0-9_-]+",
    "hex": r"[0-9a-f]+",
    "id": r"[0-9a-f]{8}",
    "k": r"\d{5}",
    "n": r"\d+",
    "number": r"\d{8,}",
    "parent": r"[0-9a-f]{8}",
    "rank": r"\d{5}",
    "reason": r"[a-z0-9-]+",
    "step": r"\d+",
    "version": r"\d{8,}",
}


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    below = re.split(rf"^#+ {re.escape(title)}\n", TEXT, maxsplit=1, flags=re.MULTILINE)[1]
    return re.split(r"^#+ ", below, maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> list[str]:
    """Names in backticks in the first column of the section's table."""
    cells = re.findall(r"^\| ([^|]*) \|", section(title), re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert named, f"no table under {title!r}"
    return named


def pattern(name: str) -> re.Pattern[str]:
    """A regular expression for a name with placeholders. For a folder it matches the contents
    too.
    """
    parts = re.split(r"<(\w+)>", name.replace("...", "<any>"))
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = (PLACEHOLDERS.get(part, ".+") for part in parts[1::2])
    return re.compile("".join(parts) + (".+" if name.endswith("/") else ""))


def assert_same(
    documented: Iterable[str], found: Iterable[str], *, not_made_here: Iterable[str] = ()
) -> None:
    """Check that every name found is documented, and every documented name is found."""
    patterns, found = {name: pattern(name) for name in documented}, list(found)
    assert [name for name in found if not any(p.fullmatch(name) for p in patterns.values())] == []
    missing = {name for name, p in patterns.items() if not any(map(p.fullmatch, found))}
    assert missing == set(not_made_here)


def fields(value: Mapping[str, Any], names: Mapping[str, str], prefix: str = "") -> set[str]:
    """Dotted paths of the leaves. A key below one in ``names`` is a placeholder with the given
    name.
    """
    found = set()
    for key, item in value.items():
        path = f"{prefix}{names.get(prefix, key)}"
        found |= fields(item, names, f"{path}.") if isinstance(item, dict) else {path}
    return found


def files_below(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def _write_trial(
    rank: int, world_size: int, root: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Run two steps that write all kinds of files. Returns weights and cursor after the last."""
    trial, loader, job = (
        Path(root) / "e" / "t",
        make_loader("own", rank, world_size),
        Job(f"{root}/model"),
    )
    handler = make_handler(root, freq_steps=1, mirror_url=f"file://{root}/mirror")
    handler.register("meter", job.meter)
    handler.register("diary", Diary())
    handler.load(job.engine, loader)
    for step, ids in zip(range(2), stream(loader), strict=False):
        job.train(ids)
        handler.dump(job.engine, step_info(step), loader, metrics={"reward": 0.5})
    handler.close()
    engine = job.engines["default"]
    engine.save(SaveLoadMeta(str(trial / "hf" / "global_step_1"), "hf", with_optim=False))
    engine.save(SaveLoadMeta(f"{root}/dcp", "dcp", with_optim=True))
    engine.update_weights(WeightUpdateMeta("disk", str(trial / "weights"), version=2))
    params: Any = engine.model.named_parameters()
    weights = {name: param.full_tensor().detach() for name, param in params}
    return weights, loader.state_dict()


class _OneRank:
    """The driver's side, with its one rank in the same process."""

    world_size = 1

    def __init__(self, target: RankEngines) -> None:
        self._target = target

    def run_all(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return [fn(self._target, *args)]

    run_in_background = run_all


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trial with every kind of file, including quarantined ones and the leftovers of a kill."""
    root = tmp_path_factory.mktemp("run")
    write_model_folder(root / "model", tiny_qwen3())
    weights, cursor = run_ranks(_write_trial, 2, str(root))[0]
    torch.save({"weights": weights, "cursor": cursor}, root / "expected.pt")

    handler, tiny = make_handler(root / "ray"), Tiny()
    ranks = _OneRank(RankEngines({"default": tiny.state}))
    handler.load(ranks)
    handler.dump(ranks, step_info(0), force=True)
    handler.close()

    store = GenerationStore(root / "e" / "t" / "recover")
    newest, oldest = store.generations()
    shutil.copytree(newest.path, store.open_staging(7), dirs_exist_ok=True)
    store.pin(newest.step)
    store.quarantine(oldest, "file data.pt is missing (1 in all)")
    doomed = shutil.copytree(newest.path, store.root / "global_step_5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", _is_killed)
        with pytest.raises(KeyboardInterrupt):
            remove_folder(doomed)
    return root / "e" / "t"


def _is_killed(path: Path) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def generation(trial: Path) -> Path:
    return trial / "recover" / "global_step_1"


def test_files_of_a_trial_are_those_in_the_tables(trial: Path) -> None:
    driver = trial.parents[1] / "ray" / "e" / "t"
    during_a_rename = [f"recover/.{name}.<hex>" for name in (TRACKER_NAME, OWNER_NAME)]
    here = [name for name in files_below(trial) if name.startswith("recover")]
    assert_same(rows("Files"), [*here, *files_below(driver)], not_made_here=during_a_rename)
    exported = [
        path.name
        for folder in ("hf", "weights")
        for path in (trial / folder).rglob("*")
        if path.is_file()
    ]
    folders = [f"{path.relative_to(trial).as_posix()}/x" for path in trial.glob("[hw]*/*")]
    sharded = {"model-<k>-of-<n>.safetensors", "model.safetensors.index.json"}
    left_by_a_kill = {
        ".staging-<name>-<hex>/",
        ".retired-v<version>-<hex>/",
        "hf/.staging-<step>-<hex>/",
    }
    left_by_a_kill |= {
        "hf/.retired-global_step_<step>-<hex>/",
        "hf/.rejected-global_step_<step>-<reason>/",
    }
    named = [n for n in rows("Hugging Face exports and published weights") if n != "save"]
    assert_same(named, exported + folders, not_made_here=sharded | left_by_a_kill | {"delta/"})
    copied = files_below(trial.parents[1] / "mirror" / "e" / "t")
    marks = {".copying-global_step_<step>", ".part-<file>"}  # exist only during a copy
    marks.add(".damaged-global_step_<step>")
    assert_same(rows("The mirror"), copied, not_made_here=marks)


def test_every_file_of_an_export_to_a_url_is_in_the_table(tmp_path: Path) -> None:
    model, found = write_model_folder(tmp_path / "model", tiny_qwen3()), []
    for name, options in {"one": {}, "several": {"max_shard_size_bytes": 8000}}.items():
        save_hf(model, url := f"memory://{unique_name(tmp_path)}/{name}", **options)
        fs, root = fsspec.core.url_to_fs(url)
        found += [path.removeprefix(f"{root}/") for path in fs.find(root)]
    title = "Hugging Face exports at a URL"
    assert_same(
        [name for name in rows(title) if name != "max_shard_size_bytes"],
        found,
        not_made_here=[".exporting"],
    )


def test_the_fields_of_the_json_files_are_those_in_the_tables(
    trial: Path, generation: Path
) -> None:
    manifest = json.loads((generation / MANIFEST_NAME).read_bytes())
    names = {"files.": "<file>", "weight_versions.": "<engine>", "mesh.": "<engine>"}
    assert fields(manifest, names) == set(rows(MANIFEST_NAME))
    info = json.loads((generation / "recover_info.json").read_bytes())
    names = {
        "engines.": "<engine>",
        "weight_versions.": "<engine>",
        "meshes.": "<engine>",
        "metrics.": "<metric>",
        "logs.": "<object>",
        "rng.": "<process>",
        "switches.": "<switch>",
    }
    assert fields(info, names) == set(rows("recover_info.json"))
    versions = [
        int(version) for version in re.findall(r"^\| (\d+) \|", section("Versions"), re.MULTILINE)
    ]
    assert manifest["format_version"] == 2 and max(versions) == FORMAT_VERSION
    assert f"version {FORMAT_VERSION}\n" in TEXT.splitlines(keepends=True)[0]
    holder = json.loads((trial / "recover.lock").read_bytes())
    assert (trial / "recover.lock").stat().st_size == 512 and "512 bytes" in section("recover.lock")
    assert [key for key in holder if f'"{key}"' not in section("recover.lock")] == []
    exported = "Hugging Face exports and published weights"
    (published,) = (trial / "weights").glob(f"v*/{MANIFEST_NAME}")
    assert json.loads(published.read_bytes())["format_version"] == FORMAT_VERSION
    for path in (published, trial.parents[1] / "dcp" / MANIFEST_NAME):
        assert [
            key for key in json.loads(path.read_bytes()) if f"`{key}`" not in section(exported)
        ] == []


def test_the_files_and_codes_of_a_delta_are_those_in_the_tables(tmp_path: Path) -> None:
    model, copy, codes = build_reference(tiny_qwen3(vocab_size=5000)), PublishedCopy(), set[str]()
    for version, every in enumerate((1, 1000, 70, 2)):
        with torch.no_grad():
            model.get_input_embeddings().weight.view(-1)[::every].add_(1.0)  # type: ignore[operator]
        meta = WeightUpdateMeta("disk", str(tmp_path), delta=True)
        write_version(
            model, meta, version, copy=copy, extra_files={"weights_probe.json": b"%d" % version}
        )
        if version:
            codes |= load_file(
                version_path(tmp_path, version) / "delta" / "rank_00000.safetensors"
            ).keys()
    delta = version_path(tmp_path, version) / "delta"
    named = rows("Deltas")
    assert {name for name in named if name.isalnum()} == {
        code.rpartition(".")[2] for code in codes
    } - {"values"}
    assert_same([name for name in named if not name.isalnum()], files_below(delta))
    found = fields(json.loads((delta / MANIFEST_NAME).read_bytes()), {"files.": "<file>"})
    assert [name for name in found if f"`{name.partition('.<')[0]}`" not in section("Deltas")] == []


def test_the_fields_of_the_journal_are_those_in_the_table(trial: Path) -> None:
    entries = list(read_lines(trial / "journal.jsonl", "event"))
    assert [entry["event"] for entry in entries] == [
        "attempt",
        "start",
        "step",
        "save",
        "step",
        "save",
        "end",
    ]
    for entry in entries:
        (row,) = re.findall(
            rf"^\| `{entry['event']}` \| (.*) \|$", section("journal.jsonl"), re.MULTILINE
        )
        assert [
            key for key in entry if key not in ("event", "time") and f"`{key}`" not in row
        ] == []


def test_the_keys_of_the_tensor_files_are_those_in_the_tables(generation: Path) -> None:
    keys = dcp.FileSystemReader(generation / "default").read_metadata().state_dict_metadata
    title = "`<engine>/`: a torch.distributed.checkpoint folder"
    others = ["dcp.optim_plain", "dcp.optim_local", "dcp.module_state.rank_<rank>"]
    others += [
        "dcp.base",
        "dcp.base_sample.rank_<rank>",
        "dcp.adapters",
    ]  # tested in tests/engine/lora/test_checkpoints.py
    assert_same(rows(title), keys, not_made_here=others)
    process = torch.load(generation / "state" / "rank_00001.pt", weights_only=True)
    assert_same(
        rows("state"), fields(process, {}), not_made_here=["rng.cuda", "ranks_with_same_data"]
    )
    data = torch.load(generation / "data.pt", weights_only=True)
    assert data.keys() == set(re.findall(r'"(\w+)": [b\[]', section("data.pt")))
    assert (
        set(rows("data.pt")) == torch.load(io.BytesIO(data["states"][0]), weights_only=True).keys()
    )
    for name, tensor in process["rng"].items():
        assert f"{str(tensor.dtype).removeprefix('torch.')} `[{tensor.shape[0]}]`" in section(
            "state"
        ), name


def code(marker: str) -> str:
    """The only Python block in the document that contains ``marker``."""
    (block,) = (
        block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if marker in block
    )
    return block


def test_a_generation_is_verified_by_hand_and_every_flipped_byte_is_found(
    generation: Path, tmp_path: Path
) -> None:
    check = compile(code("import xxhash"), DOCUMENT.name, "exec")
    exec(check, {"generation": generation})
    copy = shutil.copytree(generation, tmp_path / generation.name)
    for name in files_below(copy):
        data = (copy / name).read_bytes()
        for at in (0, len(data) // 2, len(data) - 1):
            (copy / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(AssertionError):
                exec(check, {"generation": copy})
        (copy / name).write_bytes(data)
    exec(check, {"generation": copy})
    (copy / "state" / "extra").touch()
    with pytest.raises(AssertionError):
        exec(check, {"generation": copy})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_generation_is_read_by_stock_torch(trial: Path, generation: Path) -> None:
    scope: dict[str, Any] = {"generation": generation}
    exec(compile(code("dcp.load("), DOCUMENT.name, "exec"), scope)
    expected = torch.load(trial.parents[1] / "expected.pt", weights_only=True)
    assert scope["weights"].keys() == expected["weights"].keys()
    assert all(
        torch.equal(scope["weights"][name], tensor) for name, tensor in expected["weights"].items()
    )
    assert scope["cursor"] == expected["cursor"] and scope["schedule"]["last_epoch"] == 2
    assert scope["process"]["user"].keys() == {"meter", "diary"}


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if not link.startswith("http")]
    titles = re.findall(r"^#+ (.*)", TEXT, re.MULTILINE)
    headings = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    anchors = {link[1:] for link in links if link.startswith("#")}
    assert anchors and anchors <= headings
    files = {link.partition("#")[0] for link in links} - {""}
    assert [file for file in files if not (DOCUMENT.parent / file).exists()] == []
