"""The handler with a plain trainer in one process: due snapshots, resumption, refusals."""

import errno
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader

from holdfast.engine.api import FinetuneSpec, StepInfo
from holdfast.engine.dcp.load import DCPLoad
from holdfast.recover import RecoverConfig, RecoverHandler, ResumableDataLoader
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    ConfigError,
    DatasetMismatchError,
)
from holdfast.utils.rng import seed_rng
from tests.recover.runs import (
    SPEC,
    Meter,
    Tiny,
    hidden,
    make_handler,
    names,
    newest,
    run_until,
    step_info,
)

pytestmark = pytest.mark.timeout(60)


def test_a_plain_trainer_without_process_groups_resumes_exactly(tmp_path: Path) -> None:
    seed_rng(1)
    digests = run_until(tmp_path, 6)
    again = tmp_path / "again"
    seed_rng(1)
    assert run_until(again, 3) == digests[:3]
    seed_rng(99)
    assert run_until(again, 6, first=3) == digests[3:]


def test_the_first_step_is_step_0_of_a_new_run_else_the_one_after_the_restored_step(
    tmp_path: Path,
) -> None:
    tiny = Tiny()
    with make_handler(tmp_path, freq_steps=1) as handler:
        assert handler.first_step(handler.load(tiny.state)) == StepInfo(0, 0, 0, 6)
        handler.dump(tiny.state, StepInfo.at(5, 6))
    with make_handler(tmp_path, freq_steps=1) as handler:
        assert handler.first_step(handler.load(tiny.state)) == StepInfo(1, 0, 6, 6)


def test_a_generation_is_laid_out_as_documented_its_manifest_lists_all(tmp_path: Path) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    loader = ResumableDataLoader(list(range(24)), 4, seed=0)
    handler.register("meter", Meter())
    assert handler.load({"actor": tiny.state, "critic": Tiny().state}, loader) is None
    assert handler.dump({"actor": tiny.state, "critic": Tiny().state}, step_info(7), loader)

    root, folder = tmp_path / "e" / "t" / "recover", newest(tmp_path)
    assert sorted(os.listdir(root)) == [
        "global_step_7",
        "latest_checkpointed_iteration.txt",
        "run_id.txt",
    ]
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "7"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    parts = {
        f"{name}/{part}" for name in ("actor", "critic") for part in (".metadata", "__0_0.distcp")
    }
    assert files == {"manifest.json", "recover_info.json", "data.pt", "state/rank_00000.pt"} | parts
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"].keys() == files - {"manifest.json"}
    assert all(
        entry["bytes"] == (folder / name).stat().st_size
        for name, entry in manifest["files"].items()
    )
    facts = {
        key: manifest[key]
        for key in ("format_version", "step", "world_size", "mesh", "weight_versions")
    }
    assert facts == {
        "format_version": 2,
        "step": 7,
        "world_size": 1,
        "mesh": {},
        "weight_versions": {},
    }
    assert manifest["libraries"]["torch"] == torch.__version__
    info = json.loads((folder / "recover_info.json").read_text())
    assert info["last_step_info"] == {
        "epoch": 1,
        "epoch_step": 1,
        "global_step": 7,
        "steps_per_epoch": 6,
    }
    assert info["run_id"] == manifest["run_id"] == (root / "run_id.txt").read_text().strip()
    for name in ("data.pt", "state/rank_00000.pt"):
        torch.load(folder / name, weights_only=True)


def test_a_second_engine_that_cannot_be_read_leaves_half_of_a_run_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {"actor": Tiny().state, "critic": Tiny().state}
    handler = make_handler(tmp_path, freq_steps=1)
    handler.load(engines)
    assert handler.dump(engines, step_info(0))
    handler.close()
    stat, applied = os.stat, list[DCPLoad]()
    apply = DCPLoad.apply

    def count_applied(load: DCPLoad) -> None:
        apply(load)
        applied.append(load)

    def fail_for_the_second(path: Any, **options: Any) -> os.stat_result:
        if applied and str(path).endswith("critic/__0_0.distcp"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, **options)

    monkeypatch.setattr(DCPLoad, "apply", count_applied)
    monkeypatch.setattr(os, "stat", fail_for_the_second)
    with pytest.raises(
        OSError, match="the model is now half loaded and must be loaded again: Stale file handle"
    ):
        make_handler(tmp_path, freq_steps=1).load(engines)
    assert len(applied) == 1


def test_the_run_id_is_kept_through_resumes(tmp_path: Path) -> None:
    run_until(tmp_path, 1)
    first = json.loads((newest(tmp_path) / "manifest.json").read_text())["run_id"]
    run_until(tmp_path, 2, first=1)
    assert json.loads((newest(tmp_path) / "manifest.json").read_text())["run_id"] == first


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (None, [0, 1, 2, 3, 4])])
def test_the_newest_generations_are_kept_also_over_a_restart(
    tmp_path: Path, keep: int | None, left: list[int]
) -> None:
    run_until(tmp_path, 3, max_ckpt_to_keep=keep)
    run_until(tmp_path, 5, first=3, max_ckpt_to_keep=keep)
    assert names(tmp_path) == [f"global_step_{step}" for step in left]
    assert hidden(tmp_path) == []


def test_a_dump_is_made_when_due_or_forced_once_a_step(tmp_path: Path) -> None:
    handler, tiny = (
        make_handler(tmp_path, freq_steps=4, freq_epochs=1, max_ckpt_to_keep=None),
        Tiny(),
    )
    handler.load(tiny.state)
    dumped = [step for step in range(12) if handler.dump(tiny.state, step_info(step))]
    assert dumped == [3, 5, 7, 11]  # steps 4, 8, 12 and the ends of epochs of six steps
    assert not handler.dump(tiny.state, step_info(12))
    assert handler.dump(tiny.state, step_info(12), force=True)
    assert not handler.dump(tiny.state, step_info(12), force=True)
    resumed = make_handler(tmp_path, freq_secs=0.0)
    resumed.load(tiny.state)
    assert not resumed.dump(tiny.state, step_info(12))
    assert resumed.dump(tiny.state, step_info(13))


def test_modes_say_what_happens_with_and_without_something_to_resume(tmp_path: Path) -> None:
    tiny = Tiny()
    off = make_handler(tmp_path, mode="off", freq_steps=1)
    assert off.load(tiny.state) is None and not off.dump(tiny.state, step_info(0), force=True)
    assert not (tmp_path / "e").exists()
    assert make_handler(tmp_path, mode="auto").load(tiny.state) is None
    with pytest.raises(CheckpointNotFoundError, match=r"mode is 'must', but .* no generation"):
        make_handler(tmp_path, mode="must").load(tiny.state)
    assert not (tmp_path / "e" / "t" / "recover").exists()
    run_until(tmp_path, 2)
    for mode, step in (("on", 1), ("must", 1), ("disabled", None)):
        info = make_handler(tmp_path, mode=mode).load(tiny.state)
        assert (info.last_step_info.global_step if info else None) == step


def test_dump_insists_on_load_first_going_forward_and_an_open_handler(tmp_path: Path) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    with pytest.raises(ConfigError, match="dump was called before load"):
        handler.dump(tiny.state, step_info(0))
    handler.load(tiny.state)
    assert handler.dump(tiny.state, step_info(5))
    with pytest.raises(ConfigError, match=r"step 4 is to be snapshotted, but .* holds step 5"):
        handler.dump(tiny.state, step_info(4))
    handler.close()
    handler.close()
    for call in (
        handler.load,
        lambda state: handler.dump(state, step_info(6)),
        lambda _: handler.wait(),
    ):
        with pytest.raises(ConfigError, match="closed"):
            call(tiny.state)


@pytest.mark.parametrize("metric", ["text", "0.5", None, [1.0], torch.ones(2)])
def test_a_metric_that_is_no_number_is_named_and_nothing_is_dumped(
    tmp_path: Path, metric: Any
) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    handler.load(tiny.state)
    with pytest.raises(
        ConfigError, match=r"dump was given the metric 'reward' as .*; expected a number"
    ):
        handler.dump(tiny.state, step_info(0), metrics={"reward": metric})
    assert names(tmp_path) == [] and hidden(tmp_path) == []
    scalar: Any = torch.tensor(0.5)
    assert handler.dump(tiny.state, step_info(0), metrics={"reward": scalar})
    handler.close()


def test_a_step_that_could_not_be_loaded_is_not_dumped(tmp_path: Path) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    handler.load(tiny.state)
    with pytest.raises(ConfigError, match="counts 7 steps an epoch, the handler's ft_spec 6"):
        handler.dump(tiny.state, StepInfo(0, 0, 0, steps_per_epoch=7))


def test_registering_wants_a_free_name_and_a_state(tmp_path: Path) -> None:
    handler = make_handler(tmp_path)
    handler.register("meter", Meter())
    with pytest.raises(ConfigError, match="already registered as 'meter'"):
        handler.register("meter", Meter())
    with pytest.raises(ConfigError, match="'n' is a int, which lacks state_dict"):
        handler.register("n", 3)  # type: ignore[arg-type]
    handler.load(Tiny().state)
    with pytest.raises(ConfigError, match="'late' is registered after load, which would not"):
        handler.register("late", Meter())


def test_a_dataloader_without_a_state_is_refused_before_the_first_step(tmp_path: Path) -> None:
    samples: Any = list(range(24))
    plain: Any = DataLoader(samples, 4)
    prepared = DataLoaderShard(samples, batch_size=4)  # has the methods, and the loader inside not
    for loader in (plain, prepared):
        with pytest.raises(ConfigError, match=r"is a DataLoader, which lacks .*`recoverable`"):
            make_handler(tmp_path).load(Tiny().state, loader)


def test_the_name_of_a_tokenizer_is_refused_before_the_first_step(tmp_path: Path) -> None:
    config = RecoverConfig(
        experiment_name="e", trial_name="t", fileroot=str(tmp_path), hf_freq_steps=1
    )
    with pytest.raises(ConfigError, match=r"tokenizer is 'Qwen/Qwen3-0\.6B'; expected the object"):
        RecoverHandler(config, SPEC, tokenizer="Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("names", [{}, {"state": 1}, {"../x": 1}, {"": 1}])
def test_engine_names_that_cannot_be_folders_are_refused(
    tmp_path: Path, names: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match=r"no engine|engine name"):
        make_handler(tmp_path).load(dict.fromkeys(names, Tiny().state))
    with pytest.raises(ConfigError, match="int has neither 'engines' nor 'engine'"):
        make_handler(tmp_path).load(3)


def test_a_dataloader_that_only_load_or_only_dump_got_is_refused(tmp_path: Path) -> None:
    tiny, loader = Tiny(), ResumableDataLoader(list(range(24)), 4, seed=1)
    with make_handler(tmp_path, freq_steps=1) as handler:
        handler.load(tiny.state, loader)
        with pytest.raises(ConfigError, match="dump got no dataloader, but load did"):
            handler.dump(tiny.state, step_info(0), force=True)
        assert handler.dump(tiny.state, step_info(0), loader)
    with make_handler(tmp_path / "other", freq_steps=2) as handler:
        handler.load(tiny.state)
        with pytest.raises(ConfigError, match="load got no dataloader, but dump did"):
            handler.dump(tiny.state, step_info(0), loader)  # no snapshot is due
        assert handler.dump(tiny.state, step_info(1))


# resume_path


def test_resume_path_goes_back_once_and_a_restart_goes_on_from_there(tmp_path: Path) -> None:
    digests = run_until(tmp_path, 5, max_ckpt_to_keep=None)
    wanted = str(tmp_path / "e" / "t" / "recover" / "global_step_1")
    tiny = Tiny()
    for _ in range(2):  # a restart before any new write goes back there again
        info = make_handler(tmp_path, resume_path=wanted).load(tiny.state)
        assert info and info.last_step_info.global_step == 1 and tiny.digest() == digests[1]
        assert names(tmp_path) == ["global_step_0", "global_step_1"]
    assert [name.partition("-")[2] for name in hidden(tmp_path)] == [
        f"global_step_{step}-superseded-by-resume-path-global-step-1" for step in (2, 3, 4)
    ]
    run_until(tmp_path, 4, first=2, resume_path=wanted)
    # the requested one is deleted, because it is no longer needed
    assert names(tmp_path) == ["global_step_2", "global_step_3"]
    for spelling in (wanted, os.path.relpath(wanted)):
        info = make_handler(tmp_path, resume_path=spelling).load(tiny.state)
        assert info and info.last_step_info.global_step == 3


def test_a_start_without_resume_path_does_not_forget_that_the_run_went_back(
    tmp_path: Path,
) -> None:
    run_until(tmp_path, 3, max_ckpt_to_keep=None)
    wanted = str(tmp_path / "e" / "t" / "recover" / "global_step_1")
    run_until(tmp_path, 4, first=2, resume_path=wanted)
    run_until(tmp_path, 5, first=4)
    run_until(tmp_path, 6, first=5)
    kept = names(tmp_path)
    run_until(tmp_path, 6, first=6, resume_path=wanted)
    assert names(tmp_path) == kept == ["global_step_4", "global_step_5"]


def test_resume_path_starts_a_new_trial_from_a_generation_of_another(tmp_path: Path) -> None:
    digests = run_until(tmp_path / "a", 3)
    wanted = str(newest(tmp_path / "a"))
    tiny, handler = Tiny(), make_handler(tmp_path / "b", resume_path=wanted, freq_steps=1)
    info = handler.load(tiny.state)
    assert info and info.last_step_info.global_step == 2 and tiny.digest() == digests[2]
    handler.dump(tiny.state, step_info(3))
    info = make_handler(tmp_path / "b", resume_path=wanted).load(tiny.state)
    assert info and info.last_step_info.global_step == 3
    assert names(tmp_path / "a") == ["global_step_1", "global_step_2"]


@pytest.mark.parametrize("fault", ["replaced", "damaged"])
def test_a_run_keeps_its_generations_when_what_it_began_from_is_not_the_same_any_more(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_until(tmp_path / "a", 3)
    wanted = newest(tmp_path / "a")
    run_until(tmp_path / "b", 5, first=3, resume_path=str(wanted))
    if fault == "replaced":
        run_until(tmp_path / "c", 3)
        shutil.rmtree(wanted)
        newest(tmp_path / "c").rename(wanted)
    else:
        os.truncate(wanted / "manifest.json", 9)
    info = make_handler(tmp_path / "b", resume_path=str(wanted)).load(Tiny().state)
    assert info and info.last_step_info.global_step == 4
    assert names(tmp_path / "b") == ["global_step_3", "global_step_4"]
    assert hidden(tmp_path / "b") == []
    assert f"{wanted} is not the generation that this run went on from" in caplog.text


def test_a_good_resume_path_helps_when_nothing_else_is_left(tmp_path: Path) -> None:
    run_until(tmp_path / "a", 3)
    run_until(tmp_path / "b", 1)
    os.truncate(newest(tmp_path / "b") / "manifest.json", 9)
    with pytest.raises(CheckpointCorruptError):
        make_handler(tmp_path / "b").load(Tiny().state)
    info = make_handler(tmp_path / "b", resume_path=str(newest(tmp_path / "a"))).load(Tiny().state)
    assert info and info.last_step_info.global_step == 2


@pytest.mark.parametrize("step", [0, 1])
def test_a_resume_path_with_a_short_file_is_an_error_and_stays_where_it_is(
    tmp_path: Path, step: int
) -> None:
    run_until(tmp_path, 2)
    wanted = tmp_path / "e" / "t" / "recover" / f"global_step_{step}"
    os.truncate(wanted / "state" / "rank_00000.pt", 99)
    for _ in range(2):
        handler = make_handler(tmp_path, resume_path=str(wanted))
        with pytest.raises(CheckpointCorruptError, match=r"state/rank_00000\.pt has 99 bytes"):
            handler.peek()
        with pytest.raises(CheckpointCorruptError, match=r"state/rank_00000\.pt has 99 bytes"):
            handler.load(Tiny().state)
        assert names(tmp_path) == ["global_step_0", "global_step_1"] and hidden(tmp_path) == []


def test_a_bad_resume_path_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    run_until(tmp_path, 2)
    root = tmp_path / "e" / "t" / "recover"
    with pytest.raises(CheckpointNotFoundError, match=r"no generation at .*global_step_9"):
        make_handler(tmp_path, resume_path=str(root / "global_step_9")).load(Tiny().state)
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.json is missing"):
        make_handler(tmp_path, resume_path=str(root / "global_step_1" / "default")).load(
            Tiny().state
        )
    with pytest.raises(CheckpointMismatchError, match="shape"):
        make_handler(tmp_path, resume_path=str(root / "global_step_0")).load(Tiny(width=4).state)
    assert names(tmp_path) == ["global_step_0", "global_step_1"] and hidden(tmp_path) == []


# Another job


def test_a_generation_of_another_job_is_refused_before_anything_changes(tmp_path: Path) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    loader = ResumableDataLoader(list(range(24)), 4, seed=0)
    handler.load({"a": tiny.state, "b": Tiny().state}, loader)
    tiny.step()
    handler.dump({"a": tiny.state, "b": Tiny().state}, step_info(0), loader)

    def refused(
        engines: Any, error: type[Exception], message: str, data: Any = None, spec: Any = None
    ) -> None:
        other = RecoverHandler(make_handler(tmp_path).config, spec or SPEC)
        before = {
            name: state.state_dict()["model"]["weight"].clone() for name, state in engines.items()
        }
        cursor, rng = (data.state_dict() if data else None), torch.get_rng_state()
        with pytest.raises(error, match=message):
            other.load(engines, data)
        for name, state in engines.items():
            assert torch.equal(before[name], state.state_dict()["model"]["weight"])
        assert (data.state_dict() if data else None) == cursor and torch.equal(
            rng, torch.get_rng_state()
        )

    def fresh(width: int = 3) -> Any:
        return Tiny(width).state

    refused(
        {"a": fresh(), "c": fresh()},
        CheckpointMismatchError,
        r"holds engines \['a', 'b'\], this job has \['a', 'c",
    )
    own = ResumableDataLoader(list(range(24)), 4, seed=0)
    refused(
        {"a": fresh(), "b": fresh(4)}, CheckpointMismatchError, r"weight has shape \[2, 3\]", own
    )
    other_data = ResumableDataLoader(list(range(1, 25)), 4, seed=0)
    refused(
        {"a": fresh(), "b": fresh()}, DatasetMismatchError, "saved for a dataset of", other_data
    )
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=40, train_batch_size=4)
    refused(
        {"a": fresh(), "b": fresh()},
        CheckpointMismatchError,
        "6 steps an epoch, this one has 10",
        own,
        spec,
    )
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []
    assert make_handler(tmp_path).load({"a": fresh(), "b": fresh()}, own)


def test_a_generation_without_a_dataloader_is_not_resumed_with_one(tmp_path: Path) -> None:
    run_until(tmp_path, 1)
    with pytest.raises(CheckpointMismatchError, match="holds no dataloader state"):
        make_handler(tmp_path).load(Tiny().state, ResumableDataLoader(list(range(24)), 4, seed=0))


def test_a_generation_with_a_dataloader_is_not_resumed_without_one(tmp_path: Path) -> None:
    handler, tiny, loader = (
        make_handler(tmp_path, freq_steps=1),
        Tiny(),
        ResumableDataLoader(range(24), 4, seed=0),
    )
    handler.load(tiny.state, loader)
    handler.dump(tiny.state, step_info(0), loader)
    with pytest.raises(CheckpointMismatchError, match="pass that dataloader, or data starts over"):
        make_handler(tmp_path).load(tiny.state)


def test_a_handler_that_would_never_snapshot_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_handler(tmp_path, mode="off")
    assert caplog.text == ""
    make_handler(tmp_path)
    assert "only forced snapshots" in caplog.text


def test_user_objects_come_and_go_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler, tiny, meter = make_handler(tmp_path, freq_steps=1), Tiny(), Meter()
    handler.register("meter", meter)
    handler.register("old", Meter())
    handler.load(tiny.state)
    meter.seen = [4, 5]
    handler.dump(tiny.state, step_info(0))
    resumed, again = make_handler(tmp_path), Meter()
    resumed.register("meter", again)
    resumed.register("new", Meter())
    with caplog.at_level(logging.WARNING):
        resumed.load(tiny.state)
    assert again.seen == [4, 5]
    assert (
        "no state for 'new'; it starts anew" in caplog.text
        and "state for 'old', which nothing" in caplog.text
    )


# Failing writes


class Stubborn(Meter):
    """Its state cannot be restored without running code, or cannot be saved at all."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.value, BaseException):
            raise self.value
        return {"value": self.value}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (threading.Lock(), ConfigError),
        (Path("x"), ConfigError),
        (lambda: 1, ConfigError),
        (KeyError("mine"), KeyError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_an_unsavable_user_object_fails_the_dump_and_leaves_nothing(
    tmp_path: Path, value: Any, error: type[BaseException]
) -> None:
    run_until(tmp_path, 1)
    handler, tiny, thing = make_handler(tmp_path, freq_steps=1), Tiny(), Stubborn(1)
    handler.register("thing", thing)
    handler.load(tiny.state)
    thing.value = value
    with pytest.raises(
        error, match="state of 'thing' cannot be saved" if error is ConfigError else None
    ):
        handler.dump(tiny.state, step_info(1))
    assert names(tmp_path) == ["global_step_0"] and hidden(tmp_path) == []
    thing.value = 2
    assert handler.dump(tiny.state, step_info(1))


def test_a_fileroot_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for fileroot in (tmp_path / "file", Path("/proc/holdfast")):
        with pytest.raises(CheckpointWriteError, match=f"cannot lock {fileroot}/e/t/recover.lock"):
            make_handler(fileroot, freq_steps=1).load(Tiny().state)


def test_the_tracker_is_only_a_hint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_until(tmp_path, 1)
    tracker = tmp_path / "e" / "t" / "recover" / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    (tracker / "in the way").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        run_until(tmp_path, 2, first=1)
    assert "cannot write" in caplog.text and "latest_checkpointed_iteration.txt" in caplog.text
    assert hidden(tmp_path) == []
    config = RecoverConfig(experiment_name="e", trial_name="t", fileroot=str(tmp_path))
    info = RecoverHandler(config, FinetuneSpec(9, 24, 4)).load(Tiny().state)
    assert info and info.last_step_info.global_step == 1
