"""The smallest state to save: one layer, AdamW, one step."""

import torch
from torch import nn

from holdfast.engine.dcp.state import DCPState


def trained(seed: int) -> DCPState:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return DCPState(model, optimizer)


def copies(state: DCPState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.live_tensors().items()}
