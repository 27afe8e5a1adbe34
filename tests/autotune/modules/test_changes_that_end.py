"""A change of a model that ends in the middle, by an error or an interrupt, leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from e3nn import o3

from autotune.models import layout as ir_mul
from autotune.models.accelerate import accelerate, restore
from autotune.models.layout import ModelLayout, Part
from autotune.models.replace import ConvolutionBlock, Replacing
from autotune.models.stand_ins import StandIn

ENDS = [RuntimeError, KeyboardInterrupt]


class Doubled(StandIn):
    """A stand-in whose details are those of a tuned kernel."""

    def __init__(self, original: torch.nn.Module, **_: Any) -> None:
        super().__init__()
        self._take_place_of(original)

    def tuning_for(self, _: object) -> dict[str, Any]:
        return {"forward": SimpleNamespace(origin="default", reason="none")}


class Block(ConvolutionBlock):
    def __init__(self, at: Callable[[str], None]) -> None:
        self.at, self.fused = at, []  # type: ignore[var-annotated]

    def fuse(self, block: torch.nn.Module) -> None:
        self.at("fuse")
        self.fused.append(block)

    def unfuse(self, block: torch.nn.Module) -> bool:
        self.fused = [one for one in self.fused if one is not block]
        return True


class Layout(ModelLayout):
    """Of a sequence, each module of which is replaced."""

    def __init__(self, at: Callable[[str], None]) -> None:
        self.at, self.block, self.finished = at, Block(at), False

    def matches(self, model: torch.nn.Module) -> bool:
        return isinstance(model, torch.nn.Sequential)

    def parts(self, model: Any) -> Iterator[Part]:
        for name in model._modules:
            yield Part(model, name, name, "tensor products", Doubled, self.block)

    def finish(self, model: Any) -> None:
        self.finished = True
        self.at("finish")

    def undo(self, model: torch.nn.Module) -> None:
        self.finished = False


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("where", "calls"), [("fuse", 1), ("fuse", 2), ("finish", 1), ("detail", 2), ("none", 1)])
def test_a_layout_is_changed_as_a_whole_or_not_at_all(
    where: str, calls: int, end: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[str] = []

    def at(place: str) -> None:
        met.append(place)
        if place == where and met.count(place) == calls:
            raise end

    detail = ir_mul._detail
    monkeypatch.setattr(ir_mul, "_detail", lambda found: at("detail") or detail(found))
    layout = Layout(at)
    monkeypatch.setattr(ir_mul, "of_packages", lambda name: (layout,))
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    before = list(model)
    replacing = Replacing(None, False, None)
    if where == "none":
        assert len(ir_mul.change_layouts(model, replacing)[0]) == len(layout.block.fused) == 3
        assert layout.finished and all(isinstance(module, Doubled) for module in model)
        return
    with pytest.raises(end):
        ir_mul.change_layouts(model, replacing)
    assert list(model) == before and not layout.finished and not layout.block.fused


@pytest.mark.parametrize("end", ENDS)
def test_a_model_is_restored_as_a_whole_or_not_at_all(
    end: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(*(o3.FullTensorProduct("2x0e+1x1o", "1x0e+1x1o") for _ in range(2)))
    model = torch.nn.ModuleList([model])
    before = list(model.modules())
    accelerate(model)
    replaced = [module for module in model.modules() if isinstance(module, StandIn)]
    assert len(replaced) == 2
    put_back, met = StandIn.put_back, []

    def ends_once(self: StandIn) -> torch.nn.Module:
        met.append(self)
        if len(met) == 2:
            raise end
        return put_back(self)

    monkeypatch.setattr(StandIn, "put_back", ends_once)
    with pytest.raises(end):
        restore(model)
    assert [module for module in model.modules() if isinstance(module, StandIn)] == replaced
    assert restore(model) == 2
    assert list(model.modules()) == before
