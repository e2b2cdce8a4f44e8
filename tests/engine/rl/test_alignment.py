"""Log-probabilities in AReaL's alignment and back, compared with the model's output place by
place.
"""

import pytest
import torch

from holdfast.engine.rl import from_areal_alignment, to_areal_alignment
from holdfast.utils.errors import BatchError

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


def test_the_models_output_at_a_token_belongs_to_the_next_one() -> None:
    """AReaL takes row t of the logits for the token after t, with ids rolled by -1. The last place
    has no meaning.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 7, MASK.shape, generator=generator) * MASK
    logp = torch.randn(*MASK.shape, 7, generator=generator).log_softmax(-1)
    theirs = logp.gather(-1, ids.roll(-1, dims=1)[..., None])[..., 0]
    ours = from_areal_alignment(theirs, MASK)
    for row, length in enumerate([4, 2, 1]):
        expected = (
            [0.0]
            + [float(logp[row, t - 1, ids[row, t]]) for t in range(1, length)]
            + [0.0] * (4 - length)
        )
        assert ours[row].tolist() == pytest.approx(expected)
    back = to_areal_alignment(ours, MASK)
    predicts = MASK[:, 1:].bool()
    assert torch.equal(back[:, :-1][predicts], theirs[:, :-1][predicts])
    assert not back[:, :-1][~predicts].any() and not back[:, -1].any()
    assert torch.equal(from_areal_alignment(back, MASK), ours)


def test_any_dtype_is_shifted_and_the_argument_stays() -> None:
    mask = torch.tensor([[True, True, True], [True, True, True]])
    values = torch.tensor([[0, 5, 6], [9, 7, 8]])
    assert to_areal_alignment(values, mask).tolist() == [[5, 6, 0], [7, 8, 0]]
    assert from_areal_alignment(values, mask).tolist() == [[0, 0, 5], [0, 9, 7]]
    assert values.tolist() == [[0, 5, 6], [9, 7, 8]]
    assert to_areal_alignment(values.bool(), mask).dtype == torch.bool


def test_other_shapes_are_refused() -> None:
    with pytest.raises(BatchError, match=r"shape \[4\] with an attention mask of \[3, 4\]"):
        to_areal_alignment(torch.zeros(4), MASK)
    with pytest.raises(BatchError, match=r"expected \[batch, seqlen\]"):
        from_areal_alignment(torch.zeros(2, 4), MASK)
