"""Value types refuse what they cannot mean, and name the key."""

import pytest

from holdfast.engine import SaveLoadMeta
from holdfast.utils.errors import ConfigError


def test_what_an_export_cannot_be_is_refused_with_the_key() -> None:
    with pytest.raises(ConfigError, match="'dtype' is 'int8'; expected one of None, 'float32', 'bfloat16', 'float16'"):
        SaveLoadMeta("out", "hf", with_optim=False, dtype="int8")
    with pytest.raises(ConfigError, match="'max_shard_size_bytes' is 0"):
        SaveLoadMeta("out", "hf", with_optim=False, max_shard_size_bytes=0)
    with pytest.raises(ConfigError, match="are for weight_format 'hf'"):
        SaveLoadMeta("out", "dcp", with_optim=True, dtype="bfloat16")
