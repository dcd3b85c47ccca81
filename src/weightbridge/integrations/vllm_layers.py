"""The layers of a vLLM model in their two forms: the one checkpoints are loaded into, and the one kernels read.

After loading, vLLM lets each layer prepare its weights for its kernels (`quant_method.process_weights_after_loading`). What
that does depends on model, dtype, hardware and version: nothing; a new layout under the same name and shape; or the weights
vanish into an object of the kernel library and an empty parameter stays behind. Which of these it is here is found out by
doing it: `prepare` runs the layer's own preparation on random weights and looks at what became of them.

    plain    the parameters are what was loaded: they are written in place
    packed   the parameters hold the weights in another layout, visible: loading means load, prepare, copy in place
    hidden   weights, or something made of them, lie where nobody can write: they are staged in loaded form, beside
             the kernel's own, and prepared again after each update
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from weightbridge.errors import ProbeError, UnsupportedError

__all__ = ["HIDDEN", "PACKED", "PLAIN", "PreparedLayer", "attention_derives", "prepared_layers"]

PLAIN, PACKED, HIDDEN = "plain", "packed", "hidden"
_RELOAD = "vllm.model_executor.model_loader.reload"
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_UNWRITTEN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class PreparedLayer:
    """A module with parameters and a preparation of its own.

    staged: names of its parameters whose loaded form is not the kernel's tensor. stage: those of a hidden layer, kept.
    """

    name: str
    module: nn.Module
    kind: str
    staged: tuple[str, ...] = ()
    stage: dict[str, nn.Parameter] = field(default_factory=dict)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within, the module has parameters in loaded form. A packed layer takes over on exit what was loaded."""
        if not self.staged:
            yield
            return
        given = self.stage or {n: p for n, p in _loaded_form(self.module).items() if n in self.staged}
        if not self.stage:
            for parameter in given.values():
                _bits(parameter).fill_(-1 if parameter.element_size() > 1 else 255)
        with _parameters(self.module, given):
            yield
        if not self.stage and self._is_loaded(given):
            self._take_over(given)

    def _is_loaded(self, given: dict[str, nn.Parameter]) -> bool:
        """Whether a load wrote the layer; raises ProbeError where it wrote a part: what is packed cannot be completed."""
        gaps = {n: int((_bits(p) == (-1 if p.element_size() > 1 else 255)).sum()) for n, p in given.items()}
        if all(gaps[n] == p.numel() for n, p in given.items()):
            return False
        for name, parameter in given.items():
            # One-byte weights may well hold the mark.
            if gaps[name] and (parameter.element_size() > 1 or gaps[name] == parameter.numel()):
                raise ProbeError(
                    f"layer {self.name!r}: the load left {gaps[name]} of {parameter.numel()} elements of {name!r} unwritten, "
                    "and the weights are packed for the kernel once they are loaded; give all tensors of the layer in one call",
                    tensor=f"{self.name}.{name}",
                )
        return True

    def _take_over(self, given: dict[str, nn.Parameter]) -> None:
        """Prepare freshly loaded weights and copy the result into the tensors the kernels read."""
        with _parameters(self.module, given):
            _prepare(self.module)
            made = dict(self.module._parameters)
        for name in self.staged:
            self._copy_into_kernel(name, made.get(name))

    def renew(self) -> None:
        """A hidden layer after an update: prepare it again from what was staged. The tensors of kernels stay in place."""
        if self.kind != HIDDEN:
            return
        # On copies: a preparation may work in place, and the stage must stay what was loaded.
        copies = {name: _like(p, p.detach().clone()) for name, p in self.stage.items()}
        with _parameters(self.module, copies):
            _prepare(self.module)
            made = dict(self.module._parameters)
        for name in self.staged:
            if made.get(name) is not None and made[name].numel():  # type: ignore[union-attr]
                self._copy_into_kernel(name, made[name])

    def _copy_into_kernel(self, name: str, made: torch.Tensor | None) -> None:
        kernel = self.module._parameters.get(name)
        if kernel is None or made is None or kernel.shape != made.shape or kernel.dtype != made.dtype:
            raise UnsupportedError(
                f"layer {self.name!r}: its kernel reads {name!r} as {_describe(kernel)}, and preparing it again makes "
                f"{_describe(made)}; this layer cannot be updated in place"
            )
        with torch.no_grad():
            kernel.copy_(made)


def prepared_layers(model: nn.Module) -> list[PreparedLayer]:
    """Every module of the model that prepares its weights, with what this does here. Run once, with the engine idle.

    Runs each preparation once on random weights, one layer in memory at a time, and puts everything back. Call it within
    vLLM's `set_current_vllm_config`. Raises UnsupportedError for a layer that cannot be tried.
    """
    base = import_module("vllm.model_executor.layers.quantization.base_config").QuantizeMethodBase
    found = []
    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), base):
            layer = _tried(name, module)
            if layer is not None:
                found.append(layer)
    return found


def attention_derives(module: nn.Module, dtype: torch.dtype) -> str | None:
    """The attribute in which an attention layer keeps something made of weights, or None. Runs its preparation once.

    Single numbers (scales of a cache that is not quantised) are set anew each time and are none.
    """
    before = dict(vars(module))
    module.process_weights_after_loading(dtype)  # type: ignore[operator]
    return next(
        (
            n
            for n, v in vars(module).items()
            if isinstance(v, torch.Tensor) and v.numel() > 1 and before.get(n) is not v
        ),
        None,
    )


def _tried(name: str, module: nn.Module) -> PreparedLayer | None:
    """Run a layer's preparation on random weights and tell what it does with them."""
    trial = _loaded_form(module)
    if not trial:
        return None
    generator = torch.Generator().manual_seed(0)
    for parameter in trial.values():
        values = torch.randn(parameter.shape, generator=generator) * 0.02
        with torch.no_grad():
            parameter.copy_(values.to(parameter.dtype) if parameter.is_floating_point() else (values * 100).abs())
    given = {n: _bits(p).clone() for n, p in trial.items()}
    owners = [o for o in (module, module.quant_method, _experts(module)) if o is not None]
    state = [dict(vars(owner)) for owner in owners]
    buffers = {n: b for n, b in module._buffers.items() if b is not None}
    held = {n: _bits(b).clone() for n, b in buffers.items()}
    try:
        with _parameters(module, trial):
            _prepare(module)
            made = dict(module._parameters)
    except Exception as error:
        raise UnsupportedError(
            f"layer {name!r} ({type(module.quant_method).__name__}): its preparation cannot be repeated, it raised "
            f"{type(error).__name__}: {error}. Weights of this kind cannot be updated in place"
        ) from error
    finally:
        hides = any(_gained(before, vars(owner)) for before, owner in zip(state, owners, strict=True))
        hides |= any(module._buffers.get(n) is not b or not torch.equal(_bits(b), held[n]) for n, b in buffers.items())
        for before, owner in zip(state, owners, strict=True):
            _put_back(before, owner)
        for n, b in buffers.items():
            _bits(b).copy_(held[n])
            module._buffers[n] = b
    changed = tuple(n for n in trial if not _kept(made.get(n), trial[n], given[n]))
    visible = all(_same_form(made.get(n), module._parameters.get(n)) for n in changed)
    if not changed and not hides:
        return PreparedLayer(name, module, PLAIN)
    if not hides and visible:
        return PreparedLayer(name, module, PACKED, changed)
    layer = PreparedLayer(name, module, HIDDEN, changed)
    layer.stage = {n: p for n, p in _loaded_form(module).items() if n in changed}
    for parameter in layer.stage.values():
        _bits(parameter).zero_()
    return layer


def _prepare(module: Any) -> None:
    """What vLLM does with a layer once its weights are loaded."""
    done = vars(module).pop("_already_called_process_weights_after_loading", None)
    with torch.no_grad():
        module.quant_method.process_weights_after_loading(module)
        # vLLM asks the experts' kernel at the first load only, and leaves it with unpacked weights at every later one.
        experts = _experts(module)
        if experts is not None:
            experts.process_weights_after_loading(module)
    if done is not None:
        module._already_called_process_weights_after_loading = done


def _experts(module: Any) -> Any:
    experts = getattr(getattr(module.quant_method, "moe_kernel", None), "fused_experts", None)
    return experts if hasattr(experts, "process_weights_after_loading") else None


def _loaded_form(module: nn.Module) -> dict[str, nn.Parameter]:
    """New, empty parameters as they were before loading, with the loaders they had. The module is left as it was."""
    info = import_module(f"{_RELOAD}.layerwise").get_layerwise_info(module)
    meta = import_module(f"{_RELOAD}.meta")
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    transient = set(module._non_persistent_buffers_set)
    try:
        meta.restore_layer_on_meta(module, info)
        meta.materialize_layer(module, info)
        return {n: p for n, p in module._parameters.items() if p is not None and p is not parameters.get(n)}
    finally:
        _replace(module._parameters, parameters)
        _replace(module._buffers, buffers)
        module._non_persistent_buffers_set = transient


@contextmanager
def _parameters(module: nn.Module, given: dict[str, nn.Parameter]) -> Iterator[None]:
    """Within, the module has the given parameters in place of its own; whatever it has at the end, its own come back."""
    own = dict(module._parameters)
    module._parameters.update(given)
    try:
        yield
    finally:
        _replace(module._parameters, own)


def _replace(target: dict[str, Any], content: dict[str, Any]) -> None:
    target.clear()
    target.update(content)


def _like(original: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """The data as a parameter of the original's class, with its attributes (loader, sharded dims)."""
    data.__class__ = original.__class__
    data.__dict__.update(original.__dict__)
    return data  # type: ignore[return-value]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_UNWRITTEN[tensor.element_size()])


def _kept(made: torch.Tensor | None, given: nn.Parameter, bits: torch.Tensor) -> bool:
    """Whether a preparation left a parameter in its memory with its bits."""
    return _same_form(made, given) and made.data_ptr() == given.data_ptr() and torch.equal(_bits(made), bits)  # type: ignore[union-attr,arg-type]


def _same_form(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.numel() > 0 and a.shape == b.shape and a.dtype == b.dtype


def _gained(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether an object's attributes now hold something that may have been made of the weights."""
    return any(n not in _OWN and not _same(before.get(n), v) for n, v in after.items())


def _same(old: Any, new: Any) -> bool:
    """The same thing, or a new one that cannot hold weights."""
    if old is new or isinstance(new, (bool, str, torch.dtype, torch.Size, BuiltinFunctionType, type(None))):
        return True
    if isinstance(new, (int, float)):
        return bool(old == new)
    if isinstance(new, MethodType):
        return bool(old == new)
    return isinstance(new, FunctionType) and not new.__closure__ and not new.__defaults__ and not new.__kwdefaults__


def _put_back(before: dict[str, Any], owner: object) -> None:
    now = vars(owner)
    for name in [n for n in now if n not in before]:
        del now[name]
    now.update({n: v for n, v in before.items() if n not in _OWN})


def _describe(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
