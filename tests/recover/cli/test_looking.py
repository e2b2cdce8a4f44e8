"""Commands that show generations (ls, show, verify, diff): locally, at a URL, damaged, during a
write.
"""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    PublishedCopy,
    SaveLoadMeta,
    TrainEngineConfig,
    WeightUpdateMeta,
)
from holdfast.engine.hf.versions import version_path, write_version
from holdfast.recover.cli.folders import Folder
from holdfast.recover.cli.runs import Run, read_generation
from holdfast.recover.cli.show import _describe_engine, _SmallFiles
from holdfast.recover.storage.generations import GenerationStore
from holdfast.utils.errors import CheckpointNotFoundError
from holdfast.utils.files import file_digest, remove_folder
from holdfast.utils.manifest import read_manifest
from tests.engine.hf_models import tiny_model
from tests.engine.seeing import write_seeing_folder
from tests.recover.cli.commands import answer, flip_byte, holdfast

pytestmark = pytest.mark.timeout(120)


def test_ls_tells_steps_sizes_metrics_ranks_and_why_each_is_kept(finished: Path) -> None:
    found = answer("ls", finished)["generations"]
    assert [entry["step"] for entry in found] == [7, 5, 3, 1]
    assert [entry["kept"] for entry in found] == [
        ["newest", "last 2", "every 4 steps"],
        ["last 2"],
        ["every 4 steps"],
        ["best 1 by reward"],
    ]
    for entry in found:
        manifest = json.loads((Path(entry["where"]) / "manifest.json").read_bytes())
        assert entry["bytes"] == sum(file["bytes"] for file in manifest["files"].values())
        assert (
            entry["metrics"] == {"reward": 1.0 / (1 + entry["step"])} and entry["world_size"] == 2
        )
    code, out, _ = holdfast("ls", finished)
    assert code == 0 and "newest, last 2" in out and "reward 0.125" in out
    last = found[0]
    assert (
        f"{last['epoch']}, {last['epoch_step']}/{last['steps_per_epoch']}" in out
        and "epoch, step" in out
    )


def test_ls_takes_the_recover_folder_too_and_names_runs_below_another_folder(
    finished: Path,
) -> None:
    assert answer("ls", finished / "recover") == answer("ls", finished)
    code, _, err = holdfast("ls", finished.parents[1])
    assert code == 2 and str(finished) in err


def test_ls_tells_what_is_at_the_mirror(finished: Path) -> None:
    found = answer("ls", finished, "--mirror", "recorded")["generations"]
    assert {entry["step"]: entry["mirror"] for entry in found} == {
        7: "copied",
        5: "copied",
        3: "no copy",
        1: "no copy",
    }


def test_ls_tells_of_half_written_damaged_and_refused_generations(
    run: Path, store: GenerationStore
) -> None:
    staging = store.open_staging(9)
    (staging / "part").write_bytes(b"x" * 1000)
    newest, second, third, _ = store.generations()
    (newest.path / "data.pt").unlink()
    store.quarantine(third, "a test")
    found = answer("ls", run)
    assert found["being_written"] == [{"step": 9, "bytes": 1000}]
    assert [entry["step"] for entry in found["generations"]] == [7, 5, 1]
    assert "data.pt is missing" in found["generations"][0]["problem"]
    assert found["generations"][1]["problem"] is None and second.step == 5
    assert found["rejected"] == [".rejected-global_step_3-a-test"]


def test_ls_of_a_run_that_has_just_begun_is_empty(tmp_path: Path) -> None:
    (tmp_path / "recover.lock").touch()
    assert answer("ls", tmp_path)["generations"] == []
    assert holdfast("ls", tmp_path) == (0, f"{tmp_path / 'recover'} has no generation yet\n", "")


def test_a_folder_recover_with_other_things_in_it_is_no_run(tmp_path: Path) -> None:
    recover = tmp_path / "e" / "t" / "recover"
    recover.mkdir(parents=True)
    for path in (tmp_path / "e" / "t", recover):
        assert holdfast("ls", path) == (0, f"{recover} has no generation yet\n", "")
    (recover / "__init__.py").touch()
    for path in (tmp_path / "e" / "t", recover, tmp_path):
        code, out, err = holdfast("ls", path)
        assert (code, out) == (2, "") and err == (
            f"error: {path} is not the folder of a run: it has neither generations nor a recover/ "
            "for them\n"
        )


def test_a_generation_that_the_run_deletes_while_it_is_read_is_looked_up_again(
    run: Path, store: GenerationStore
) -> None:
    read: list[str] = []

    def interrupted(folder: Folder) -> int:
        read.append(folder.name)
        if len(read) == 1:
            remove_folder(store.path_of(7))
        return folder.info().last_step_info.global_step

    assert read_generation(f"{run}@newest", interrupted) == 5 and read == [
        "global_step_7",
        "global_step_5",
    ]
    read.clear()
    remove_folder(store.path_of(5))
    store.path_of(3).rename(store.path_of(7))
    with pytest.raises(CheckpointNotFoundError, match="no generation of step 7"):
        read_generation(f"{run}@7", interrupted)


class _RetiresStep7(Folder):
    """A folder whose step 7 is removed by its run as soon as a command has found it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if path.name == "global_step_7":
            remove_folder(path)


@pytest.mark.parametrize("command", ["verify", "export", "diff"])
def test_a_command_reads_the_next_generation_if_the_newest_is_removed_meanwhile(
    command: str, run: Path, store: GenerationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.recover.cli.runs.Folder", _RetiresStep7)
    options = {"verify": [], "export": ["--to", run / "x"], "diff": [f"{run}@5"]}[command]
    found = answer(command, f"{run}@newest", *options)
    assert not store.path_of(7).exists()
    if command == "verify":
        assert [Path(each["where"]).name for each in found["folders"]] == ["global_step_5"]
    elif command == "export":
        assert (run / "x" / "model.safetensors").stat().st_size > 10_000
    else:
        assert found["differences"] == []


def test_the_newest_generation_is_looked_up_again_if_it_is_gone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = iter([[], [9, 7], [], [7]])  # listing a folder is not atomic
    monkeypatch.setattr(Run, "steps", lambda _: next(listed))
    assert Run(str(run)).newest().name == "global_step_7"


def test_the_folder_of_a_run_may_have_a_line_break_in_its_name(run: Path, tmp_path: Path) -> None:
    trial = run.rename(tmp_path / "two\nlines")
    assert answer("show", f"{trial}@7")["generation"]["step"] == 7


def test_show_tells_what_a_generation_holds(finished: Path) -> None:
    found = answer("show", f"{finished}@5", "--tensors")
    assert found["generation"]["step"] == 5 and found["generation"]["world_size"] == 2
    sizes = {"d": 2, "r": 1, "c": 1, "t": 1, "e": 1}
    engine = found["engines"]["default"]
    assert (
        found["generation"]["mesh"] == {"default": "d2r1c1t1e1"}
        and engine["counters"]["mesh"] == sizes
    )
    assert read_manifest(finished / "recover" / "global_step_5")["mesh"] == {"default": sizes}
    assert engine["optimizer_steps"] == 6 and engine["kinds"]["model"]["elements"] == 19104
    assert (
        engine["param_groups"][0]["lr"] == engine["lr"]
        and len(engine["param_groups"][0]["params"]) == 24
    )
    assert engine["scheduler"]["last_epoch"] == engine["schedule_step"] == 6
    (embedding,) = (
        each for each in engine["tensors"] if each["name"] == "model.model.embed_tokens.weight"
    )
    assert (embedding["shape"], embedding["dtype"], embedding["shards"]) == ([15, 32], "float32", 2)
    assert {name: part["objects"] for name, part in found["processes"].items()} == {
        "rank_00000": ["meter"],
        "rank_00001": ["meter"],
    }
    assert (
        found["data"]["states"][0] | {"epoch": 0, "cursor": 24, "seed": 3}
        == found["data"]["states"][0]
    )
    code, out, _ = holdfast("show", f"{finished}@newest")
    assert code == 0 and "Parameter groups" in out and "global_step_7" in out
    assert (
        "last_epoch" in out and "\n_" not in out and "lr_lambdas" not in out
    )  # torch's own attributes


@pytest.mark.slow
def test_show_tells_the_tower_of_a_model_that_sees_from_its_language_model(tmp_path: Path) -> None:
    write_seeing_folder(tmp_path / "model", "qwen3_vl")
    settings: Any = {
        "path": str(tmp_path / "model"),
        "dtype": "float32",
        "device": "cpu",
        "train_vision": True,
    }
    engine = FSDPEngine(TrainEngineConfig(**settings))
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 4, 4))
    engine.save(SaveLoadMeta(str(tmp_path / "out" / "actor"), "dcp", True))
    name = "actor/.metadata"
    files = {name: {"digest": file_digest(tmp_path / "out" / name)}}
    found = _describe_engine(_SmallFiles(Folder(tmp_path / "out"), files), "actor", None, False)[
        "kinds"
    ]
    for module in ("visual", "language_model"):
        n_elements = sum(
            param.numel() for param in engine.model.get_submodule(f"model.{module}").parameters()
        )
        assert found[f"model, {module}"]["elements"] == n_elements
    engine.destroy()


def test_verify_finds_every_generation_sound_and_its_exports_whole(finished: Path) -> None:
    found = answer("verify", finished)["folders"]
    assert len(found) == 4 and not any(report["problems"] for report in found)
    assert sum(report["bytes"] for report in found) > 2_000_000
    (export,) = answer("verify", finished / "hf" / "global_step_7")["folders"]
    assert export["digests"] is False and export["problems"] == []


@pytest.mark.parametrize(
    "name", ["default/__1_0.distcp", "default/.metadata", "state/rank_00001.pt", "data.pt"]
)
def test_verify_finds_a_flipped_byte_in_any_file_and_says_so_with_its_exit_code(
    name: str, run: Path
) -> None:
    flip_byte(run / "recover" / "global_step_5" / name, -500)
    reports = {
        Path(report["where"]).name: report["problems"]
        for report in answer("verify", run, code=1)["folders"]
    }
    assert [folder for folder, problems in reports.items() if problems] == ["global_step_5"]
    assert reports["global_step_5"][0].startswith(f"{name} has digest")
    code, out, _ = holdfast("verify", run)
    assert code == 1 and out.count("sound") == 3 and "DAMAGED" in out


@pytest.mark.parametrize("name", ["manifest.json", "recover_info.json"])
def test_a_flipped_byte_in_the_small_files_is_found_by_all_who_read_them(
    name: str, run: Path
) -> None:
    flip_byte(run / "recover" / "global_step_7" / name, 30)
    for command in ("verify", "show", "export"):
        options = ("--to", run / "x") if command == "export" else ()
        assert holdfast(command, f"{run}@7", *options)[0] == 1
    assert not (run / "x").exists()


def test_verify_takes_published_versions_with_and_without_changes(tmp_path: Path) -> None:
    model, copy = tiny_model("llama"), PublishedCopy()
    for version in range(3):
        with torch.no_grad():
            next(model.parameters()).view(-1)[:2].add_(1.0)
        meta = WeightUpdateMeta("disk", str(tmp_path), delta=True, anchor_interval=1)
        write_version(model, meta, version, copy=copy)
    full, changes, anchor = (version_path(tmp_path, version) for version in range(3))
    found = {folder: answer("verify", folder)["folders"][0] for folder in (full, changes, anchor)}
    assert all(report["problems"] == [] and report["digests"] for report in found.values())
    assert (
        found[changes]["changes_from"].startswith("0-xxh3_128:")
        and "changes_from" not in found[anchor]
    )
    assert found[changes]["files"] == 1 and found[anchor]["files"] == found[full]["files"] + 1
    assert "sound, holds the changes from version 0" in holdfast("verify", changes)[1]
    (at_a_url,) = answer("verify", f"file://{changes}")["folders"]
    assert at_a_url["changes_from"] == found[changes]["changes_from"] and at_a_url["problems"] == []
    (at_a_url,) = answer("verify", f"file://{full}")["folders"]
    assert at_a_url["bytes"] == found[full]["bytes"] and at_a_url["problems"] == []
    for folder in (changes, anchor):
        flip_byte(folder / "delta" / "rank_00000.safetensors", -1)
        (report,) = answer("verify", folder, code=1)["folders"]
        assert report["problems"][0].startswith("delta/rank_00000.safetensors has digest")
    flip_byte(full / "model.safetensors", -1)
    assert answer("verify", full, code=1)["folders"][0]["problems"][0].startswith(
        "model.safetensors has digest xxh3_128t"
    )


def test_verify_finds_a_weight_file_that_was_cut_in_an_export(run: Path) -> None:
    weights = run / "hf" / "global_step_3" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    (report,) = answer("verify", weights.parent, code=1)["folders"]
    assert "model.safetensors" in report["problems"][0]


def test_verify_takes_a_run_in_a_folder_with_an_at_sign(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "lr@3" / "t@5"))
    assert len(answer("verify", run)["folders"]) == 4
    assert len(answer("verify", f"{run}@7")["folders"]) == 1


def test_verify_of_a_file_that_cannot_be_read_goes_on_with_the_other_generations(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(path: Path) -> str:
        if path.parent.name == "global_step_5":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return file_digest(path)

    monkeypatch.setattr(
        "holdfast.utils.manifest.file_digest", digest
    )  # a failing disk cannot be simulated here
    reports = answer("verify", run, code=1)["folders"]
    assert [len(report["problems"]) for report in reports] == [0, 1, 0, 0]
    assert "Input/output error" in reports[1]["problems"][0]


def test_verify_of_a_folder_that_was_renamed_says_so(run: Path) -> None:
    (run / "recover" / "global_step_7").rename(run / "recover" / "global_step_8")
    assert "holds step 7" in str(answer("verify", f"{run}@8", code=1))


def test_diff_of_a_generation_with_a_copy_finds_nothing_and_with_another_every_tensor(
    finished: Path,
) -> None:
    assert answer("diff", f"{finished}@7", f"{finished}@newest", "--exit-code")["differences"] == []
    found = answer("diff", f"{finished}@5", f"{finished}@7", "--exit-code", code=1)["differences"]
    moved = {one["name"]: one for one in found}
    weight = moved["default/model.model.layers.0.mlp.up_proj.weight"]
    assert weight["kind"] == "values" and weight["elements"] == weight["of"] == 2048
    assert 0 < weight["largest"] < 0.1 and 0 < weight["relative"] < 1
    steps = moved["default/optim.state.model.norm.weight.step"]
    assert (steps["elements"], steps["largest"]) == (1, 2.0)


def test_diff_tells_one_changed_element_by_how_much(run: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    other = Path(shutil.copytree(run / "hf" / "global_step_7", run / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors["model.norm.weight"][3] += 0.5
    tensors["model.layers.0.input_layernorm.weight"][:] = torch.nan
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    found = {one["name"]: one for one in answer("diff", f"{run}@7", other)["differences"]}
    assert found.keys() == {"model.norm.weight", "model.layers.0.input_layernorm.weight"}
    assert (found["model.norm.weight"]["elements"], found["model.norm.weight"]["largest"]) == (
        1,
        0.5,
    )
    assert found["model.layers.0.input_layernorm.weight"]["largest"] is None  # NaN


@pytest.mark.parametrize(
    ("dtype", "one", "other", "kind"),
    [
        ("float32", 0.0, -0.0, "bits"),
        ("int64", 2**60, 2**60 + 1, "bits"),
        ("complex64", 1 + 1j, 1 + 2j, "values"),
    ],
)
def test_diff_tells_what_differs_where_float64_cannot_show_it(
    dtype: str, one: complex, other: complex, kind: str, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    for name, value in (("a", one), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        tensor = torch.tensor([1, value, 1], dtype=getattr(torch, dtype))
        save_file({"weight": tensor}, tmp_path / name / "model.safetensors", {"format": "pt"})
    (found,) = answer("diff", tmp_path / "a", tmp_path / "b", "--exit-code", code=1)["differences"]
    assert (found["kind"], found["elements"], found["of"]) == (kind, 1, 3)
    assert (
        holdfast("diff", tmp_path / "a", tmp_path / "a")[1]
        == "all 1 tensors are equal to the bit\n"
    )


@pytest.mark.slow
def test_ls_show_verify_and_diff_read_copies_at_a_url(finished: Path, at_s3: str) -> None:
    here, there = answer("ls", finished)["generations"], answer("ls", at_s3)["generations"]
    for key in ("step", "bytes", "metrics", "world_size", "epoch"):
        assert [entry[key] for entry in there] == [entry[key] for entry in here]
    shown = answer("show", f"{at_s3}@5")
    assert shown | {"where": ""} == answer("show", f"{finished}@5") | {"where": ""}
    assert not any(report["problems"] for report in answer("verify", at_s3)["folders"])
    assert answer("diff", f"{at_s3}/global_step_5", f"{finished}@5")["differences"] == []


@pytest.mark.slow
def test_verify_finds_a_flipped_byte_at_a_url(finished: Path, at_s3: str, tmp_path: Path) -> None:
    from tests.recover.mirrors import storage

    fs, root = storage(at_s3.replace("/cli/", "/damaged/"))
    for step in (5, 7):
        source = finished / "recover" / f"global_step_{step}"
        for path in (path for path in source.rglob("*") if path.is_file()):
            fs.put_file(str(path), f"{root}/{source.name}/{path.relative_to(source).as_posix()}")
    data = bytearray(fs.cat_file(f"{root}/global_step_7/default/__0_0.distcp"))
    data[-700] ^= 4
    fs.pipe_file(f"{root}/global_step_7/default/__0_0.distcp", bytes(data))
    reports = answer("verify", f"s3://{root}", code=1)["folders"]
    assert [bool(report["problems"]) for report in reports] == [True, False]
    code, _, err = holdfast("diff", f"s3://{root}@7", f"{finished}@7")
    assert code == 1 and "damaged" in err


def test_a_url_that_has_nothing_or_does_not_answer_is_one_message(
    s3: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = holdfast("ls", "s3://bucket/nothing/here")
    assert (code, out, err) == (0, "s3://bucket/nothing/here has no generation yet\n", "")
    assert holdfast("verify", "s3://bucket/nothing/here")[0] == 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    code, _, err = holdfast("ls", "s3://bucket/nothing/there")
    assert code == 2 and "failed 3 times" in err and "Traceback" not in err
