"""On-policy distillation: advantages from a teacher in an engine or on servers, and its identity at
a restart.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from holdfast.engine import FSDPEngine, OptimizerConfig
from holdfast.engine.api import Batch
from holdfast.engine.rl import (
    EngineTeacher,
    NormConfig,
    PPOActor,
    PPOActorConfig,
    ServerTeacher,
)
from holdfast.engine.rl import teacher as teacher_module
from holdfast.engine.servers import SGLangServer, VLLMServer
from holdfast.utils import distributed
from holdfast.utils.errors import (
    BatchError,
    CheckpointMismatchError,
    ConfigError,
    NoServerError,
    PeerError,
    PromptError,
    ServerError,
    SlowServerError,
)
from tests.engine.models import build_reference, tiny_qwen3, write_model_folder
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_model
from tests.helpers import run_ranks
from tests.recover.runs import SPEC, digest, make_handler, step_info
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(120)

LENGTHS = [7, 3, 6, 4]
SERVERS = {"vllm": VLLMServer, "sglang": SGLangServer}
GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a student, and of a teacher with other weights."""
    folder = tmp_path_factory.mktemp("models")
    write_model_folder(folder / "student", tiny_qwen3())
    teacher = publish_model(folder / "teacher", 1, build_reference(tiny_qwen3(), 7), probe=False)
    return str(folder / "student"), teacher


def config_of(path: str, **changes: Any) -> PPOActorConfig:
    settings: dict[str, Any] = {
        "path": path,
        "dtype": "float32",
        "optimizer": OptimizerConfig(lr=1e-2),
        "group_size": 2,
        "ppo_n_minibatches": 1,
        "reward_norm": NormConfig("group", std_level=None),
        "distill_loss_weight": 0.5,
    }
    return PPOActorConfig(**(settings | changes))


def start(config: PPOActorConfig) -> FSDPEngine:
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, SPEC)
    return engine


def whole_batch() -> Batch:
    """Four rows of up to seven tokens, with prompts of two."""
    draw = torch.Generator().manual_seed(3)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return {
        "input_ids": torch.randint(0, 15, mask.shape, generator=draw) * mask,
        "attention_mask": mask.long(),
        "loss_mask": mask & (torch.arange(max(LENGTHS)) > 1),
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.25]),
        "logprobs": -2.7 + torch.randn(mask.shape, generator=draw) / 3,
    }


def rows_of(batch: Batch, rank: int, world_size: int) -> Batch:
    size = len(LENGTHS) // world_size
    return {key: value[rank * size :][:size] for key, value in batch.items()}


def logprobs_of(folder: str, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the tokens by an unsharded model, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    result = torch.zeros(batch["input_ids"].shape)
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row, :length]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        scores = (logits / temperature).log_softmax(-1)
        result[row, 1:length] = scores.gather(1, ids[1:, None])[:, 0]
    return result


def expected_advantages(
    folder: str, rl_weight: float, weight: float, centred: bool = False
) -> Tensor:
    batch = whole_batch()
    groups = batch["rewards"].reshape(2, 2)
    of_rewards = (groups - groups.mean(1, True)).reshape(-1, 1)
    of_teacher = logprobs_of(folder, batch) - batch["logprobs"]
    advantages = rl_weight * of_rewards + weight * of_teacher
    if centred:
        advantages = advantages - advantages[batch["loss_mask"]].mean()
    return torch.where(batch["loss_mask"], advantages, 0.0)


def _by_engine(
    rank: int, world_size: int, paths: tuple[str, str], changes: dict[str, Any]
) -> tuple[Tensor, dict[str, float], dict[str, str]]:
    config = config_of(paths[0], **changes)
    teacher = EngineTeacher(start(config_of(paths[1], optimizer=None)))
    engine = start(config)
    actor = PPOActor(config, engine, teacher)
    batch = actor.compute_advantages(rows_of(whole_batch(), rank, world_size))
    stats = actor.ppo_update(batch)
    engine.destroy()
    return batch["advantages"], stats, teacher.identity()


@pytest.mark.parametrize(
    ("rl_weight", "weight", "centred"),
    slow_but([(0.0, 2.0, True)], [(1.0, 0.5, False), (0.0, 2.0, True)]),
)
def test_each_token_gets_the_log_ratio_to_the_teacher_added_to_its_advantage(
    models: tuple[str, str], rl_weight: float, weight: float, centred: bool
) -> None:
    changes: dict[str, Any] = {"rl_loss_weight": rl_weight, "distill_loss_weight": weight}
    if centred:
        changes["adv_norm"] = NormConfig("batch", std_level=None)
    answers = run_ranks(_by_engine, 2, models, changes)
    advantages = torch.cat([own for own, _, _ in answers])
    expected = expected_advantages(models[1], rl_weight, weight, centred)
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)

    # The statistics are about the student's weights, not about the sampling policy.
    batch = whole_batch()
    log_ratio = logprobs_of(models[1], batch) - logprobs_of(models[0], batch)
    k1 = -log_ratio[batch["loss_mask"]].mean().item()
    for _, stats, _ in answers:
        assert stats["kl_teacher_k1"] == pytest.approx(k1, abs=1e-5)
        assert stats["kl_teacher"] > 0


@pytest.mark.slow
def test_the_fingerprint_of_a_teacher_depends_on_its_weights_and_not_on_the_ranks(
    models: tuple[str, str],
) -> None:
    ((_, _, alone),) = run_ranks(_by_engine, 1, models, {})
    assert [identity for _, _, identity in run_ranks(_by_engine, 2, models, {})] == [alone] * 2
    ((_, _, other),) = run_ranks(_by_engine, 1, (models[0], models[0]), {})
    assert alone["model"] == models[1]
    assert alone["fingerprint"] != other["fingerprint"]


def _offloaded(rank: int, world_size: int, path: str) -> list[dict[str, str]]:
    engine = start(config_of(path, optimizer=None))
    teacher = EngineTeacher(engine)
    before = teacher.identity()
    engine.offload()
    found = [before, teacher.identity()]
    engine.destroy()
    return found


def test_an_offloaded_teacher_has_the_same_identity(models: tuple[str, str]) -> None:
    for before, offloaded in run_ranks(_offloaded, 2, models[1]):
        assert offloaded == before


def _by_servers(rank: int, world_size: int, path: str, kind: str, urls: list[str]) -> Tensor | str:
    config = config_of(path, rl_loss_weight=0.0, distill_loss_weight=1.0)
    engine = start(config)
    try:
        teacher = ServerTeacher([SERVERS[kind](url) for url in urls], engine)
        actor = PPOActor(config, engine, teacher)
        batch = actor.compute_advantages(rows_of(whole_batch(), rank, world_size))
        return batch["advantages"]
    except (ConfigError, PeerError, PromptError, ServerError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.destroy()


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_servers_score_the_tokens_as_the_engine_does_and_one_of_them_may_fail(
    models: tuple[str, str], kind: str, tmp_path: Path
) -> None:
    expected = expected_advantages(models[1], 0.0, 1.0)
    options: dict[str, Any] = {"dtype": "float32", "folder": models[1]}
    with (
        FakeServer(kind, tmp_path, **options) as one,
        FakeServer(kind, tmp_path, **options) as other,
    ):
        other.tell(fail={GENERATE[kind]: 1})  # then it goes on
        answers = run_ranks(_by_servers, 2, models[0], kind, [one.url, other.url])
        found = torch.cat([own for own in answers if isinstance(own, Tensor)])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        asked = [server.calls().count(f"POST {GENERATE[kind]}") for server in (one, other)]
        assert sum(asked) == len(LENGTHS) + 1
        assert min(asked) > 0


@pytest.mark.slow
def test_a_teacher_without_any_server_left_ends_the_step_on_all_ranks_with_its_error(
    models: tuple[str, str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "folder": models[1]}
    with FakeServer("vllm", tmp_path, **options) as server:
        server.tell(fail={GENERATE["vllm"]: 100})
        answers = run_ranks(_by_servers, 2, models[0], "vllm", [server.url])
    assert all("ServerError" in str(answer) for answer in answers), answers
    with FakeServer("vllm", tmp_path, max_model_len=7, **options) as server:
        first, second = run_ranks(_by_servers, 2, models[0], "vllm", [server.url])
    assert str(first).startswith("PromptError") and "leaves no room" in str(first)
    assert str(second).startswith("PeerError: asking the teacher")


@dataclass(eq=False)
class Scorer:
    """A server of a teacher in this process. It gives every token -1."""

    name: str = "scorer"
    model: str = "teacher"
    takes_s: float = 0.0
    is_gone: bool = False
    hangs: bool = False
    n_asked: int = 0

    def served_model(self) -> str:
        if self.is_gone:
            raise NoServerError(f"{self.name} is gone")
        return self.model

    def prompt_logprobs(self, input_ids: Sequence[int]) -> list[float]:
        self.n_asked += 1
        time.sleep(self.takes_s)
        if self.hangs:
            raise SlowServerError(f"{self.name} hangs")
        return [-1.0] * (len(input_ids) - 1)


def student_of(group: Any = None) -> Any:
    """The parts of an engine that a teacher on servers needs. Each rank has its own data."""
    return SimpleNamespace(
        config=SimpleNamespace(temperature=1.0),
        control_group=group,
        context_and_model_parallel_group=None,
        is_data_parallel_head=lambda: True,
    )


def _one_is_slow(rank: int, world_size: int) -> float:
    distributed.WORD_EVERY_S = 0.1
    student = student_of(distributed.new_background_group(None, timeout_s=2.0))
    teacher = ServerTeacher([Scorer(takes_s=3.0 if rank else 0.0)], student)
    return teacher.compute_logp(whole_batch(), 1.0).sum().item()


@pytest.mark.slow
def test_servers_may_take_longer_than_the_timeout_of_the_ranks() -> None:
    n_scored = sum(LENGTHS) - len(LENGTHS)
    assert run_ranks(_one_is_slow, 2) == [-n_scored, -n_scored]


def test_a_server_that_does_not_answer_is_left_out_until_the_next_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teacher_module, "_REQUESTS_PER_SERVER", 1)
    gone = Scorer("gone", is_gone=True)
    hung = Scorer("hung", hangs=True)
    good = Scorer("good", takes_s=0.1)
    teacher = ServerTeacher([hung, good, gone], student_of())
    rows = 4 * len(LENGTHS)
    batch = {key: value.repeat(4, 1) for key, value in whole_batch().items() if value.dim() == 2}
    teacher.compute_logp(batch, 1.0)
    assert gone.n_asked == 0
    assert 1 <= hung.n_asked <= 3, "each thread asks it once at most"
    assert good.n_asked == rows

    # They are asked again for the next batch, and then all of them fail.
    gone.is_gone = False
    hung.hangs = False
    teacher.compute_logp(batch, 1.0)
    assert min(gone.n_asked, hung.n_asked) > 3
    for server in (gone, hung, good):
        server.hangs = True
    with pytest.raises(SlowServerError, match=r"hangs"):
        teacher.compute_logp(batch, 1.0)
    for server in (gone, hung, good):
        server.is_gone = True
    with pytest.raises(NoServerError, match="is gone"):
        teacher.compute_logp(batch, 1.0)


def test_a_server_that_was_restarted_with_another_model_is_refused() -> None:
    servers = [Scorer("one"), Scorer("two")]
    teacher = ServerTeacher(servers, student_of())
    teacher.identity()
    servers[1].model = "another"
    with pytest.raises(ConfigError, match="two serves another, but the teacher is teacher"):
        teacher.compute_logp(whole_batch(), 1.0)


def test_rows_without_a_loss_token_are_not_scored() -> None:
    server = Scorer()
    batch = whole_batch()
    batch["loss_mask"][0] = False  # the longest, too long for the server perhaps
    scored = ServerTeacher([server], student_of()).compute_logp(batch, 1.0)
    assert server.n_asked == len(LENGTHS) - 1
    assert scored[0].tolist() == [0.0] * max(LENGTHS)
    assert scored.sum() == -sum(length - 1 for length in LENGTHS[1:])


def _with_images(rank: int, world_size: int) -> str:
    teacher = ServerTeacher([Scorer()], student_of())
    batch: dict[str, Any] = whole_batch()
    if rank:
        batch["multi_modal_input"] = [{}] * len(LENGTHS)
    try:
        teacher.compute_logp(batch, 1.0)
    except (BatchError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "scored"


def test_images_on_one_rank_end_the_scoring_on_all() -> None:
    first, second = run_ranks(_with_images, 2)
    assert first.startswith("PeerError: asking the teacher")
    assert "servers score text alone" in second


def _first_has_scores(rank: int, world_size: int, paths: tuple[str, str]) -> Tensor:
    config = config_of(paths[0])
    teacher = EngineTeacher(start(config_of(paths[1], optimizer=None)))
    engine = start(config)
    actor = PPOActor(config, engine, teacher)
    batch = rows_of(whole_batch(), rank, world_size)
    if rank == 0:
        batch["teacher_logp"] = torch.full(batch["logprobs"].shape, -2.0)
    advantages = actor.compute_advantages(batch)
    engine.destroy()
    return advantages["teacher_logp"]


def test_scores_that_one_rank_has_already_are_kept(models: tuple[str, str]) -> None:
    first, second = run_ranks(_first_has_scores, 2, models)
    assert (first == -2.0).all()
    expected = rows_of({"scores": logprobs_of(models[1], whole_batch())}, 1, 2)["scores"]
    torch.testing.assert_close(second, expected, atol=1e-5, rtol=1e-5)


def test_settings_without_an_effect_are_refused(models: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"'rl_loss_weight' is 0\.5, but 'distill_loss_weight'"):
        config_of(models[0], distill_loss_weight=0.0, rl_loss_weight=0.5)
    ((of_teacher, of_batch, of_server),) = run_ranks(_refusals, 1, models)
    assert "'distill_loss_weight' is 0, so that it would teach nothing" in of_teacher
    assert "the batch has no 'teacher_logp'; distill_loss_weight is not 0" in of_batch
    assert "'temperature' is 0.8, but servers score tokens at temperature 1" in of_server


def _of_backends(rank: int, world_size: int, paths: tuple[str, str], of_teacher: str) -> str:
    config = config_of(paths[0])
    teacher = EngineTeacher(start(config_of(paths[1], optimizer=None, backend=of_teacher)))
    engine = start(config)
    try:
        PPOActor(config, engine, teacher)
    except ConfigError as error:
        return str(error)
    finally:
        engine.destroy()
    return "taken"


@pytest.mark.slow
def test_a_teacher_whose_ranks_share_more_data_than_the_student_s_is_refused(
    models: tuple[str, str],
) -> None:
    for said in run_ranks(_of_backends, 2, models, "fsdp:c2"):
        assert said.startswith("2 ranks of the teacher share their data, and 1 of the student")
        assert "'backend' of the teacher to 'fsdp:d2'" in said
    assert run_ranks(_of_backends, 2, models, "fsdp:d2") == ["taken"] * 2


def _refusals(rank: int, world_size: int, paths: tuple[str, str]) -> list[str]:
    config = config_of(paths[0], temperature=0.8)
    engine = start(config)
    without = replace(config, distill_loss_weight=0.0)
    said = []
    with pytest.raises(ConfigError) as refused:
        PPOActor(without, engine, EngineTeacher(engine))
    said.append(str(refused.value))
    with pytest.raises(BatchError) as no_entry:
        PPOActor(config, engine).compute_advantages(whole_batch())
    said.append(str(no_entry.value))
    with pytest.raises(ConfigError) as tempered:
        ServerTeacher([VLLMServer("http://127.0.0.1:1")], engine)
    said.append(str(tempered.value))
    engine.destroy()
    return said


def _live(
    rank: int, world_size: int, paths: tuple[str, str], root: str, steps: int, allow: bool
) -> tuple[int | None, str]:
    """Take steps and snapshots from the newest generation on, with the second folder's teacher."""
    config = config_of(paths[0], allow_other_teacher=allow)
    teacher = EngineTeacher(start(config_of(paths[1], optimizer=None)))
    engine = start(config)
    before = digest({"actor": engine.dcp_state()})
    actor = PPOActor(config, engine, teacher)
    handler = make_handler(root, freq_steps=1)
    try:
        info = handler.load(engine)
    except CheckpointMismatchError as error:
        assert digest({"actor": engine.dcp_state()}) == before
        return None, str(error)
    first = 0 if info is None else info.last_step_info.next().global_step
    for step in range(first, first + steps):
        batch = rows_of(whole_batch(), rank, world_size)
        actor.ppo_update(actor.compute_advantages(batch))
        handler.dump(engine, step_info(step))
    handler.close()
    engine.destroy()
    return first, ""


@pytest.mark.slow
def test_a_run_goes_on_with_its_teacher_and_with_another_one_only_if_a_key_allows_it(
    models: tuple[str, str], tmp_path: Path
) -> None:
    student, teacher = models
    other = (student, student)
    assert run_ranks(_live, 1, models, str(tmp_path), 2, False) == [(0, "")]
    moved = tmp_path / "moved"
    Path(teacher).rename(moved)
    try:
        same = (student, str(moved))
        assert run_ranks(_live, 1, same, str(tmp_path), 1, False) == [(2, "")]
    finally:
        moved.rename(teacher)
    ((first, said),) = run_ranks(_live, 1, other, str(tmp_path), 1, False)
    assert first is None
    assert f"the run was taught by {moved} (" in said and "'allow_other_teacher' to true" in said

    # The other one is the run's from then on.
    assert run_ranks(_live, 1, other, str(tmp_path), 1, True) == [(3, "")]
    assert run_ranks(_live, 1, other, str(tmp_path), 1, False) == [(4, "")]
