"""What a forward pass keeps for its gradients: bytes counted by hand, on small models."""

from __future__ import annotations

import pytest
import torch

from autotune.bench.session import REST, held_mib, part_of

ROWS, WIDTH = 1024, 256
MIB_OF_ROWS = ROWS * WIDTH * 4 / 2**20  # of a float32 tensor [ROWS, WIDTH]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.linear(x))


class Model(torch.nn.Module):
    """``checked``: its second block computes again in the backward pass what it does not keep."""

    def __init__(self, checked: bool = False) -> None:
        super().__init__()
        self.layers, self.checked = torch.nn.ModuleList([Block(), Block()]), checked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        x = first(x)
        x = torch.utils.checkpoint.checkpoint(second, x, use_reentrant=False) if self.checked else second(x)
        return (x * x).sum()


def inputs() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_each_tensor_counts_once_for_the_part_that_kept_it_first() -> None:
    model, x = Model(), inputs()
    found = held_mib(lambda: model(x).backward(), model)
    # Of each block: the input of its linear layer and of its gate; the second one's input is the first one's output,
    # and its own output is squared by the model. Weights are kept anyway.
    assert found == {"layers.linear": 2 * MIB_OF_ROWS, "layers.gate": 2 * MIB_OF_ROWS, REST: MIB_OF_ROWS}
    model.requires_grad_(False)
    found = held_mib(lambda: model(x).backward(), model)
    assert found == {"layers.gate": 2 * MIB_OF_ROWS, REST: MIB_OF_ROWS}, "products keep weights alone"


def test_what_a_backward_pass_keeps_or_computes_again_does_not_count() -> None:
    model, x = Model(checked=True), inputs()

    def forces_and_training() -> None:
        (force,) = torch.autograd.grad(model(x), x, create_graph=True)
        force.sum().backward()

    once = held_mib(lambda: model(x).backward(), model)
    assert once == held_mib(forces_and_training, model)
    assert once["layers.gate"] == MIB_OF_ROWS, "of the first block alone"


def test_nothing_is_kept_without_gradients_and_hooks_are_taken_away() -> None:
    model = Model()
    with torch.no_grad():
        assert held_mib(lambda: model(inputs()), model) == {}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        held_mib(lambda: model(torch.ones(2, 3)), model)
    assert held_mib(lambda: model(inputs()), model)["layers.gate"] == 2 * MIB_OF_ROWS


def test_parts_of_a_compiled_module_count_for_it() -> None:
    model = Model()
    model.layers[1] = torch.jit.script(model.layers[1])
    found = held_mib(lambda: model(inputs()), model)
    assert found["layers.linear"] == found["layers.gate"] == MIB_OF_ROWS
    assert found["layers"] == 2 * MIB_OF_ROWS


def test_parts_are_named_without_the_numbers_of_layers() -> None:
    names = ("interactions.0.conv_tp_weights.layer0", "layer1_convnet.conv.tp", "3_convolution.weight_nn", "")
    found = ["interactions.conv_tp_weights", "layer_convnet.conv", "convolution.weight_nn", REST]
    assert [part_of(name) for name in names] == found
