"""docs/models.md names the limits of each model. docs/models-table.md has all verdicts, which are
read back.
"""

import re
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

PAGE = Path(__file__).parents[3] / "docs" / "models-table.md"
SUMMARY = PAGE.with_name("models.md")

_WITH_IMAGES = "model and rows"
_WORDS = (YES, NO, REFUSED, PADDED, LOGITS, DENSE, NONE)
_COLUMNS = {
    "starts": (
        "`FSDPEngine.initialize` loads the folder. A multimodal folder is loaded as a causal LM"
    ),
    "packed": (
        f"`{YES}`: sequences are packed into one row. `{PADDED}`: packing is refused because "
        "sequences would see each other, and the other columns are for `pack_sequences: false`"
    ),
    "packed = alone": (
        "`forward_batch` equals transformers on each sequence alone, float32, to 2e-5"
    ),
    "long = alone": (
        "same for sequences on both sides of the original context length, with and without a "
        "long neighbour. Models without an original length use half of their context. LongRoPE: "
        "with the factors that vLLM uses at this `max_model_len`"
    ),
    "head": (
        "the head computes log-probabilities and entropies in chunks, equal to 2e-5 to the "
        f"logits of transformers. `{LOGITS}`: equal, but from whole logits, because the model "
        "changes the result of its head"
    ),
    "HF float32, HF bfloat16": (
        "all files of an export equal `save_pretrained` of the unsharded model in that dtype, "
        "byte for byte"
    ),
    "gradients": (
        "one `train_batch` with SGD equals a step of the unsharded model on padded rows: the "
        "loss to 2e-5, every tensor to a thousandth of its largest change"
    ),
    "DCP": "one rank loads a checkpoint of two ranks with every bit of weights and optimizer state",
    "bfloat16 step": (
        "one `train_batch` with bfloat16 compute is finite, with a loss near the one in float32"
    ),
    "critic": (
        "a value head on the folder's body: it has the folder's weights, values are finite, a "
        "step is taken"
    ),
    "c = 2": (
        "with `backend: fsdp:c2` both ranks get the same batch and share every row: the checks "
        f"of `packed = alone` and `gradients`. `{PADDED}`: refused, as it should be, because only "
        "packed rows are shared"
    ),
    "t = 2": (
        "with `backend: fsdp:t2` both ranks get the same batch and share every matrix: the same "
        "checks"
    ),
    "e = 2": (
        f"with `backend: fsdp:d2e2` the ranks share the experts: the same checks. `{DENSE}`: the "
        "model has none"
    ),
}
_HEAD = f"""\
# All checks of models

Each row of these tables is a model and each column a check. [Models](models.md) says in short what
works. The tables show the results for the causal language models of transformers {{version}}. For
each model, `python -m tests.engine.architectures` writes a tiny random model as a folder, loads it
on two ranks (gloo, CPU), and compares it with the unsharded model in transformers.

| column | check |
|---|---|
{{columns}}

- `{NO}`: an unexpected error, or a difference without an error. The reason of a difference begins
  with {SILENT}.
- `{REFUSED}`: an error with an explanation.
- `{NONE}`: does not apply, or transformers itself cannot run the check.

The last column of each row has the reasons.
"""
_SHORT_HEAD = """\
# Models

Find your model here, or check an architecture again:

    .venv/bin/python -m tests.engine.architectures Qwen/Qwen3-0.6B

For transformers {version}, tiny random models of {released} released models and of {others} other
architectures were loaded on two ranks and compared with the unsharded model in transformers:
forward and gradients up to rounding, checkpoints and exports to the bit, a step in bfloat16, a
critic, and meshes with context (`c`), tensor (`t`) and expert (`e`) parallelism. {silent} of them
differ anywhere without an error. What a model cannot do is refused with the reason. [All
checks](models-table.md) has every result and every reason.

Words of the tables:

- `c`, `t`, `e`: this kind of parallelism is refused for the model.
- `padded`: sequences are not packed into one row (`pack_sequences: false`). `c`, which needs packed
  rows, is refused too.
- `whole logits`: the head computes log-probabilities from whole logits, because the model changes
  its result.
- Other words are columns of [all checks](models-table.md).
"""
_RELEASED = """\
## Released models

Their folders have the released `config.json` with fewer layers and smaller sizes. Each flag, rope
setting, tie, list and MoE field equals the public file that the row names, with its date. A key
that the file lacks has the default of the library. Files and reductions are in
`tests/engine/architectures/released`.

{summary}
"""
_SEEING = """
## Models that see

The same checks with `train_vision: true` on four rows with 1, 2, 0 and 0 images, so that one of the
two ranks has none. They run on the released `config.json` as above. `c = 2` and `t = 2` are refused
for models that see.

{summary}
"""
_OTHERS = """
## Other architectures

All other model types that `AutoModelForCausalLM` builds. Their configs are invented: the library's
defaults, made tiny.

{summary}
"""


def other_model_types() -> list[str]:
    """Model types without a released model, sorted."""
    return sorted(
        set(tiny.model_types()) - {released.model_type(name) for name in released.model_names()}
    )


def render(results: Mapping[str, Verdicts], version: str = transformers.__version__) -> str:
    """Format the page from verdicts by model type or name of a released model."""
    described = "\n".join(_row(pair) for pair in _COLUMNS.items())
    seeing = {
        name: verdicts for name, verdicts in results.items() if name.endswith(released.WITH_IMAGES)
    }
    models = {
        name: verdicts
        for name, verdicts in results.items()
        if _is_released(name) and name not in seeing
    }
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


def summarise(results: Mapping[str, Verdicts], version: str = transformers.__version__) -> str:
    """Format the page for users: for each set of limits the models that have it."""
    kinds: dict[str, dict[str, Verdicts]] = {
        "Released models": {},
        "Models that see": {},
        "Other architectures": {},
    }
    for name, verdicts in sorted(results.items(), key=lambda item: item[0].lower()):
        seeing = name.endswith(released.WITH_IMAGES)
        kind = (
            "Models that see"
            if seeing
            else "Released models"
            if _is_released(name)
            else "Other architectures"
        )
        kinds[kind][name] = verdicts
    head = _SHORT_HEAD.format(
        version=version,
        released=len(kinds["Released models"]) + len(kinds["Models that see"]),
        others=len(kinds["Other architectures"]),
        silent=sum(
            any(SILENT in verdict.why for verdict in verdicts.values())
            for verdicts in results.values()
        ),
    )
    parts = [head]
    for kind, models in kinds.items():
        by_limits: dict[str, list[str]] = {}
        for name, verdicts in models.items():
            by_limits.setdefault(_limits(verdicts), []).append(
                name.removesuffix(released.WITH_IMAGES)
            )
        parts += [f"## {kind}", ""]
        if kind == "Models that see":
            parts += ["With `train_vision: true`, on rows with and without images.", ""]
        parts += ["| limits | models |", "|---|---|"]
        rows = sorted(
            by_limits.items(),
            key=lambda item: (item[0] != _NO_LIMITS, item[0] == _NOT_RUN, -len(item[1])),
        )
        parts += [_row([limits, ", ".join(names)]) for limits, names in rows]
        parts.append("")
    return "\n".join(parts)


_NO_LIMITS, _NOT_RUN = "none", "not run: transformers itself fails"


def _limits(verdicts: Verdicts) -> str:
    """The checks that a model does not pass, in words."""
    if verdicts["starts"].word == NONE:
        return _NOT_RUN
    if verdicts["starts"].word != YES:
        return f"does not start: {verdicts['starts'].why or verdicts['starts'].word}".replace(
            "|", "/"
        )
    limits = []
    for check, verdict in verdicts.items():
        if check == "packed" and verdict.word == PADDED:
            limits.append("padded")
        elif verdict.word == LOGITS:
            limits.append("whole logits")
        elif check in ("c = 2", "t = 2", "e = 2") and verdict.word == REFUSED:
            limits.append(check[0])
        elif verdict.word in (NO, REFUSED):
            limits.append(f"{check}: {verdict.word}")
    return ", ".join(limits) or _NO_LIMITS


def _is_released(name: str) -> bool:
    return "/" in name


def _header(checks: Iterable[str], *first: str) -> list[str]:
    return [*first, *checks, "why"]


def _table(header: Sequence[str], results: Mapping[str, Verdicts]) -> list[str]:
    lines = [_row(header), "|---" * len(header) + "|"]
    for name, verdicts in sorted(results.items(), key=lambda item: item[0].lower()):
        reasons = "; ".join(
            f"{check}: {_brief(verdict.why)}" for check, verdict in verdicts.items() if verdict.why
        )
        about = [released.class_name(name), _source(name)] if _is_released(name) else []
        words = [verdicts[check].word for check in checks_of(name)]
        lines.append(_row([name, *about, *words, reasons.replace("|", "/")]))
    return lines


_ADVICE = (
    r"^tensor_parallel_size \(t in config key 'backend'\) is 2, but ",
    r"^\w+ cannot be trained with context_parallel_size 2: ",
    r"^config key 'train_vision' is true, but \w+_parallel_size is 2: ",
    r"; set it to 1, so that FSDP2 alone .*$",
    r"; leave '\w' out of config key 'backend'$",
)
"""Parts of error messages that repeat the column or say what to do."""


def _brief(why: str) -> str:
    """The reason in an error message."""
    for pattern in _ADVICE:
        why = re.sub(pattern, "", why)
    return why


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
        f"Transformers itself runs {len(judged)} of these {len(results)} {what} in tiny form: "
        f"{starts} start, {whole} do everything, and {silent} differ anywhere without an error."
    )


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read(text: str) -> tuple[str, dict[str, Verdicts]]:
    """Parse the version of transformers and the verdicts of a page.

    Raises:
        ValueError: `render` did not write the page.
    """
    named = re.search(r"of transformers (\S+)\.\s", text)
    version = named[1] if named else ""
    results: dict[str, Verdicts] = {}
    firsts = ("model", "class", "source"), (_WITH_IMAGES, "class", "source"), ("model type",)
    for header in (
        _header(CHECKS if len(first) == 1 else RELEASED_CHECKS, *first) for first in firsts
    ):
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
                check: Verdict(word, _reason(reasons, check))
                for check, word in zip(checks, words, strict=True)
            }
    return version, results


def _reason(reasons: str, check: str) -> str:
    """The reason for one check in a row. Reasons are in the order of the checks."""
    _, found, rest = f"; {reasons}".partition(f"; {check}: ")
    return (
        min((rest.partition(f"; {other}: ")[0] for other in RELEASED_CHECKS), key=len)
        if found
        else ""
    )
