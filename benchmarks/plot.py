"""Bar charts of the main figures as a small SVG: ratios by way, quartiles as a line, targets
dashed.

All other figures are in the table only.
"""

from collections.abc import Iterator, Sequence
from html import escape

from .harness import OURS, Figure

CHARTS = (
    "save_stall.blocking",
    "save.throughput",
    "load.throughput",
    "publish.time",
    "train.trl",
    "logits.memory",
)
"""The figures that are drawn: what a user of a training engine asks first."""

# Widths of the page, of the column of names, and of the margin on the right.
WIDTH = 900
LABELS = 290
RIGHT = 70

# Heights of a row, of a title, and of the space between panels.
ROW = 20
TITLE = 24
GAP = 16
_STYLE = (
    "text{font:12px "
    "system-ui,sans-serif;fill:#222}.t{font-weight:600}.o{fill:#1565c0}.r{fill:#b0b7bf}"
    ".w{stroke:#222;stroke-width:1.5}.n{stroke:#d32f2f;stroke-width:1.5;stroke-dasharray:4 "
    "3}.v{fill:#555}"
)


def draw(figures: Sequence[Figure]) -> str:
    """Draw one panel for each figure of `CHARTS` and return the SVG document."""
    shapes = []
    top = GAP
    for figure in figures:
        if figure.name not in CHARTS:
            continue
        shapes += _panel(figure, top)
        top += TITLE + ROW * len(figure.samples) + GAP
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" '
        f'height="{top}">\n<style>{_STYLE}</style>\n<rect width="{WIDTH}" height="{top}" '
        f'fill="#fff"/>\n{body}\n</svg>\n'
    )


def _panel(figure: Figure, top: int) -> Iterator[str]:
    spreads = {way: figure.spread(way) for way in figure.samples}
    # The longest bar, or the target behind it, fills the width.
    highest = [spread.high for spread in spreads.values()]
    most = max([*highest, *figure.needed.values(), 1e-9])
    scale = (WIDTH - LABELS - RIGHT) / most

    yield _text(f"{figure.name}: {figure.title} ({figure.better} is better)", 10, top + 12, "t")
    for row, (way, spread) in enumerate(spreads.items()):
        y = top + TITLE + row * ROW
        kind = "o" if way.startswith(OURS) else "r"
        yield _text(way, LABELS - 8, y + 12, anchor="end")
        length = spread.median * scale
        yield (
            f'<rect class="{kind}" x="{LABELS}" y="{y + 2}" width="{length:.1f}" '
            f'height="{ROW - 6}"/>'
        )

        # The quartiles are a line over the end of the bar, the target is one across the row.
        low = LABELS + spread.low * scale
        high = LABELS + spread.high * scale
        yield f'<line class="w" x1="{low:.1f}" y1="{y + 9}" x2="{high:.1f}" y2="{y + 9}"/>'
        yield _text(f"{spread.median:.2f}", high + 6, y + 13, "v")
        if way in figure.needed:
            x = LABELS + figure.needed[way] * scale
            yield f'<line class="n" x1="{x:.1f}" y1="{y - 1}" x2="{x:.1f}" y2="{y + ROW - 3}"/>'


def _text(
    words: str,
    x: float,
    y: float,
    kind: str = "",
    anchor: str = "start",
) -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )
