"""Which of a model's layers are gates and ups of a feed-forward network that does nothing else with them.

Such a layer's product may end with the activation, and the activation behind it passes on what it gets. vLLM tells a
layer's method its name and no more, so the modules that hold others are remembered when a model is built, and what a
network does is read off a trace of its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from weakref import WeakKeyDictionary, WeakSet

from torch import fx, nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase

from quantkit.integrations.vllm.between import EarlySiluAndMul

_holders: WeakKeyDictionary[nn.Module, WeakSet[nn.Module]] = WeakKeyDictionary()


def _remember(holder: nn.Module, _: str, module: nn.Module | None) -> None:
    if isinstance(module, LinearBase | EarlySiluAndMul):
        _holders.setdefault(module, WeakSet()).add(holder)


register_module_module_registration_hook(_remember)


class _Tracer(fx.Tracer):
    """Traces a module's own code, and no other's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Every module in it."""
        return True


def activation_behind(layer: nn.Module) -> EarlySiluAndMul | None:
    """The activation that gets what the layer gives, as it is and alone; None where there may be more to it.

    Adapters change what a layer gives, so there is none with them. None, too, for layers and activations that several
    modules hold.
    """
    holders = list(_holders.get(layer, ()))
    if len(holders) != 1 or get_current_vllm_config().lora_config is not None:
        return None
    try:
        graph = _Tracer().trace(holders[0])
    except Exception:  # whatever code of others raises that cannot be traced
        return None
    modules = dict(holders[0].named_modules())
    calls = {node: modules[str(node.target)] for node in graph.nodes if node.op == "call_module"}
    behind = _only_user([node for node, module in calls.items() if module is layer])
    activation = None if behind is None else calls.get(behind)
    if not isinstance(activation, EarlySiluAndMul) or list(calls.values()).count(activation) != 1:
        return None
    return activation if list(_holders.get(activation, ())) == holders else None


def _only_user(calls: Sequence[fx.Node]) -> fx.Node | None:
    """What takes y of (y, bias), where a layer is called once and nothing takes another part of it."""
    parts = [part for call in calls for part in call.users]
    if len(calls) != 1 or any(part.target is not getitem for part in parts):
        return None
    users = [(part.args[1], user) for part in parts for user in part.users]
    return users[0][1] if len(users) == 1 and users[0][0] == 0 else None
