"""Trainers of transformers and TRL, killed and started again with the same command, end as if never
killed.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

pytest.importorskip("trl")

from holdfast.engine.dcp.format import read_layout
from tests.engine.models import NEEDS_PLANS
from tests.integrations.processes import run_job, run_killed

pytestmark = pytest.mark.timeout(300)

EVALUATING = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}


def job(*args: Any) -> None:
    from tests.integrations.trainer_job import main  # (imports the hosts, where it runs)

    main(*args)


def ended(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "digest.json").read_text())


@cache
def untouched(kind: str, options: str, ranks: int = 1) -> dict[str, Any]:
    folder = Path(mkdtemp())
    run_killed(job, folder, [], kind, "", False, json.loads(options), ranks=ranks)
    return ended(folder)


def check(
    folder: Path, kind: str, kills: list[str], options: dict[str, Any], ranks: int = 1
) -> None:
    run_killed(
        job,
        folder,
        [(kind, kill, False, options) for kill in kills],
        kind,
        "",
        False,
        options,
        ranks=ranks,
    )
    assert ended(folder) == untouched(kind, json.dumps(options), ranks)


GRPO = [
    pytest.param(["generated:3"], {}, id="while generating"),
    pytest.param(["step:21", "step:3"], {}, id="in the second epoch, twice"),
    pytest.param(["micro:11"], {"gradient_accumulation_steps": 2}, id="between micro-batches"),
    pytest.param(
        ["step:11"], {"num_iterations": 2, "num_train_epochs": 1}, id="several iterations"
    ),
    pytest.param(["step:8"], {"freq_steps": 3}, id="steps are trained again"),
    pytest.param(["epoch:1"], {"per_device_train_batch_size": 4}, id="at the end of an epoch"),
    pytest.param(["step:8"], EVALUATING, id="with evaluation"),
    pytest.param(
        ["step:7", "generated:1"], {"lora": True, "beta": 0.1}, id="adapters, in a buffer"
    ),
    pytest.param(
        ["generated:2"],
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
        id="ref_model",
    ),
]


def job_of_a_group(*args: Any) -> None:
    from tests.integrations.trainer_job import main_of_a_group  # (imports the hosts, where it runs)

    main_of_a_group(*args)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_signal_to_the_group_of_a_trainer_with_a_worker_leads_to_a_snapshot(
    tmp_path: Path, kind: str
) -> None:
    options = {"dataloader_num_workers": 1, "freq_steps": 1000}
    codes = run_job(job_of_a_group, tmp_path, kind, "begin:3:SIGUSR1", False, options)
    assert codes == [75], (tmp_path / "log").read_text()
    assert [path.name for path in tmp_path.glob("runs/*/*/recover/global_step_*")] == [
        "global_step_2"
    ]


@pytest.mark.slow
def test_grpo_killed_inside_a_buffer_ends_with_the_weights_and_moments_of_a_run_left_alone(
    tmp_path: Path,
) -> None:
    check(tmp_path, "grpo", ["step:7"], {})


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "options"), GRPO)
def test_grpo_killed_ends_with_the_weights_and_moments_of_a_run_left_alone(
    kills: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    check(tmp_path, "grpo", kills, options)


MERGED = {"lora": True, "merged_sends": True, "max_steps": 6}


@pytest.mark.slow
def test_grpo_with_adapters_that_are_merged_for_each_send_ends_as_if_never_killed(
    tmp_path: Path,
) -> None:
    check(tmp_path, "grpo", ["step:3"], MERGED | {"max_steps": 4})
    assert (
        "is frozen, but not what it was at the start of this job" in (tmp_path / "log").read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_grpo_with_merged_sends_is_killed_again_and_again(ranks: int, tmp_path: Path) -> None:
    check(tmp_path, "grpo", ["step:1", "begin:2", "step:2"], MERGED, ranks)


@pytest.mark.slow
def test_adapters_alone_are_stored_as_long_as_the_base_is_that_of_its_folder(
    tmp_path: Path,
) -> None:
    run_killed(job, tmp_path, [], "grpo", "", False, MERGED | {"merged_sends": False, "beta": 0.1})
    (engine,) = tmp_path.glob("runs/*/*/recover/global_step_5/default")
    names = {name for name in read_layout(engine).names() if name.startswith("dcp.model.")}
    assert names and all(".lora_" in name for name in names)


EPOCHS = {"eval_strategy": "epoch", "metric_for_best_model": "loss", "num_train_epochs": 4}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}
STOPS = {**BEST, "patience": 2, "learning_rate": 1.0, "lr_scheduler_type": "constant"}

OTHERS = [
    pytest.param("sft", ["step:3", "step:8"], {}, id="sft, twice"),
    pytest.param("sft", ["step:3", "step:8"], {"lora": True}, id="adapters, twice"),
    pytest.param("trainer", ["step:3"], {}, id="a collator that draws"),
    pytest.param(
        "trainer", ["step:12", "begin:1"], {}, id="a collator that draws, second epoch, twice"
    ),
    pytest.param(
        "sft",
        ["step:3"],
        {"dataloader_num_workers": 1, "gradient_accumulation_steps": 3},
        id="workers",
    ),
    pytest.param(
        "trainer",
        ["step:11"],
        {"train_sampling_strategy": "group_by_length"},
        id="lengths, second epoch",
    ),
    pytest.param(
        "trainer",
        ["micro:7"],
        {"gradient_accumulation_steps": 3},
        id="a short last step of the epoch",
    ),
    pytest.param(
        "trainer", ["epoch:2", "evaluated:2"], EPOCHS, id="evaluation at the end of an epoch"
    ),
    pytest.param(
        "trainer",
        ["step:7"],
        {**EVALUATING, "eval_on_start": True},
        id="evaluation before the first step",
    ),
    pytest.param("trainer", ["step:13", "saved:1"], BEST, id="the best model at the end"),
    pytest.param("trainer", ["step:5", "evaluated:1"], STOPS, id="early stopping"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills", "options"), OTHERS)
def test_a_trainer_killed_ends_with_the_weights_and_moments_of_a_run_left_alone(
    kind: str, kills: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    check(tmp_path, kind, kills, options)


DROPS = {"disable_dropout": False}
PREFERENCES = [
    pytest.param("dpo", ["step:3", "step:8"], DROPS, id="dpo, second epoch"),
    pytest.param(
        "dpo", ["step:11"], {"sync_ref_model": True, "ref_model_sync_steps": 2}, id="dpo, ref_model"
    ),
    pytest.param(
        "dpo", ["step:3"], {"precompute_ref_log_probs": True}, id="dpo, reference computed before"
    ),
    pytest.param("dpo", ["step:3"], {"lora": True}, id="dpo, adapters"),
    pytest.param("kto", ["step:3", "step:8"], DROPS, id="kto, second epoch"),
    pytest.param(
        "reward",
        ["micro:5"],
        {**DROPS, "gradient_accumulation_steps": 2},
        id="reward, between micro-batches",
    ),
    pytest.param("reward", ["step:11"], {"lora": True}, id="reward, adapters and a head"),
    pytest.param("rloo", ["step:7"], {}, id="rloo, inside a buffer"),
    pytest.param(
        "rloo",
        ["step:11", "generated:1"],
        {"gradient_accumulation_steps": 2},
        id="rloo, while sampling",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills", "options"), PREFERENCES)
def test_trainers_of_preferences_and_rloo_killed_end_as_those_left_alone(
    kind: str, kills: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    if kind == "kto" and not trl.KTOTrainer.__module__.startswith("trl.trainer."):
        pytest.skip("KTOTrainer is experimental in this TRL")
    check(tmp_path, kind, kills, options)


DISTRIBUTED = [
    pytest.param("grpo", ["step:7", "generated:1"], {}, id="ddp, grpo"),
    pytest.param("sft", ["step:3"], {}, id="ddp, sft, second epoch"),
    pytest.param("dpo", ["step:3"], DROPS, id="ddp, dpo"),
    pytest.param("grpo", ["step:7"], {"fsdp2": True}, id="fsdp2, grpo"),
    pytest.param(
        "trainer", ["step:3"], {"fsdp2": True, "gradient_accumulation_steps": 2}, id="fsdp2, draws"
    ),
    pytest.param(
        "trainer",
        ["step:3"],
        {"distributed": {"tp_size": 2}, "max_steps": 5},
        id="tensor parallel",
        marks=NEEDS_PLANS,
    ),
    pytest.param(
        "sft",
        ["step:3"],
        {"distributed": {"fsdp_size": 2}, "max_steps": 5},
        id="sharded by transformers",
        marks=NEEDS_PLANS,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills", "options"), DISTRIBUTED)
def test_two_ranks_killed_end_with_the_weights_and_moments_of_two_left_alone(
    kind: str, kills: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    check(tmp_path, kind, kills, options, ranks=2)


@pytest.mark.slow
def test_a_run_that_a_callback_has_ended_is_not_trained_on(tmp_path: Path) -> None:
    for _ in range(2):
        run_killed(job, tmp_path, [], "trainer", "", False, STOPS)
    assert ended(tmp_path)["step"] == untouched("trainer", json.dumps(STOPS))["step"] < 16
    assert "ended by a callback after step" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_plain_trl_ends_elsewhere_when_killed_inside_a_buffer(tmp_path: Path) -> None:
    """The control: this job can distinguish runs."""
    run_killed(job, tmp_path, [("grpo", "begin:8", True)], "grpo", "", True)
    found, expected = ended(tmp_path), untouched("grpo", "{}")
    assert found["step"] == expected["step"] and found["digest"] != expected["digest"]
