"""Feed-forward networks whose product of gates and ups ends with the activation, as vLLM builds them."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.formats.bcq import BcqSpec
from tests.integrations import vllm_stub
from tests.integrations.vllm_layers import BCQ, BCQ3, config_of, stored

K, WIDTH, TOKENS = 256, 128, 5
MLP = "model.layers.0.mlp"
GATE_UP = f"{MLP}.gate_up_proj"
OURS = SimpleNamespace(get_name=lambda: "quantkit")
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


class Linear(vllm_stub.LinearBase):
    """vLLM's of several outputs, without the communication."""

    def __init__(self, config: Any, prefix: str, rows: list[int], bias: Tensor | None = None):
        super().__init__()
        self.bias = bias
        self.quant_method = config.get_quant_method(self, prefix)
        self.quant_method.create_weights(self, K, rows, K, sum(rows), torch.float16, weight_loader=None)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.quant_method.apply(self, x, self.bias), None


class Behind(vllm_stub.LinearBase):
    """The Linear behind the activation, which gives what it gets."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


class Network(nn.Module):
    """vLLM's LlamaMLP."""

    def __init__(self, config: Any, bias: Tensor | None):
        super().__init__()
        self.gate_up_proj = Linear(config, GATE_UP, [WIDTH, WIDTH], bias)
        self.down_proj = Behind()
        self.act_fn = vllm_stub.PUT_IN["SiluAndMul"]()

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gate_up_proj(x)
        x = self.act_fn(x)
        x, _ = self.down_proj(x)
        return x


class Nested(Network):
    """The same in other words."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]  # type: ignore[no-any-return]


class Clamped(Network):
    """One that changes gates and ups."""

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gate_up_proj(x)
        x = self.act_fn(x * 0.5)
        x, _ = self.down_proj(x)
        return x


class Twice(Network):
    """One that also gives them to others."""

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gate_up_proj(x)
        return torch.cat((self.down_proj(self.act_fn(x))[0], x), -1)


class Whole(Network):
    """One that hands on all that the layer gives."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        given = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(given[0])), given


class Other(Network):
    """One whose activation gets what the layer calls a bias."""

    def forward(self, x: Tensor) -> Tensor:
        _, x = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(x))
        return x


class Again(Network):
    """One that takes its activation for something else, too."""

    def forward(self, x: Tensor) -> Tensor:
        gated = self.act_fn(self.gate_up_proj(x)[0])
        return torch.cat((self.down_proj(gated)[0], self.act_fn(x)), -1)


class Asking(Network):
    """One that asks for numbers of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.numel() else x


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch)
    import_module("quantkit.integrations.vllm.config")
    monkeypatch.setattr(vllm_stub.SETTINGS, "quant_config", OURS)


def built(specs: tuple[Any, Any], device: str, cls: type[Network] = Network, bias: Tensor | None = None) -> Any:
    """A network with random weights, loaded as vLLM loads it."""
    torch.manual_seed(0)
    halves = [stored(f"{MLP}.{name}_proj", spec, (WIDTH, K)) for name, spec in zip(("gate", "up"), specs, strict=True)]
    config = config_of(halves[0] | halves[1])
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    with torch.device(device):
        network = cls(config, bias)
        layer: Any = network.gate_up_proj
        for shard_id, half in enumerate(halves):
            ((_, tensors),) = half.values()
            vllm_stub.feed(layer, {name: tensor.to(device) for name, tensor in tensors.items()}, shard_id)
        layer.quant_method.process_weights_after_loading(layer)
    return network


def gates(network: Any) -> bool:
    assert network.act_fn.passes == network.gate_up_proj.quant_method.products[0].gated
    return bool(network.act_fn.passes)


def test_a_cpu_keeps_the_product_and_the_activation_apart() -> None:
    network = built((BCQ, BCQ), "cpu")
    assert not gates(network)
    assert network(torch.randn(TOKENS, K)).shape == (TOKENS, WIDTH)


@pytest.mark.parametrize("cls", [Network, Nested, Clamped, Twice, Whole, Other, Again, Asking])
def test_the_code_of_a_network_says_whether_the_activation_gets_all_and_nothing_else(cls: type[Network]) -> None:
    from quantkit.integrations.vllm.gated import activation_behind

    network = built((BCQ, BCQ), "cpu", cls)
    assert activation_behind(network.gate_up_proj) is (network.act_fn if cls in (Network, Nested) else None)
    assert activation_behind(network.down_proj) is None
    assert activation_behind(Behind()) is None  # that no module holds


@pytest.mark.parametrize("name", ["gate_up_proj", "act_fn"])
def test_what_several_modules_hold_stays_apart(name: str) -> None:
    from quantkit.integrations.vllm.gated import activation_behind

    network, other = built((BCQ, BCQ), "cpu"), nn.Module()
    other.add_module(name, getattr(network, name))
    assert activation_behind(network.gate_up_proj) is None


def test_adapters_keep_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.integrations.vllm.gated import activation_behind

    monkeypatch.setattr(vllm_stub.SETTINGS, "lora_config", object())
    assert activation_behind(built((BCQ, BCQ), "cpu").gate_up_proj) is None


@pytest.mark.cuda
@pytest.mark.parametrize("spec", [BCQ, BcqSpec(2, -1, False), BcqSpec(4, 64, True, scale_bits=8)])
@pytest.mark.parametrize("most_sequences", [1, 256])
def test_on_a_gpu_they_give_the_bits_of_both_apart(
    spec: BcqSpec, most_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_stub.SETTINGS.scheduler_config, "max_num_seqs", most_sequences)
    together, apart = built((spec, spec), "cuda"), None
    with monkeypatch.context() as adapters:
        adapters.setattr(vllm_stub.SETTINGS, "lora_config", object())
        apart = built((spec, spec), "cuda")
    assert gates(together)
    assert not gates(apart)
    for tokens in (1, 7, 40, 300):
        x = torch.randn(tokens, K, dtype=torch.float16, device="cuda") * 1e-2
        assert torch.equal(together(x), apart(x)), tokens


@pytest.mark.cuda
def test_halves_of_two_specs_and_biases_stay_apart() -> None:
    assert not gates(built((BCQ, BCQ3), "cuda"))
    assert not gates(built((BCQ, BCQ), "cuda", bias=torch.zeros(2 * WIDTH, dtype=torch.float16, device="cuda")))
