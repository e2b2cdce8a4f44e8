"""`holdfast plan` answers from a config alone, and says what to change."""

from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.engine.seeing import config_of
from tests.recover.cli.commands import answer, holdfast

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of Qwen3-8B, without weights."""
    folder = tmp_path_factory.mktemp("models") / "Qwen3-8B"
    config = Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )
    config.save_pretrained(folder)
    return folder


def test_a_plan_names_parts_peak_disk_and_changes_that_make_it_fit(qwen3_8b: Path) -> None:
    found = answer("plan", qwen3_8b, "--gpus", "8")
    assert found["parameters"] == 8_190_735_360
    per_gpu = found["bytes_per_gpu"]
    assert per_gpu["weights"] == pytest.approx(4 * found["parameters"] / 8, rel=1e-3)
    assert per_gpu["moments"] == pytest.approx(8 * found["parameters"] / 8, rel=1e-3)
    assert found["bytes_on_disk"]["generation"] == pytest.approx(12 * found["parameters"], rel=1e-3)
    assert not found["fits"] and found["fits_after_changes"]
    assert found["changes"][0]["change"] == "gradient_checkpointing: true"
    again = answer("plan", qwen3_8b, "--gpus", "8", "--checkpointing")
    assert again["fits"] and again["changes"] == []
    assert again["bytes_per_gpu"]["peak"] == found["changes"][0]["peak_bytes"]


def test_the_plan_of_a_model_with_experts_says_what_their_choices_take(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(num_hidden_layers=3, num_experts=16, num_experts_per_tok=8)
    config.save_pretrained(tmp_path)
    assert answer("plan", tmp_path)["routed_experts_bytes_per_token"] == 24
    code, out, _ = holdfast("plan", tmp_path)
    words = " ".join(out.split())
    assert code == 0 and "routed experts of a token (router_replay) 24 B" in words


@pytest.mark.slow
def test_the_optimizer_and_checkpointing_are_those_of_the_options(qwen3_8b: Path) -> None:
    plain = answer("plan", qwen3_8b, "--gpus", "8", "--checkpointing")
    n, outside = plain["parameters"], 2 * 151936 * 4096
    for kind, n_bytes in (
        ("adam_bf16", 4 * n),
        ("adam8bit", 2.0625 * n),
        ("muon", 4 * n + 4 * outside),
    ):
        found = answer("plan", qwen3_8b, "--gpus", "8", "--checkpointing", "--optimizer", kind)
        assert found["bytes_per_gpu"]["moments"] == pytest.approx(n_bytes / 8, rel=1e-3), kind
        assert found["bytes_on_disk"]["generation"] == pytest.approx(4 * n + n_bytes, rel=1e-3)
        peaks = [each["bytes_per_gpu"]["peak"] for each in (plain, found)]
        assert peaks[0] - peaks[1] == pytest.approx((8 * n - n_bytes) / 8, rel=1e-3)
    every, some = (answer("plan", qwen3_8b, *options) for options in ((), ("--selective",)))
    assert (
        plain["bytes_per_gpu"]["peak"]
        < some["bytes_per_gpu"]["peak"]
        < every["bytes_per_gpu"]["peak"]
    )


@pytest.mark.slow
def test_state_in_host_memory_comes_last_among_the_changes_and_counts_there(qwen3_8b: Path) -> None:
    found = answer("plan", qwen3_8b, "--gpus", "1", "--checkpointing")
    assert [each["change"] for each in found["changes"]] == ["fsdp.offload_params: true"] and found[
        "fits_after_changes"
    ]
    weights = 4 * found["parameters"]
    assert found["changes"][0]["host_bytes_per_node"] == pytest.approx((4 + 3) * weights, rel=1e-3)
    assert found["bytes_in_host_memory_per_node"] == {"state": 0, "snapshots": 3 * weights}
    params = answer("plan", qwen3_8b, "--gpus", "1", "--checkpointing", "--offload", "params")
    assert params["fits"] and params["bytes_per_gpu"]["peak"] == found["changes"][0]["peak_bytes"]
    assert params["bytes_in_host_memory_per_node"] == {
        "state": 4 * weights,
        "snapshots": 3 * weights,
    }
    optimizer = answer("plan", qwen3_8b, "--gpus", "1", "--checkpointing", "--offload", "optimizer")
    assert not optimizer["fits"]
    assert optimizer["bytes_per_gpu"]["peak"] == found["bytes_per_gpu"]["peak"] - 2 * weights
    assert (
        optimizer["changes"][-1]["change"] == "fsdp.offload_params: true, optimizer.offload: false"
    )
    enough = answer("plan", qwen3_8b, "--gpus", "1", "--checkpointing", "--memory", "90GB")
    assert [each["change"] for each in enough["changes"]] == ["optimizer.offload: true"]


@pytest.mark.slow
def test_a_server_takes_turns_with_training(qwen3_8b: Path) -> None:
    options = ("plan", qwen3_8b, "--checkpointing", "--colocate", "vllm:0.4")
    found = answer(*options)
    assert found["bytes_per_gpu"]["usable"] == 76 * 10**9, "each process keeps 2 GB"
    assert found["bytes_for_server"] == {"asked": 32 * 10**9, "usable": 78 * 10**9}
    _, out, _ = holdfast(*options, "--memory", "40GB")
    assert (
        "of 36 GB: fits" in out
        and "server, while the trainer is offloaded" in out
        and "16 GB of 38 GB: fits" in out
    )
    adapters = answer(*options, "--lora", "8", "--gpus", "1")
    assert adapters["bytes_in_host_memory_per_node"]["snapshots"] > 2 * 8.19e9, (
        "the frozen base leaves, too"
    )


@pytest.mark.slow
def test_the_table_says_whether_it_fits(qwen3_8b: Path) -> None:
    code, out, _ = holdfast("plan", qwen3_8b, "--lora", "16", "--checkpointing", "--gpus", "1")
    assert code == 0
    assert "8.23B parameters, 1 GPU (d1), 16384 tokens" in out and "of 78 GB: fits" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "much"], "'much' is no size above 0; expected for instance 80GB"),
        (["--memory", "1.2.3GB"], "'1.2.3GB' is no size above 0"),
        (["--memory", ".GB"], "'.GB' is no size above 0"),
        (["--bandwidth", "0"], "'0' is no size above 0; expected for instance 80GB"),
        (["--bandwidth", "0.4B/s"], "'0.4B/s' is no size above 0"),
        (["--colocate", "vllm"], "'vllm' is no server with its share of the memory"),
        (["--group", "7000:150"], "'7000:150' is no group of answers; expected the tokens of a"),
        (["--group", "0:150:8"], "'0:150:8' is no group of answers"),
        (["--backend", "fsdp:d4"], "data_parallel_size is 4, but 8 rank(s) have joined"),
    ],
)
def test_bad_arguments_end_in_one_message(qwen3_8b: Path, options: list[str], message: str) -> None:
    code, _, err = holdfast("plan", qwen3_8b, *options)
    assert code == 2 and message in " ".join(err.split())


def test_a_plan_for_answers_that_share_a_prompt_says_how_many_tokens_it_spares(
    qwen3_8b: Path,
) -> None:
    code, out, _ = holdfast("plan", qwen3_8b, "--group", "7000:150:8", "--memory", "10TB")
    assert code == 0
    assert "8 answers of 150 tokens to a prompt of 7000 are 6.97 times as many tokens as" in out


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    code, _, err = holdfast("plan", tmp_path)
    assert code == 2 and "expected a folder with the config.json" in err


def test_the_plan_of_a_model_that_sees_counts_the_tower_and_says_what_it_leaves_out(
    tmp_path: Path,
) -> None:
    config_of("qwen2_5_vl").save_pretrained(tmp_path)
    code, _, err = holdfast("plan", tmp_path)
    assert code != 0 and "train_vision" in err
    found = answer("plan", tmp_path, "--vision")
    assert found["parameters"] == found["trained_parameters"] == 36592
    assert found["uncounted"] == ["activations of the vision tower are not counted"]
    code, _, err = holdfast("plan", tmp_path, "--vision", "--backend", "fsdp:d4t2")
    assert code == 2 and "'train_vision' is true, but tensor_parallel_size is 2" in err
    code, out, _ = holdfast("plan", tmp_path, "--vision")
    assert code == 0 and "Activations of the vision tower are not counted." in out
