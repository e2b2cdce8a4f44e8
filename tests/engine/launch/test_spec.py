"""What servers are started with, and the flags that are refused."""

import pytest

from holdfast.engine.launch import ServerSpec
from holdfast.engine.launch.spec import Identity
from holdfast.engine.servers import SGLangServer, VLLMServer
from holdfast.utils.errors import ConfigError

IDENTITY = Identity("name", "key", "admin")


def command(spec: ServerSpec) -> str:
    return " ".join(spec.command("127.0.0.1", 8000, IDENTITY, "/keys.yaml")[1:])


def test_a_vllm_server_gets_all_that_its_client_needs() -> None:
    spec = ServerSpec("vllm", "/model", tensor_parallel_size=2, max_model_len=512, sleeps=True)
    assert command(spec) == (
        "-m vllm.entrypoints.openai.api_server --enable-scale-out --logprobs-mode "
        "processed_logprobs --dtype bfloat16 --tensor-parallel-size 2 --max-model-len 512 "
        "--skip-tokenizer-init --enable-sleep-mode --model /model --host 127.0.0.1 --port 8000 "
        "--served-model-name name"
    )
    variables = spec.variables(IDENTITY, "/cache")
    assert variables == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_API_KEY": "key",
        "VLLM_CACHE_ROOT": "/cache",
    }
    client = spec.client("http://a:1", IDENTITY)
    assert isinstance(client, VLLMServer)
    assert (client.api_key, client.served_name) == ("key", "name")


def test_a_server_of_adapters_has_room_for_their_rank_and_versions() -> None:
    spec = ServerSpec("vllm", "/model", lora_rank=9, lora_modules=["q_proj"], lora_versions=3)
    flags = "--enable-lora --max-lora-rank 16 --max-loras 3 --lora-target-modules q_proj"
    assert flags in command(spec)
    assert spec.variables(IDENTITY, "")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "down_proj" in command(ServerSpec("vllm", "/model", lora_rank=8))


def test_a_server_that_returns_experts_keeps_its_prefix_cache() -> None:
    spec = ServerSpec("vllm", "/model", routed_experts=True)
    assert "--enable-return-routed-experts --enable-prefix-caching " in command(spec)
    spec = ServerSpec("sglang", "/model", routed_experts=True)
    assert "--enable-return-routed-experts " in command(spec)
    flags = ["--no-enable-prefix-caching"]
    with pytest.raises(ConfigError, match="Holdfast starts the server with '--enable-prefix"):
        ServerSpec("vllm", "/model", routed_experts=True, extra_flags=flags)
    with pytest.raises(ConfigError, match="'cpu', where vLLM returns no routed_experts"):
        ServerSpec("vllm", "/m", device="cpu", max_model_len=64, routed_experts=True)


def test_a_server_on_a_cpu_computes_no_prompt_in_parts() -> None:
    spec = ServerSpec("vllm", "/model", device="cpu", max_model_len=64, max_num_seqs=8)
    assert "--enforce-eager --max-num-batched-tokens 512 " in command(spec)
    assert spec.variables(IDENTITY, "")["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_an_sglang_server_gets_both_keys_where_no_other_user_sees_them() -> None:
    spec = ServerSpec("sglang", "/model", tensor_parallel_size=4, images=True, max_model_len=99)
    assert command(spec) == (
        "-m sglang.launch_server --dtype bfloat16 --tp-size 4 --context-length 99 --model-path "
        "/model --config /keys.yaml --host 127.0.0.1 --port 8000 --served-model-name name"
    )
    assert spec.config(IDENTITY) == {"api-key": "key", "admin-api-key": "admin"}
    assert spec.variables(IDENTITY, "/c")["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    client = spec.client("http://a:1", IDENTITY)
    assert isinstance(client, SGLangServer)
    assert (client.admin_key, client.served_name) == ("admin", "name")


def test_extra_flags_come_last_and_may_repeat_what_is_needed() -> None:
    extra = ("--dtype=bfloat16", "--gpu_memory_utilization", "0.5", "--seed", "-1")
    spec = ServerSpec("vllm", "/model", extra_flags=extra)
    assert command(spec).endswith(" --gpu-memory-utilization 0.5 --seed -1")
    assert command(spec).count("--dtype") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--compilation-config.cudagraph_mode", "NONE"],
        ["--middleware", "a.B", "--middleware", "c.D"],
    ],
)
def test_keys_of_json_values_and_flags_that_are_given_twice_reach_the_server(
    flags: list[str],
) -> None:
    spec = ServerSpec("vllm", "/model", extra_flags=flags)
    assert command(spec).endswith(" ".join(["name", *flags]))


@pytest.mark.parametrize(
    ("flags", "given", "needed"),
    [
        (["--dtype", "float16"], "--dtype float16", "--dtype bfloat16"),
        (["--dtype=float16"], "--dtype float16", "--dtype bfloat16"),
        (["-tp", "2"], "--tensor-parallel-size 2", "--tensor-parallel-size 1"),
        (["--logprobs_mode", "raw_logprobs"], "raw_logprobs", "processed_logprobs"),
        (["--no-enable-scale-out"], "--no-enable-scale-out", "--enable-scale-out"),
        (["--port", "8000"], "--port 8000", "--port"),
        (["--served-model-name", "mine"], "--served-model-name mine", "--served-model-name"),
    ],
)
def test_a_flag_that_contradicts_a_needed_one_is_refused(
    flags: list[str], given: str, needed: str
) -> None:
    with pytest.raises(ConfigError, match="leave the flag out") as caught:
        ServerSpec("vllm", "/model", extra_flags=flags)
    assert given in str(caught.value) and needed in str(caught.value)


@pytest.mark.parametrize("flags", [["--config", "mine.yaml"], ["--api-key", "mine"]])
def test_sglang_takes_no_other_keys(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"extra_flags have .*{flags[0]}.*leave the flag out"):
        ServerSpec("sglang", "/model", extra_flags=flags)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "tgi"}, "kind"),
        ({"dtype": "int8"}, "dtype"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"device": "cpu"}, "max_model_len"),
        ({"kind": "sglang", "device": "cpu"}, "SGLang is started on GPUs only"),
        ({"kind": "sglang", "transfer": "nccl"}, "an option of vLLM"),
        ({"extra_flags": ["8000"]}, "expected a flag"),
        ({"environment": {"VLLM_SERVER_DEV_MODE": "0"}}, "VLLM_SERVER_DEV_MODE is '0'"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(options: dict, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ServerSpec(**{"kind": "vllm", "model": "/model", **options})
