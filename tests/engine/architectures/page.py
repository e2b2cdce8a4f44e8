"""docs/models.md: the verdicts as two tables, written and read back."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import transformers

from tests.engine.architectures import released, tiny
from tests.engine.architectures.checks import (
    CHECKS,
    DENSE,
    GOOD,
    LOGITS,
    NO,
    NONE,
    PADDED,
    REFUSED,
    RELEASED_CHECKS,
    SILENT,
    YES,
    Verdict,
)
from tests.engine.architectures.matrix import Verdicts, checks_of

PAGE = Path(__file__).parents[3] / "docs" / "models.md"

_WITH_IMAGES = "model and rows"
_WORDS = (YES, NO, REFUSED, PADDED, LOGITS, DENSE, NONE)
_COLUMNS = {
    "starts": "`FSDPEngine.initialize` loads the folder. A multimodal folder is loaded as a causal LM",
    "packed": f"`{YES}`: sequences are packed into one row. `{PADDED}`: packing is refused because sequences would see "
    "each other, and the other columns are for `pack_sequences: false`",
    "packed = alone": "`forward_batch` equals transformers on each sequence alone, float32, to 2e-5",
    "long = alone": "same for sequences on both sides of the original context length, with and without a long "
    "neighbour. Models without an original length use half of their context. LongRoPE: with the factors that vLLM uses "
    "at this `max_model_len`",
    "head": "the head computes log-probabilities and entropies in chunks, equal to 2e-5 to the logits of transformers. "
    f"`{LOGITS}`: equal, but from whole logits, because the model changes the result of its head",
    "HF float32, HF bfloat16": "all files of an export equal `save_pretrained` of the unsharded model in that dtype, "
    "byte for byte",
    "gradients": "one `train_batch` with SGD equals a step of the unsharded model on padded rows: the loss to 2e-5, "
    "every tensor to a thousandth of its largest change",
    "DCP": "one rank loads a checkpoint of two ranks with every bit of weights and optimizer state",
    "bfloat16 step": "one `train_batch` with bfloat16 compute is finite, with a loss near the one in float32",
    "critic": "a value head on the folder's body: it has the folder's weights, values are finite, a step is taken",
    "c = 2": "with `backend: fsdp:c2` both ranks get the same batch and share every row: the checks of `packed = "
    f"alone` and `gradients`. `{PADDED}`: refused, as it should be, because only packed rows are shared",
    "t = 2": "with `backend: fsdp:t2` both ranks get the same batch and share every matrix: the same checks",
    "e = 2": f"with `backend: fsdp:d2e2` the ranks share the experts: the same checks. `{DENSE}`: the model has none",
}
_HEAD = f"""\
# Models

Find your model in the tables, or write the row of an architecture again:

    .venv/bin/python -m tests.engine.architectures Qwen/Qwen3-0.6B

The tables show the results for the causal language models of transformers {{version}}.
For each model, `python -m tests.engine.architectures` writes a tiny random model as a folder, loads it on two ranks
(gloo, CPU), and compares it with the unsharded model in transformers.

| column | check |
|---|---|
{{columns}}

- `{NO}`: an unexpected error, or a difference without an error. The reason of a difference begins with {SILENT}.
- `{REFUSED}`: an error with an explanation.
- `{NONE}`: does not apply, or transformers itself cannot run the check.

The last column of each row has the reasons.
"""
_RELEASED = """\
## Released models

Their folders have the released `config.json` with fewer layers and smaller sizes. Each flag, rope setting, tie, list
and MoE field equals the public file that the row names, with its date. A key that the file lacks has the default of the
library. Files and reductions are in `tests/engine/architectures/released`.

{summary}
"""
_SEEING = """
## Models that see

The same checks with `train_vision: true` on four rows with 1, 2, 0 and 0 images, so that one of the two ranks has none.
They run on the released `config.json` as above. `c = 2` and `t = 2` are refused for models that see.

{summary}
"""
_OTHERS = """
## Other architectures

All other model types that `AutoModelForCausalLM` builds. Their configs are invented: the library's defaults, made tiny.

{summary}
"""


def other_model_types() -> list[str]:
    """Model types without a released model, sorted."""
    return sorted(set(tiny.model_types()) - {released.model_type(name) for name in released.model_names()})


def render(results: Mapping[str, Verdicts], version: str = transformers.__version__) -> str:
    """Format the page from verdicts by model type or name of a released model."""
    described = "\n".join(_row(pair) for pair in _COLUMNS.items())
    seeing = {name: verdicts for name, verdicts in results.items() if name.endswith(released.WITH_IMAGES)}
    models = {name: verdicts for name, verdicts in results.items() if _is_released(name) and name not in seeing}
    others = {name: verdicts for name, verdicts in results.items() if not _is_released(name)}
    parts = [
        _HEAD.format(version=version, columns=described),
        _RELEASED.format(summary=_summary(models, "models")),
        *_table(_header(RELEASED_CHECKS, "model", "class", "source"), models),
        _SEEING.format(summary=_summary(seeing, "models")),
        *_table(_header(RELEASED_CHECKS, _WITH_IMAGES, "class", "source"), seeing),
        _OTHERS.format(summary=_summary(others, "architectures")),
        *_table(_header(CHECKS, "model type"), others),
    ]
    return "\n".join(parts) + "\n"


def _is_released(name: str) -> bool:
    return "/" in name


def _header(checks: Iterable[str], *first: str) -> list[str]:
    return [*first, *checks, "why"]


def _table(header: Sequence[str], results: Mapping[str, Verdicts]) -> list[str]:
    lines = [_row(header), "|---" * len(header) + "|"]
    for name, verdicts in sorted(results.items(), key=lambda item: item[0].lower()):
        reasons = "; ".join(f"{check}: {verdict.why}" for check, verdict in verdicts.items() if verdict.why)
        about = [released.class_name(name), _source(name)] if _is_released(name) else []
        words = [verdicts[check].word for check in checks_of(name)]
        lines.append(_row([name, *about, *words, reasons.replace("|", "/")]))
    return lines


def _source(name: str) -> str:
    found = released.read(name)
    source, _, where = found["source"].partition(" (")
    if not source.startswith("https://github.com/"):
        return f"{found['source']}, {found['date']}"
    repository = "/".join(source.split("/")[3:5])
    return f"[{repository}]({source}){where and f' ({where}'}, {found['date']}"


def _summary(results: Mapping[str, Verdicts], what: str) -> str:
    judged = [verdicts for verdicts in results.values() if verdicts["starts"].word != NONE]
    whole = sum(all(verdict.word in GOOD for verdict in verdicts.values()) for verdicts in judged)
    silent = sum(any(SILENT in verdict.why for verdict in verdicts.values()) for verdicts in judged)
    starts = sum(verdicts["starts"].word == YES for verdicts in judged)
    return (
        f"Transformers itself runs {len(judged)} of these {len(results)} {what} in tiny form: {starts} start, "
        f"{whole} do everything, and {silent} differ anywhere without an error."
    )


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read(text: str) -> tuple[str, dict[str, Verdicts]]:
    """Parse the version of transformers and the verdicts of a page.

    Raises:
        ValueError: `render` did not write the page.
    """
    version = text.partition("of transformers ")[2].split("\n")[0].rstrip(".")
    results: dict[str, Verdicts] = {}
    firsts = ("model", "class", "source"), (_WITH_IMAGES, "class", "source"), ("model type",)
    for header in (_header(CHECKS if len(first) == 1 else RELEASED_CHECKS, *first) for first in firsts):
        _, found, table = text.partition(_row(header))
        if not (version and found):
            raise ValueError(f"no page of these columns: {header}")
        for line in table.strip().partition("\n\n")[0].splitlines()[1:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            checks = checks_of(cells[0])
            words, reasons = cells[-len(checks) - 1 : -1], cells[-1]
            if len(cells) != len(header) or not set(words) <= set(_WORDS):
                raise ValueError(f"not a row of the table: {line}")
            results[cells[0]] = {
                check: Verdict(word, _reason(reasons, check)) for check, word in zip(checks, words, strict=True)
            }
    return version, results


def _reason(reasons: str, check: str) -> str:
    """The reason for one check in a row. Reasons are in the order of the checks."""
    _, found, rest = f"; {reasons}".partition(f"; {check}: ")
    return min((rest.partition(f"; {other}: ")[0] for other in RELEASED_CHECKS), key=len) if found else ""
