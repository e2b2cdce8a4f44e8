"""docs/models.md: the verdicts as a table, written and read back."""

from collections.abc import Mapping
from pathlib import Path

import transformers

from tests.engine.architectures.checks import CHECKS, NO, NONE, PADDED, REFUSED, SILENT, YES, Verdict
from tests.engine.architectures.matrix import Verdicts

PAGE = Path(__file__).parents[3] / "docs" / "models.md"

_WORDS = (YES, NO, REFUSED, PADDED, NONE)
_COLUMNS = {
    "starts": "`FSDPEngine.initialize` from the folder; a multimodal folder as a causal LM",
    "packed": f"`{YES}`: sequences are packed into one row. `{PADDED}`: packing would let them see each other, so it "
    "is refused, and the other columns are those of `pack_sequences: false`",
    "log-probs": "`forward_batch` against the padded, unsharded model, float32: equal to 2e-5",
    "HF float32, HF bfloat16": "all files of an export equal, byte for byte, those of `save_pretrained` of the "
    "unsharded model in that dtype",
    "step": "one `train_batch` with SGD against a step of the unsharded model: the loss equal to 2e-5, every weight to "
    "a thousandth of the largest change",
    "DCP": "a checkpoint of two ranks is loaded by one: every bit of weights and optimizer state",
    "bfloat16 step": "one `train_batch` with bfloat16 compute: finite, and the loss near that of float32",
    "critic": "a value head on the folder's body: it has the folder's weights, values are finite, a step is taken",
}
_HEAD = f"""\
# Models

What Holdfast does with each of the architectures that `AutoModelForCausalLM` of transformers {{version}} builds.
Written by `python -m tests.engine.architectures`: for each, a tiny random model as a folder, two ranks (gloo, CPU), and
the unsharded model of transformers to compare with.

{{summary}}

| column | what is checked |
|---|---|
{{columns}}

`{NO}`: an error that Holdfast did not foresee, or a difference without an error, whose reason begins with {SILENT}.
`{REFUSED}`: an error in words. `{NONE}`: does not apply, or transformers itself cannot do it. Reasons are at the end of
each row.
"""


def render(results: Mapping[str, Verdicts], version: str = transformers.__version__) -> str:
    """The page: model type -> verdicts."""
    columns = ["model type", *CHECKS, "why"]
    described = "\n".join(_row(list(pair)) for pair in _COLUMNS.items())
    head = _HEAD.format(version=version, summary=_summary(results), columns=described)
    lines = [head, _row(columns), "|---" * len(columns) + "|"]
    for model_type, verdicts in sorted(results.items()):
        reasons = "; ".join(f"{name}: {verdict.why}" for name, verdict in verdicts.items() if verdict.why)
        lines.append(_row([model_type, *(verdicts[name].word for name in CHECKS), reasons.replace("|", "/")]))
    return "\n".join(lines) + "\n"


def _summary(results: Mapping[str, Verdicts]) -> str:
    judged = [verdicts for verdicts in results.values() if verdicts["starts"].word != NONE]
    whole = sum(all(verdict.word in (YES, PADDED) for verdict in verdicts.values()) for verdicts in judged)
    silent = sum(any(SILENT in verdict.why for verdict in verdicts.values()) for verdicts in judged)
    starts = sum(verdicts["starts"].word == YES for verdicts in judged)
    return (
        f"Of {len(results)} architectures transformers itself runs {len(judged)} tiny ones; {starts} of them start, "
        f"{whole} do everything, and {silent} differ anywhere without an error."
    )


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read(text: str) -> tuple[str, dict[str, Verdicts]]:
    """The version of transformers and the verdicts of a page that `render` wrote.

    Raises:
        ValueError: it did not.
    """
    version = text.partition("of transformers ")[2].split(" ")[0]
    _, header, table = text.partition(_row(["model type", *CHECKS, "why"]))
    if not (version and header):
        raise ValueError(f"no page of these columns: {list(CHECKS)}")
    results = {}
    for line in table.strip().splitlines()[1:]:
        model_type, *words, reasons = (cell.strip() for cell in line.strip("|").split("|"))
        if len(words) != len(CHECKS) or not set(words) <= set(_WORDS):
            raise ValueError(f"not a row of the table: {line}")
        results[model_type] = {
            name: Verdict(word, _reason(reasons, name)) for name, word in zip(CHECKS, words, strict=True)
        }
    return version, results


def _reason(reasons: str, name: str) -> str:
    """What a row says of one check; reasons follow on each other in the order of the checks."""
    _, found, rest = f"; {reasons}".partition(f"; {name}: ")
    return min((rest.partition(f"; {other}: ")[0] for other in CHECKS), key=len) if found else ""
