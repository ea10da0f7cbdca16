"""Which of a model's layers are gates and ups of a feed-forward network that does nothing else with them.

Such a layer's product may end with the activation, and the activation behind it passes on what it gets. vLLM tells a
layer's method its name and no more, so the modules that hold others are remembered when a model is built, and what a
network does is read off a trace of its code.
"""

from __future__ import annotations

from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import fx, nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase

from quantkit.integrations.vllm.between import EarlySiluAndMul

_holders: WeakKeyDictionary[nn.Module, ReferenceType[nn.Module]] = WeakKeyDictionary()


def _remember(holder: nn.Module, _: str, module: nn.Module | None) -> None:
    if isinstance(module, LinearBase):
        _holders[module] = ref(holder)


register_module_module_registration_hook(_remember)


class _Tracer(fx.Tracer):
    """Traces a module's own code, and no other's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Every module in it."""
        return True


def activation_behind(layer: nn.Module) -> EarlySiluAndMul | None:
    """The activation that gets what the layer gives, as it is and alone; None where there may be more to it.

    Adapters change what a layer gives, so there is none with them.
    """
    holder = _holders.get(layer, lambda: None)()
    if holder is None or getattr(get_current_vllm_config(), "lora_config", None) is not None:
        return None
    try:
        graph = _Tracer().trace(holder)
    except Exception:  # whatever code of others raises that cannot be traced
        return None
    modules = dict(holder.named_modules())
    calls = [node for node in graph.nodes if node.op == "call_module" and modules[str(node.target)] is layer]
    if len(calls) != 1:
        return None
    behind = [user for given in calls[0].users for user in given.users]  # a layer gives y and a bias
    if len(behind) != 1 or behind[0].op != "call_module" or len(behind[0].all_input_nodes) != 1:
        return None
    activation = modules[str(behind[0].target)]
    return activation if isinstance(activation, EarlySiluAndMul) else None
