"""The probe of an engine's weights is the same wherever it is computed, and computing it changes
nothing.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from holdfast.engine import FinetuneSpec, FSDPEngine, TrainEngineConfig, WeightUpdateMeta
from holdfast.engine.servers import SGLangServer, VLLMServer
from holdfast.engine.servers.content_check import (
    PROBE_NAME,
    CheckedAnswer,
    WeightsProbe,
    compute_weights_probe,
    content_problem,
    expected_answer,
    read_weights_probe,
)
from holdfast.utils.errors import ConfigError, PublishError, WrongContentError
from holdfast.utils.rng import capture_rng
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import model_logprobs, publish_model, step, tiny_model
from tests.engine.servers.scripted import PlainServer
from tests.helpers import run_ranks
from tests.tiers import slow_but


def _probed(rank: int, world_size: int, folder: str) -> WeightsProbe:
    engine = FSDPEngine(
        TrainEngineConfig(path=folder, dtype="float32", optimizer=None, temperature=0.7)
    )
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 8, 1))
    for training in (True, False):
        engine.train(training)
        before = capture_rng()
        probe = compute_weights_probe(engine)
        after = capture_rng()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert all(module.training == training for module in engine.model.modules())
    assert probe is not None
    engine.config.mb_spec.granularity = 2  # as with pairs
    assert compute_weights_probe(engine) == probe
    engine.destroy()
    critic = FSDPEngine(
        TrainEngineConfig(path=folder, dtype="float32", optimizer=None, is_critic=True)
    )
    critic.create_process_group()
    critic.initialize(None, FinetuneSpec(1, 8, 1))
    assert compute_weights_probe(critic) is None
    critic.destroy()
    return probe


def test_every_rank_computes_the_probe_that_one_process_computes(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3(vocab_size=64, max_length=24))
    first, second = run_ranks(_probed, 2, str(tmp_path / "model"))
    assert first == second and first.dtype == "float32"
    assert len(first.prompt_ids) == 23, (
        "the server samples one more token, and 24 are all that the model takes"
    )
    assert all(16 <= token < 48 for token in first.prompt_ids)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    expected = model_logprobs(model, first.prompt_ids)
    assert max(abs(a - b) for a, b in zip(first.logprobs, expected, strict=True)) < 1e-5


class _CheckingServer(PlainServer):
    checks_content = True


def _published(rank: int, world_size: int, folder: str, root: str) -> list[bool]:
    engine = FSDPEngine(TrainEngineConfig(path=folder, dtype="float32", optimizer=None))
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 8, 1))
    found = []
    plain, checking = PlainServer("plain"), _CheckingServer("checking")
    for version, servers in enumerate(([], [plain], [plain, checking])):
        engine.connect_engine(servers if rank == 0 else [], WeightUpdateMeta("disk", root, keep=9))
        engine.set_version(version)
        found.append(read_weights_probe(engine.update_weights().path) is not None)
    engine.destroy()
    return found


def test_a_probe_is_published_unless_no_server_looks_at_it(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3(vocab_size=64))
    for found in run_ranks(_published, 2, str(tmp_path / "model"), str(tmp_path / "weights")):
        assert found == [True, False, True], (
            "a folder that nobody was told of may be loaded by any server"
        )


def test_a_probe_is_read_back_to_the_bit(tmp_path: Path) -> None:
    assert read_weights_probe(tmp_path) is None
    probe = WeightsProbe([3, 1, 2], [-0.1, -1.0 / 3], "bfloat16")
    (tmp_path / PROBE_NAME).write_bytes(probe.encode())
    assert read_weights_probe(tmp_path) == probe


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"prompt_ids": [1], "logprobs": [], "dtype": "int8"}']
)
def test_a_file_that_is_no_probe_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / PROBE_NAME).write_text(text)
    with pytest.raises(
        PublishError,
        match=r"weights_probe\.json is not a probe of weights .*; publish the version again",
    ):
        read_weights_probe(tmp_path)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three versions in bfloat16: one step apart, and the last with the weights of the second."""
    model, paths = tiny_model(), []
    for version, lr in ((1, 0.0), (2, 1e-5), (3, 0.0)):
        step(model, lr)
        paths.append(Path(publish_model(tmp_path, version, model, "bfloat16")))
    return paths


def probe_of(folder: Path) -> WeightsProbe:
    probe = read_weights_probe(folder)
    assert probe is not None
    return probe


def checked_answer(
    folder: Path, probe: WeightsProbe, logprobs: Sequence[float], dtype: str | None = None
) -> CheckedAnswer:
    return CheckedAnswer(expected_answer(folder, probe, dtype), logprobs)


def problem_of(
    folder: Path, probe: WeightsProbe, logprobs: Sequence[float], dtype: str | None = None
) -> str | None:
    return content_problem(checked_answer(folder, probe, logprobs, dtype), before=None)


def test_an_unchanged_answer_is_stale_only_where_weights_changed(folders: list[Path]) -> None:
    one, two, three = map(probe_of, folders)
    first, again = (checked_answer(folders[0], one, one.logprobs) for _ in range(2))
    assert content_problem(first, None) is None
    assert content_problem(again, first) is None, "the same folder again"
    stale = checked_answer(folders[1], two, one.logprobs)
    assert "bit for bit that of the version before" in (content_problem(stale, first) or "")
    second = checked_answer(folders[1], two, two.logprobs)
    assert content_problem(second, first) is None
    third = checked_answer(folders[2], three, two.logprobs)
    assert content_problem(third, second) is None, "the weights are those of version 2"
    assert content_problem(stale, None) is None, "nothing to compare with"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", slow_but(["sglang"], ["vllm", "sglang"]))
def test_a_server_that_keeps_its_weights_is_found_at_the_first_change_in_16_bits(
    kind: str, folders: list[Path], tmp_path: Path
) -> None:
    """Idle, and busy, when no answer repeats to the bit. The server is started with the weights of
    version 1.
    """
    client = {"vllm": VLLMServer, "sglang": SGLangServer}[kind]
    with FakeServer(kind, tmp_path, dtype="bfloat16", folder=str(folders[0])) as fake:
        for noise in (0.0, 7e-3):
            server = client(fake.url)
            fake.tell(lie=100, noise=noise)
            server.update_weights_from_disk(str(folders[0]), 1)
            with pytest.raises(WrongContentError, match=r"kept the old ones.*It was paused again"):
                server.update_weights_from_disk(str(folders[1]), 2)
            fake.restart()
        fake.tell(noise=7e-3)
        server = client(fake.url)
        server.update_weights_from_disk(str(folders[0]), 1)
        server.update_weights_from_disk(str(folders[1]), 2)
        asked = [call for call in fake.calls() if "checker" in call]
        server.update_weights_from_disk(str(folders[2]), 3)
        assert [call for call in fake.calls() if "checker" in call] == asked, (
            "it was shown that loads change it"
        )
        fake.restart()  # with version 1, and it ignores loads from now on
        fake.tell(lie=100, noise=7e-3)
        server.update_weights_from_disk(str(folders[0]), 1)
        with pytest.raises(WrongContentError, match="kept the old ones"):
            server.update_weights_from_disk(str(folders[1]), 2)


@pytest.mark.timeout(60)
def test_a_server_without_checksums_is_updated_all_the_same(
    folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeServer("vllm", tmp_path, dtype="bfloat16", folder=str(folders[0])) as fake:
        fake.tell(fail={"/weight_checker": 100})
        server = VLLMServer(fake.url)
        for version, folder in enumerate(folders[:2], 1):
            assert server.update_weights_from_disk(str(folder), version) == version
    assert caplog.text.count("gives no checksums of its weights") == 1


def test_the_coarsest_dtype_says_how_close_an_answer_must_be(folders: list[Path]) -> None:
    probe = probe_of(folders[0])
    off = [logprob + 1e-3 for logprob in probe.logprobs]
    garbage = [logprob + 1.0 for logprob in probe.logprobs]
    assert problem_of(folders[0], probe, off) is None
    assert "by 1 on average, in bfloat16 by at most 0.1" in (
        problem_of(folders[0], probe, garbage) or ""
    )
    for answer in (off[:-1], [float("nan")] * len(off)):
        assert problem_of(folders[0], probe, answer)
    config = folders[0] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}))
    fine = WeightsProbe(probe.prompt_ids, probe.logprobs, "float32")
    assert problem_of(folders[0], fine, off)
    assert problem_of(folders[0], fine, off, "bfloat16") is None
    assert problem_of(folders[0], probe, off) is None, "the trainer computes in bfloat16"
    with pytest.raises(ConfigError, match="config key 'dtype' is 'int4'"):
        VLLMServer("http://127.0.0.1:9", dtype="int4")
