"""Stand-in for Apex's `FusedAdam`, an external library that needs a compiler and a GPU.

Without Transformer Engine or Apex, Megatron falls back to `torch.optim`, and a distributed
optimizer on top of that saves checkpoints which it cannot resume. So tests need an Adam of the
fused kind, with its three habits that Megatron relies on: the step counter lives in the param
group, there is none per parameter, and a parameter that never had a gradient has no state.

`install()` makes Megatron's own `from apex.optimizers import FusedAdam` succeed, and nothing else.

[Note: Who may see Apex]
Half of Megatron asks `import apex` to decide on kernels (layer norm, multi-tensor applier); those
must go on believing that there is no Apex. A module that is in `sys.modules` is visible to
everybody. So the fake is in there only while the top-level code of a module of `_SEERS` runs, and
is taken out again around every import nested in it.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

_SEERS = frozenset({"megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"})


class FusedAdam(torch.optim.Optimizer):
    """Adam with Apex's signature and bookkeeping; plain torch arithmetic.

    Args are Apex's. `amsgrad`, `capturable` and `master_weights` change the arithmetic or the
    state, so they are refused rather than ignored.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad or capturable or master_weights:
            raise RuntimeError(
                "the FusedAdam stand-in supports neither amsgrad nor capturable nor master_weights"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop or zero the gradients; the default is `set_grad_none` of the constructor."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1 = 1 - beta1 ** group["step"]
            correction2 = 1 - beta2 ** group["step"]
        decay = group["weight_decay"]
        if decay and not self.adam_w_mode:
            grad = grad + decay * param
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + group["eps"])
        if decay and self.adam_w_mode:
            update = update + decay * param
        param.add_(update, alpha=-group["lr"])


class FusedSGD(torch.optim.SGD):
    """Present because Megatron imports it beside `FusedAdam`."""


def _fake_apex() -> dict[str, ModuleType]:
    apex, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    apex.__path__ = []
    vars(apex).update(optimizers=optimizers)
    vars(optimizers).update(FusedAdam=FusedAdam, FusedSGD=FusedSGD)
    return {apex.__name__: apex, optimizers.__name__: optimizers}


_APEX = _fake_apex()


@contextlib.contextmanager
def _apex_visible(visible: bool) -> Iterator[None]:
    """Show or hide the fake for a while, then restore what was visible before."""
    was_visible = "apex" in sys.modules
    _show_apex(visible)
    try:
        yield
    finally:
        _show_apex(was_visible)


def _show_apex(visible: bool) -> None:
    for name, module in _APEX.items():
        if visible:
            sys.modules[name] = module
        else:
            sys.modules.pop(name, None)


class _Loader(importlib.abc.Loader):
    """Executes one Megatron module with the fake Apex shown or hidden."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Leave no trace of this loader: `inspect` and pickling look at the real one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with _apex_visible(module.__name__ in _SEERS):
            self._loader.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of every Megatron module that is still to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Let Megatron's optimizer package find `FusedAdam`, imports it, and check that it did.

    Raises:
        RuntimeError: if the optimizer package was imported before, if a real Apex or Transformer
            Engine is installed, or if Megatron's import logic did not choose the stand-in.
    """
    early = sorted(_SEERS & sys.modules.keys())
    if early:
        raise RuntimeError(f"install the FusedAdam stand-in before importing {early}")
    for name in ("apex", "transformer_engine"):
        if importlib.util.find_spec(name) is not None:
            raise RuntimeError(f"{name} is installed: its optimizer would be chosen, or hidden")
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        for name in sorted(_SEERS):
            importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
    _check()


def _check() -> None:
    optimizer = sys.modules["megatron.core.optimizer"]
    distributed = sys.modules["megatron.core.optimizer.distrib_optimizer"]
    if optimizer.Adam is not FusedAdam or optimizer.USING_PYTORCH_OPTIMIZER:
        raise RuntimeError("megatron.core.optimizer did not take apex.optimizers.FusedAdam")
    if distributed.Adam is not FusedAdam or not distributed.USING_APEX_OPTIMIZER:
        raise RuntimeError("DistributedOptimizer did not take apex.optimizers.FusedAdam")
    if "apex" in sys.modules:
        raise RuntimeError("the fake apex is still visible")
