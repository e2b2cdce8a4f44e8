"""A bad configuration is one error that names the key, before anything has started."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.utils.config import load_config, require_choice, require_range
from holdfast.utils.errors import ConfigError


@dataclass
class Section:
    lr: float = 0.1
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_range("section.lr", self.lr, low=0.0, high=1.0)


@dataclass
class Config:
    path: str = "model"
    steps: int | None = None
    flag: bool = False
    section: Section = field(default_factory=Section)

    def __post_init__(self) -> None:
        require_choice("path", self.path, ("model", "other"))


def write(folder: Path, text: str) -> Path:
    (folder / "config.yaml").write_text(text)
    return folder / "config.yaml"


def test_defaults_file_and_overrides_win_in_that_order(tmp_path: Path) -> None:
    assert load_config(Config) == Config()
    path = write(tmp_path, "path: other\nsection:\n  lr: 0.5\n  names: [a, b]\n")
    assert load_config(Config, path) == Config("other", section=Section(0.5, ["a", "b"]))
    config = load_config(
        Config, str(path), ["section.lr=1e-3", "steps=4", "flag=true", "section.names=[c]"]
    )
    assert config == Config("other", 4, True, Section(1e-3, ["c"]))
    assert type(config.section) is Section and type(config.section.names) is list
    assert load_config(Config, write(tmp_path, "")) == Config()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stepz=1"], "'stepz'"),
        (["section.lrr=1"], "lrr"),
        (["steps=many"], "'steps'.*many"),
        (["section=3"], "section"),
        (["section.lr=2"], r"'section.lr' is 2.0; expected a value from 0.0 to 1.0"),
        (["path=third"], "'path' is 'third'; expected one of 'model', 'other'"),
        (["steps"], "'steps' is not of the form key=value"),
    ],
)
def test_a_wrong_override_is_an_error_that_names_the_key(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Config, overrides=overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 1", "'stepz' in .*config.yaml"),
        ("a: [1", "is not YAML"),
        ("section: {lr: x}", "section.lr"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_file_and_key(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Config, write(tmp_path, text))


@pytest.mark.parametrize("text", ["1:00:30:00", "3:30:00"])
def test_a_value_that_yaml_reads_as_base_60_is_refused_unless_quoted(
    text: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=f"{text} is a number in base 60 to YAML; put it in quotes: '{text}'"
    ):
        load_config(Config, overrides=[f"path={text}"])
    with pytest.raises(ConfigError, match="base 60"):
        load_config(Config, write(tmp_path, f"path: {text}"))
    with pytest.raises(ConfigError, match=f"'path' is '{text}'; expected one of"):
        load_config(Config, overrides=[f"path='{text}'"])


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_in_another_encoding_is_an_error_that_names_it(
    encoding: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes("path: café".encode(encoding))
    with pytest.raises(ConfigError, match=r"config\.yaml is not YAML .*'utf-8' codec"):
        load_config(Config, file)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml does not exist"):
        load_config(Config, tmp_path / "missing.yaml")
