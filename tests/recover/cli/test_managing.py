"""Commands that change something: rm, pin, mirror, export, resume-from."""

import errno
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from holdfast.recover.cli.folders import open_mirror
from holdfast.recover.cli.mirror import _push
from holdfast.recover.saving.model_files import unpacked_model_files
from holdfast.recover.storage.generations import GenerationStore, RetentionRules
from holdfast.utils.errors import CheckpointCorruptError, CheckpointNotFoundError
from holdfast.utils.folder_lock import FolderLock
from holdfast.utils.manifest import FileEntry, read_manifest, write_entry, write_manifest
from holdfast.utils.plain_values import pack_plain
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.limits import stretched
from tests.recover.cli.commands import answer, flip_byte, holdfast, start
from tests.recover.runs import Tiny, make_handler, names, run_until, step_info

pytestmark = pytest.mark.timeout(120)


def _steps(store: GenerationStore) -> list[int]:
    return [generation.step for generation in store.generations()]


def test_rm_deletes_what_it_is_told_to_after_asking(run: Path, store: GenerationStore) -> None:
    assert holdfast("rm", f"{run}@5", typed="n\n")[0] == 130
    assert _steps(store) == [7, 5, 3, 1]
    assert holdfast("rm", f"{run}@5", store.path_of(1), typed="y\n")[0] == 0
    assert _steps(store) == [7, 3] and not list(store.root.glob(".retired-*"))


def test_rm_refuses_pinned_generations_and_without_force_the_newest_sound_one(
    run: Path, store: GenerationStore
) -> None:
    flip_byte(store.path_of(7) / "manifest.json", 20)  # so 5 is the newest valid one
    store.pin(3)
    for step in (5, 3):
        code, _, err = holdfast("rm", "-y", f"{run}@{step}")
        assert code == 2 and ("newest sound" in err or "pinned" in err)
    assert holdfast("rm", "-y", "--force", f"{run}@3")[0] == 2
    assert holdfast("rm", "-y", f"{run}@7")[0] == 0
    assert holdfast("rm", "-y", "--force", f"{run}@5")[0] == 0
    assert _steps(store) == [3, 1]


def test_rm_spares_what_was_pinned_while_it_asked_even_with_force(
    run: Path, store: GenerationStore
) -> None:
    process = start("rm", "--force", f"{run}@3", stdin=subprocess.PIPE)
    assert process.stderr is not None and process.stderr.read(6) == "Delete"
    store.pin(3)
    assert (
        process.communicate("y\n", timeout=stretched(60))[0].strip() == ""
        and process.returncode == 2
    )
    assert _steps(store) == [7, 5, 3, 1]


def test_rm_names_generations_only_and_nothing_is_deleted_before_all_are_checked(
    run: Path, store: GenerationStore
) -> None:
    for bad in (run, f"{run}@6", run / "hf", f"{run}@7"):
        assert holdfast("rm", "-y", f"{run}@3", bad)[0] == 2
    assert _steps(store) == [7, 5, 3, 1]


def test_rm_and_pin_refuse_folders_that_only_have_the_name_of_a_generation(
    run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "verl_ckpts" / "global_step_40"
    (other / "actor").mkdir(parents=True)
    (tmp_path / "verl_ckpts" / "latest_checkpointed_iteration.txt").write_text("40")
    export = run / "hf" / "global_step_7"
    for command in (("rm", "-y", "--force"), ("pin",)):
        for text in (f"{other.parent}@40", other, export):
            code, _, err = holdfast(*command, text)
            assert code == 2 and "neither manifest.json nor recover_info.json" in err
    assert (other / "actor").is_dir() and (export / "config.json").is_file()
    assert not list(tmp_path.rglob(".pinned-*"))


def test_rm_deletes_a_damaged_generation_that_has_lost_its_manifest(
    run: Path, store: GenerationStore
) -> None:
    (store.path_of(3) / "manifest.json").unlink()
    assert holdfast("rm", "-y", f"{run}@3")[0] == 0
    assert _steps(store) == [7, 5, 1]


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_a_generation_that_the_disk_cannot_read_is_listed_with_its_problem_and_removed(
    options: tuple[str, ...], run: Path, store: GenerationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, read = store.path_of(7) / "manifest.json", Path.read_bytes

    def fail(path: Path) -> bytes:  # a failing disk cannot be simulated here
        if path == bad:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    found = answer("ls", run)["generations"]
    assert [entry["step"] for entry in found] == [7, 5, 3, 1]
    assert "Input/output error" in found[0]["problem"]
    assert [entry["problem"] for entry in found[1:]] == [None] * 3
    assert answer("top", run)["generation"]["step"] == 5
    code, _, err = holdfast("rm", "-y", f"{run}@5")
    assert code == 2 and "step 5 is the newest sound" in err and "Input/output error" in err
    assert answer("rm", "-y", *options, f"{run}@3", f"{run}@7")["removed"] == [
        str(store.path_of(3)),
        str(store.path_of(7)),
    ]
    assert _steps(store) == [5, 1]


def test_rm_spares_the_newest_of_a_run_in_use_even_with_force(
    run: Path, store: GenerationStore
) -> None:
    holder = _hold(run)
    try:
        assert holdfast("rm", "-y", "--force", f"{run}@7")[0] == 2
        assert holdfast("rm", "-y", f"{run}@3")[0] == 0
    finally:
        holder.stdin.close()
        holder.wait()
    assert _steps(store) == [7, 5, 1]


def _hold(run: Path) -> Any:
    """Another process that holds the lock of a run until its stdin is closed."""
    script = (
        "import sys; from holdfast.utils.folder_lock import FolderLock; "
        "FolderLock(sys.argv[1]).acquire(0); print(flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(run / "recover.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline()
    return holder


def test_a_pinned_generation_outlives_every_rule_until_it_is_unpinned(
    run: Path, store: GenerationStore
) -> None:
    assert answer("pin", f"{run}@1", f"{run}@3") == {
        "pinned": [str(store.path_of(1)), str(store.path_of(3))]
    }
    assert answer("pin", f"{run}@1")  # a second pin changes nothing
    store.delete_by_retention(RetentionRules(1))
    assert _steps(store) == [7, 3, 1]
    found = answer("ls", run)["generations"]
    assert [entry["pinned"] for entry in found] == [False, True, True] and found[2]["kept"][
        0
    ] == "pinned"
    assert holdfast("unpin", f"{run}@3")[0] == 0
    store.delete_by_retention(RetentionRules(1))
    assert _steps(store) == [7, 1]


def test_a_run_that_goes_on_keeps_what_was_pinned_meanwhile_and_its_copy(tmp_path: Path) -> None:
    mirror = {"mirror_url": f"file://{tmp_path}/m", "mirror_max_to_keep": 1}
    handler, tiny = make_handler(tmp_path, freq_steps=1, max_ckpt_to_keep=1, **mirror), Tiny()
    handler.load(tiny.state)
    for step in range(4):
        tiny.step()
        handler.dump(tiny.state, step_info(step))
        handler.wait()
        assert handler._folder.mirror is not None and handler._folder.mirror.wait(60)
        if step == 1:
            assert holdfast("pin", f"{tmp_path}/e/t@1")[0] == 0
    handler.close()
    assert names(tmp_path) == ["global_step_1", "global_step_3"]
    there = answer("mirror", "ls", tmp_path / "e" / "t")["copies"]
    assert [(row["step"], row["copy"]) for row in there] == [(3, "complete"), (1, "complete")]


def test_mirror_ls_takes_the_url_of_a_mirror_on_this_machine_and_of_a_run(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/m"
    run_until(tmp_path, 1, mirror_url=url)
    run_until(tmp_path, 2, first=1, mirror_url=url)
    run = tmp_path / "e" / "t"
    found = answer("mirror", "ls", run)
    assert [(row["step"], row["here"]) for row in found["copies"]] == [(1, True), (0, True)]
    for same in (run / "recover", f"file://{run}", f"file://{run}/recover"):
        assert answer("mirror", "ls", same) == found
    there = answer("mirror", "ls", f"{url}/e/t")
    assert there["url"] == found["url"]
    assert there["copies"] == [{**row, "here": False} for row in found["copies"]]
    assert holdfast("mirror", "ls", f"{url}/nothing")[0] == 2


def test_mirror_pull_brings_a_run_back_that_resumes_from_it(tmp_path: Path) -> None:
    digests = run_until(tmp_path / "a", 3)
    url = f"file://{tmp_path}/copies"
    assert (
        holdfast("mirror", "push", tmp_path / "a" / "e" / "t", "--step", "1", "--url", url)[0] == 0
    )
    assert answer("mirror", "pull", url, tmp_path / "b" / "e" / "t")["fetched"][0]["step"] == 1
    handler, tiny = make_handler(tmp_path / "b", freq_steps=1), Tiny()
    info = handler.load(tiny.state)
    assert info is not None and info.last_step_info.global_step == 1
    assert tiny.digest() == digests[1] and tiny.step() == digests[2]
    handler.close()
    assert holdfast("mirror", "pull", url, tmp_path / "b" / "e" / "t")[0] == 2  # it exists already
    assert holdfast("mirror", "pull", url, tmp_path / "c", "--step", "7")[0] == 2


def test_mirror_pull_refuses_the_copy_of_another_run(run: Path, tmp_path: Path) -> None:
    run_until(tmp_path / "other", 3)
    other, url = tmp_path / "other" / "e" / "t", f"file://{tmp_path}/copies"
    assert holdfast("mirror", "push", other, "--step", "2", "--url", url)[0] == 0
    before = _tree(run / "recover")
    ids = {place: answer("ls", place)["generations"][0]["run_id"] for place in (run, other)}
    code, _, err = holdfast("mirror", "pull", url, run)
    assert (
        code == 2 and f"is of run {ids[other]}, but" in err and f"belongs to run {ids[run]}" in err
    )
    assert "new folder" in err and _tree(run / "recover") == before


def test_mirror_pull_finds_the_run_of_its_folder_of_generations(tmp_path: Path) -> None:
    run_until(tmp_path / "a", 3)
    run, url = tmp_path / "a" / "e" / "t", f"file://{tmp_path}/copies"
    assert holdfast("mirror", "push", run, "--all", "--url", url)[0] == 0
    shutil.rmtree(run / "recover" / "global_step_2")
    for recover in (run / "recover", tmp_path / "b" / "e" / "t" / "recover"):
        assert holdfast("mirror", "pull", url, recover)[0] == 0
        assert (recover / "global_step_2").is_dir() and not (recover / "recover").exists()


def test_mirror_push_replaces_no_copy_of_another_run_and_deletes_nothing(
    run: Path, tmp_path: Path
) -> None:
    run_until(tmp_path / "other", 4, max_ckpt_to_keep=None)
    other, copies = tmp_path / "other" / "e" / "t", tmp_path / "copies"
    url = f"file://{copies}"
    assert holdfast("mirror", "push", run, "--step", "3", "--url", url)[0] == 0
    (copies / "global_step_0").mkdir()
    (copies / "global_step_0" / "data.pt").write_bytes(b"of a copy that somebody makes now")
    before = _tree(copies)
    code, _, err = holdfast("mirror", "push", other, "--all", "--url", url)
    assert code == 2 and "step 3" in err and "another generation" in err and _tree(copies) == before
    assert holdfast("mirror", "push", other, "--step", "2", "--url", url)[0] == 0
    assert _tree(copies).items() >= before.items()
    assert (
        holdfast("mirror", "push", run, "--step", "3", "--url", url)[0] == 0
    )  # the run's own copy, a second time


def test_nothing_is_put_into_a_generation_or_among_those_of_a_run(
    run: Path, store: GenerationStore
) -> None:
    """With an additional file, the next start would quarantine the generation as damaged."""
    generation, before = store.path_of(3), _tree(run)
    inside = f"is in {generation}, which is committed with a manifest.json"
    for command in (
        ("export", generation, "--to", generation / "hf"),
        ("convert", generation, generation / "actor_dcp", "--to", "dcp"),
        ("convert", generation, generation / "e" / "t", "--to", "generation"),
        ("mirror", "push", run, "--step", "1", "--url", f"file://{generation}"),
        ("mirror", "push", run, "--step", "1", "--url", f"file://{generation}/copies"),
        ("mirror", "pull", f"file://{run.parent.parent / 'mirror'}", generation / "run"),
    ):
        code, _, err = holdfast(*command)
        assert code == 2 and inside in err, err
    code, _, err = holdfast("mirror", "push", run, "--step", "1", "--url", f"file://{store.root}")
    assert code == 2 and f"is where the run in {run} keeps its own generations" in err
    assert _tree(run) == before and store.verify(generation)


def test_a_generation_alone_is_exported_with_the_small_files_of_its_base(
    finished: Path, tmp_path: Path
) -> None:
    base = finished.parents[1] / "model"
    generation = shutil.copytree(
        finished / "recover" / "global_step_7", tmp_path / "alone" / "global_step_7"
    )
    assert holdfast("export", generation, "--to", tmp_path / "with_base", "--config", base)[0] == 0
    code, _, err = holdfast("export", generation, "--to", tmp_path / "alone" / "out")
    assert code == 0, err
    assert _tree(tmp_path / "alone" / "out") == _tree(tmp_path / "with_base")
    AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "out")


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_a_generation_that_names_a_file_outside_of_its_folder_is_not_unpacked(
    tmp_path: Path, name: str
) -> None:
    files = {
        "config.json": torch.zeros(1, dtype=torch.uint8),
        name: torch.zeros(1, dtype=torch.uint8),
    }
    packed = pack_plain("files", {"dtype": None, "files": files})
    (tmp_path / "state").mkdir()
    write_manifest(tmp_path, [write_entry(tmp_path, "state/model_files_default.pt", packed)], {})
    refused = pytest.raises(CheckpointCorruptError, match="is no name of a file in a folder")
    with refused, unpacked_model_files(tmp_path, "default"):
        pass


def test_a_generation_of_an_older_version_needs_a_config_to_be_exported(
    run: Path, tmp_path: Path
) -> None:
    generation = shutil.copytree(
        run / "recover" / "global_step_7", tmp_path / "alone" / "global_step_7"
    )
    (generation / "state" / "model_files_default.pt").unlink()
    manifest = read_manifest(generation)
    entries = [
        FileEntry(name, entry["bytes"], entry["digest"])
        for name, entry in manifest["files"].items()
    ]
    left = [entry for entry in entries if "model_files" not in entry.name]
    (generation / "manifest.json").unlink()
    write_manifest(
        generation, left, {key: manifest[key] for key in ("run_id", "step", "world_size")}
    )
    code, _, err = holdfast("export", generation, "--to", tmp_path / "out")
    assert code == 2 and "there is no config.json in the generation" in err and "--config" in err


def test_a_folder_that_is_empty_takes_an_export(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    assert holdfast("export", f"{run}@3", "--to", tmp_path / "there")[0] == 0
    assert (tmp_path / "there" / "config.json").is_file() and (
        tmp_path / "there"
    ).stat().st_mode & 0o777 == 0o700
    code, _, err = holdfast("export", f"{run}@3", "--to", tmp_path / "there")
    assert code == 2 and "exists already" in err


def _tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_mirror_push_says_that_the_run_removed_a_generation_meanwhile(
    run: Path, store: GenerationStore, tmp_path: Path
) -> None:
    generation = store.generations()[-1]
    shutil.rmtree(generation.path)
    there = open_mirror(f"file://{tmp_path}/copies")
    with pytest.raises(CheckpointNotFoundError, match="removed it meanwhile"):
        _push(there, generation)


def test_mirror_push_leaves_the_own_mirror_of_a_run_in_use_to_its_job(run: Path) -> None:
    holder = _hold(run)
    try:
        code, _, err = holdfast("mirror", "push", run)
        assert code == 2 and "is in use by" in err
        assert holdfast("mirror", "push", run, "--url", f"file://{run}/elsewhere")[0] == 0
    finally:
        holder.stdin.close()
        holder.wait()


def test_a_lock_that_this_process_holds_is_not_lost_by_looking(run: Path) -> None:
    lock = FolderLock(run / "recover.lock")
    lock.acquire(0.0)
    assert answer("top", run)["in_use"] is True
    lock.confirm()
    lock.release()
    assert answer("top", run)["in_use"] is False


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_export_of_a_generation_is_the_one_that_the_run_has_made(
    dtype: str | None, finished: Path, tmp_path: Path
) -> None:
    options = () if dtype is None else ("--dtype", dtype, "--config", finished.parents[1] / "model")
    report = answer("export", f"{finished}@7", "--to", tmp_path / "x", *options)
    assert report["files"] == len(list((tmp_path / "x").iterdir()))
    if dtype is None:
        own = finished / "hf" / "global_step_7"
        assert _contents(tmp_path / "x") == _contents(own)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype="auto")
    assert str(model.dtype) == f"torch.{dtype or 'float32'}"


SMALL_MEMORY = """
import resource, sys
import transformers.models.qwen3.modeling_qwen3
import holdfast.recover.export.writing, holdfast.recover.ranks
from holdfast.recover.cli.main import cli
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    cli.main(sys.argv[1:])
finally:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_an_export_takes_the_memory_of_the_largest_tensor_not_of_the_model(tmp_path: Path) -> None:
    config = tiny_qwen3(hidden_size=512, layers=20)
    model = write_model_folder(tmp_path / "model", config)
    handler = make_handler(tmp_path, async_save=False)
    handler.load((model, None, None))
    handler.dump((model, None, None), step_info(0), force=True)
    handler.close()
    sizes = [parameter.nbytes for parameter in model.parameters()]
    options = (f"{tmp_path}/e/t@0", "--to", tmp_path / "x", "--config", tmp_path / "model")
    command = [sys.executable, "-c", SMALL_MEMORY, "export", *map(str, options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=stretched(60))
    assert result.returncode == 0, result.stderr
    assert sum(sizes) > 100e6 and int(result.stdout.splitlines()[-1]) < 40e6
    assert (
        _contents(tmp_path / "x")["model.safetensors"]
        == _contents(tmp_path / "model")["model.safetensors"]
    )


def _contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.slow
def test_an_export_of_a_copy_at_a_url_is_the_same(
    finished: Path, at_s3: str, tmp_path: Path
) -> None:
    config = ("--config", finished / "hf" / "global_step_3")
    assert holdfast("export", f"{at_s3}@7", "--to", tmp_path / "x", *config)[0] == 0
    assert _contents(tmp_path / "x") == _contents(finished / "hf" / "global_step_7")


def test_an_export_is_refused_where_something_is_of_another_model(
    run: Path, tmp_path: Path
) -> None:
    config = json.loads((run / "hf" / "global_step_7" / "config.json").read_text())
    for change in (
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"intermediate_size": 80},
        {"model_type": "no"},
    ):
        other = tmp_path / "other"
        other.mkdir(exist_ok=True)
        (other / "config.json").write_text(json.dumps(config | change))
        code, _, err = holdfast("export", f"{run}@7", "--to", tmp_path / "x", "--config", other)
        assert code == 2 and "config.json" in err
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    assert holdfast("export", f"{run}@7", "--to", tmp_path / "there")[0] == 2
    assert holdfast("export", f"{run}@7", "--to", tmp_path / "x", "--engine", "critic")[0] == 2
    flip_byte(run / "recover" / "global_step_7" / "default" / "__0_0.distcp", 3000)
    assert holdfast("export", f"{run}@7", "--to", tmp_path / "x")[0] == 1
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".staging*"))


def test_resume_from_says_what_to_set_and_a_run_with_that_goes_on_from_there(
    tmp_path: Path,
) -> None:
    digests = run_until(tmp_path, 4, max_ckpt_to_keep=None)
    found = answer("resume-from", f"{tmp_path}/e/t@1")
    assert (found["next_step"], found["newer"]) == (2, [3, 2])
    key, _, value = found["setting"].partition("=")
    handler, tiny = (
        make_handler(tmp_path, freq_steps=1, **{key.removeprefix("recover."): value}),
        Tiny(),
    )
    info = handler.load(tiny.state)
    assert info is not None and info.last_step_info.global_step == 1 and tiny.step() == digests[2]
    handler.close()
    assert names(tmp_path) == ["global_step_0", "global_step_1"]
    flip_byte(tmp_path / "e" / "t" / "recover" / "global_step_0" / "default" / "__0_0.distcp")
    assert holdfast("resume-from", f"{tmp_path}/e/t@0")[0] == 1


def test_resume_from_the_newest_of_a_run_with_a_mirror_says_what_to_set_too(run: Path) -> None:
    shutil.rmtree(
        run / "recover" / "global_step_7"
    )  # the mirror still has it, so a start would fetch it
    assert answer("resume-from", f"{run}@5")["mirror"].endswith("/mirror/e/t")
    code, out, _ = holdfast("resume-from", f"{run}@5")
    assert (
        code == 0
        and f"recover.resume_path={run}/recover/global_step_5" in out
        and "nothing to set" not in out
    )


def test_the_setting_of_resume_from_is_one_word_of_a_shell(run: Path, tmp_path: Path) -> None:
    spaced = shutil.copytree(run, tmp_path / "my runs" / "e" / "t")
    _, out, _ = holdfast("resume-from", f"{spaced}@5")
    setting = f"recover.resume_path={spaced}/recover/global_step_5"
    assert [setting] in map(shlex.split, out.splitlines())
    assert answer("resume-from", f"{spaced}@5")["setting"] == setting


def test_resume_from_the_newest_of_a_run_without_a_mirror_has_nothing_to_set(
    tmp_path: Path,
) -> None:
    run_until(tmp_path, 1)
    assert "nothing to set" in holdfast("resume-from", f"{tmp_path}/e/t@0")[1]


def test_resume_from_a_copy_says_what_to_fetch_and_what_to_set(at_s3: str) -> None:
    code, out, _ = holdfast("resume-from", f"{at_s3}@5")
    assert code == 0 and f"holdfast mirror pull {at_s3} RUN --step 5" in out
    assert "recover.resume_path=RUN/recover/global_step_5" in out
