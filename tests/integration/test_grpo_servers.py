"""The GRPO example with inference servers: a server, a trainer and the driver die, and no ticket is
lost.

The servers are fakes of vLLM that sample from the published model. `make serve-demo` does the same
with real ones.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.chaos import GRPO, GrpoRun
from examples.copy_task import write_model_folder
from examples.grpo_servers import GRPOServersConfig
from holdfast.utils.config import load_config
from holdfast.utils.errors import ConfigError
from holdfast.utils.files import walk_files
from holdfast.utils.manifest import file_entries, write_manifest
from holdfast.utils.metrics import read_stats
from tests.engine.launch.stand_in import stand_in_environment
from tests.engine.servers.fakes import FakeServer
from tests.limits import stretched
from tests.recover.cli.commands import answer

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

STEPS = 16
SETTINGS = (f"total_steps={STEPS}", "n_prompts=60", "batch_size=4", "n_samples=4", "trackers=[]")
PATIENCE_S = stretched(240.0)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[FakeServer]]:
    """Two servers, each with its own copy of the model."""
    with (
        FakeServer("vllm", tmp_path, dtype="float32") as one,
        FakeServer("vllm", tmp_path, dtype="float32") as other,
    ):
        yield [one, other]


@pytest.fixture
def run(tmp_path: Path, servers: list[FakeServer]) -> Iterator[GrpoRun]:
    urls = ",".join(server.url for server in servers)
    script = GRPO.with_name("grpo_servers.py")
    settings = (*SETTINGS, f"servers=[{urls}]", "recover.freq_steps=3")
    run = GrpoRun(tmp_path / "run", *settings, script=script, experiment="grpo_servers")
    yield run
    run.stop()


def stats(run: GrpoRun) -> list[dict[str, float]]:
    return read_stats(run.trial_root / "stats" / "stats.jsonl")


def train_until(run: GrpoRun, step: int) -> None:
    run.wait_until(lambda: run.last_step() >= step or run.exit_code() is not None, PATIENCE_S)
    assert run.exit_code() is None, run.log_tail()


def test_a_server_a_trainer_and_the_driver_die_and_no_ticket_is_lost(
    run: GrpoRun, servers: list[FakeServer]
) -> None:
    run.start()
    train_until(run, 2)
    servers[0].kill()
    train_until(run, run.last_step() + 2)
    assert stats(run)[-1]["servers_serving"] == 1
    servers[0].restart()
    run.wait_until(
        lambda: stats(run)[-1]["servers_serving"] == 2 or run.exit_code() is not None, PATIENCE_S
    )
    assert run.exit_code() is None, run.log_tail()
    assert run.kill("trainer", 1)
    attempts = len(run.attempts())
    run.wait_until(lambda: len(run.attempts()) > attempts, PATIENCE_S)
    run.kill("driver")
    run.start()
    assert run.wait(PATIENCE_S) == 0, run.log_tail()
    assert f"tickets 0 to {4 * STEPS - 1} were trained, each once and in its step" in run.log_tail()
    assert [entry["step"] for entry in stats(run)] == list(range(STEPS))
    assert (
        max(entry["rollouts/staleness_max"] for entry in stats(run)) == 1
    )  # sampling is one step ahead, and no more
    spent = answer("top", run.trial_root)["spent_s"]
    assert all(spent[phase] > 0 for phase in ("publishing", "sampling", "training"))
    assert not any(token["mixed"] for server in servers for token in server.tokens())


def test_servers_that_the_job_starts_die_and_no_ticket_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stand_in_environment().items():
        monkeypatch.setenv(name, value)
    settings = (*SETTINGS, f"python={sys.executable}", "recover.freq_steps=3")
    script = GRPO.with_name("grpo_servers.py")
    run = GrpoRun(tmp_path / "run", *settings, script=script, experiment="grpo_servers")
    try:
        run.start()
        train_until(run, 2)
        assert run.kill("server", 0)
        run.wait_until(
            lambda: stats(run)[-1]["servers_restarted"] == 1,
            PATIENCE_S,
        )
        train_until(run, run.last_step() + 2)
        run.kill("driver")
        run.start()
        assert run.wait(PATIENCE_S) == 0, run.log_tail()
        run.wait_until(lambda: run.leftovers() == [], PATIENCE_S)
    finally:
        run.stop()
    assert f"tickets 0 to {4 * STEPS - 1} were trained, each once and in its step" in run.log_tail()
    assert [entry["step"] for entry in stats(run)] == list(range(STEPS))
    assert len(answer("top", run.trial_root)["servers"]) == 2


def test_trainers_and_servers_take_turns(run: GrpoRun, servers: list[FakeServer]) -> None:
    run._command.append("colocate=true")
    run.start()
    train_until(run, 2)
    assert run.kill("trainer", 1)
    train_until(run, run.last_step() + 2)
    run.kill("driver")
    servers[0].restart()
    run.start()
    assert run.wait(PATIENCE_S) == 0, run.log_tail()
    assert f"tickets 0 to {4 * STEPS - 1} were trained, each once and in its step" in run.log_tail()
    assert stats(run)[-1]["servers_asleep"] == 2
    for server in servers:
        assert (
            server.state()["asleep"] == ["kv_cache", "weights"]
            and "POST /wake_up?tags=kv_cache" in server.calls()
        )
        assert not any(token["mixed"] for token in server.tokens())


def test_adapters_alone_are_published_to_servers_of_the_base(tmp_path: Path) -> None:
    base = write_model_folder(tmp_path / "base", hidden=128, for_vllm=True)
    write_manifest(
        base, file_entries(base, list(walk_files(base))), {"weight_version": 0}
    )  # the fakes read it
    options = {"dtype": "float32", "lora": True, "folder": str(base)}
    with (
        FakeServer("vllm", tmp_path, **options) as one,
        FakeServer("vllm", tmp_path, **options) as other,
    ):
        lora = ("actor.use_lora=true", "actor.lora_rank=8", f"actor.path={base}", "publish=adapter")
        urls, script = f"servers=[{one.url},{other.url}]", GRPO.with_name("grpo_servers.py")
        run = GrpoRun(
            tmp_path / "run", *SETTINGS, *lora, urls, script=script, experiment="grpo_servers"
        )
        try:
            run.start()
            train_until(run, 2)
            one.kill()
            train_until(run, run.last_step() + 2)
            one.restart()
            assert run.wait(PATIENCE_S) == 0, run.log_tail()
        finally:
            run.stop()
        assert (
            f"tickets 0 to {4 * STEPS - 1} were trained, each once and in its step"
            in run.log_tail()
        )
        assert max(entry["rollouts/staleness_max"] for entry in stats(run)) == 1
        tokens = [*one.tokens(), *other.tokens()]
        assert tokens and not any(token["mixed"] for token in tokens)
        assert {token["version"] for token in tokens} <= set(range(STEPS))
        for server in (one, other):
            calls = server.calls()
            assert "POST /v1/load_lora_adapter" in calls and not any(
                "/pause" in call for call in calls
            )
            assert server.state()["label"] == "default" and len(server.state()["adapters"]) <= 2
        names = {path.name for path in (run.trial_root / "weights").glob("v*/*")}
        assert "adapter_model.safetensors" in names and "model.safetensors" not in names


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("publish=adapter",), "'actor.use_lora' is false"),
        (
            ("publish=adapter", "actor.use_lora=true"),
            "name a model folder with weights as 'actor.path'",
        ),
        (("publish=adapters",), "'publish' is 'adapters'"),
        (
            ("publish=delta", "servers=[http://a:1]"),
            "'mirrors' has 0 URLs; expected one for each of the 1 'servers'",
        ),
        (("servers=[http://a:1]", "mirrors=[http://a:2,http://a:3]"), "'mirrors' has 2 URLs"),
    ],
)
def test_publishing_in_a_way_that_lacks_something_is_refused(
    settings: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(GRPOServersConfig, GRPO.with_name("grpo_servers.yaml"), settings)


def test_a_folder_may_have_more_servers_than_the_job_would_start() -> None:
    with pytest.raises(ConfigError, match="'min_servers' is 3; expected a value from 1 to 2"):
        load_config(GRPOServersConfig, None, ["min_servers=3"])
    load_config(GRPOServersConfig, None, ["min_servers=3", "servers_folder=/runs/e/t/servers"])


def test_servers_that_do_not_answer_end_the_job_before_it_trains(
    run: GrpoRun, servers: list[FakeServer]
) -> None:
    for server in servers:
        server.kill()
    run._command.append("server_start_s=1")
    run.start()
    assert run.wait(PATIENCE_S) == 1
    assert re.search(r"error: http://127.0.0.1:\d+.* found no server there", run.log_tail())
    assert run.last_step() == -1
