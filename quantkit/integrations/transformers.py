"""``from_pretrained`` for quantized checkpoints: the ``quantkit`` row of transformers' quantizer tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

# The package's own names are not bound yet while quantkit's import hook runs inside it: import from the modules.
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantkit.checkpoint.config import PREFIX_FIELDS, QUANT_METHOD, CheckpointConfig, StoredLayer, config_from_json
from quantkit.checkpoint.names import module_names
from quantkit.checkpoint.read import (
    check_tensors,
    check_unquantized,
    read_document,
    read_headers,
    start_verifying,
    weight_files,
)
from quantkit.cpu import check_half_precision
from quantkit.errors import CheckpointError, refusing
from quantkit.models.experts import RoutedExperts, SeparateExperts, is_fused, merges_experts, separate_experts
from quantkit.models.families import linear_shape
from quantkit.models.loading import auto_class, stored_dtype
from quantkit.models.structure import is_linear, output_head
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.nn.table import Layout
from quantkit.runtime.batch_chunks import chunk_batches
from quantkit.runtime.fused_ffn import fuse_chains
from quantkit.runtime.grouped_experts import group_experts
from quantkit.runtime.shared_products import share_products
from quantkit.storage.tensors import Verification, verifies


class QuantkitConfig(QuantizationConfigMixin):
    """``quantization_config`` of config.json; see quantkit.checkpoint.config for its fields."""

    def __init__(self, **document: Any):
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # any string will do
        self.document = {**document, "quant_method": QUANT_METHOD}

    def to_dict(self) -> dict[str, Any]:
        return dict(self.document)


class QuantkitQuantizer(HfQuantizer):
    """Builds the module skeleton before transformers loads the tensors, and checks afterwards that all came."""

    requires_calibration = True  # refuses quantization_config= on a floating-point checkpoint
    verification: Verification | None = None
    skeleton: tuple[nn.Module, ...] = ()
    """The modules of the model that is being loaded."""
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    """Of its parameters, as it was built."""

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        document = self.quantization_config.to_dict()
        config, files = config_from_json(document), read_headers(checkpoint_files or [])
        # Here and not after loading: transformers fills a missing tensor with whatever was in memory and only
        # warns, and 5.17 loads a mis-shaped one silently.
        check_tensors(config, files)
        self.verification = start_verifying(files, document) if verifies() else None
        install_skeleton(model, config)
        install_prefix(model, config)
        self.skeleton = tuple(model.modules())
        self.dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        check_unquantized(model, config, files)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        """Put the layers that are on a GPU into its kernels' order, and attention into INT8 where it was calibrated.

        Tensors were checked before loading, but for their digests.
        """
        self.skeleton = ()
        if self.verification is not None:
            self.verification.finish()
        restore_dtypes(model, self.dtypes)
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.prepare_for_device()
        fuse_chains(model)
        group_experts(model)
        chunk_batches(model)
        share_products(model)
        config = config_from_json(self.quantization_config.to_dict())
        attention = config.attention
        if config.prefix is not None:
            from quantkit.runtime import prefix

            prefix.install(model)
        if attention:
            # Needs all of transformers, which is only half imported where its quantizers import this module.
            from quantkit.runtime.int8_attention import install

            install(model, attention)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: nn.Module) -> list[Any]:
        """The model's own, but for those that would fuse the experts that install_skeleton has separated.

        model: not given by transformers 5.17.
        """
        modules = model[0].modules() if model else self.skeleton
        separate = any(isinstance(module, SeparateExperts) for module in modules)
        kept = [entry for entry in weight_conversions if not (separate and merges_experts(entry))]
        return list(super().update_weight_conversions(kept, *model))

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        """No entry beyond the model's own: every stored tensor has N at dim -2 and K at dim -1."""

    def update_tp_plan(self, config: Any) -> Any:
        """The same for transformers 5.17."""
        return config


def install_skeleton(model: nn.Module, config: CheckpointConfig) -> None:
    """Replace every quantized Linear of a model on the meta device by an empty QuantizedLinear.

    Where the checkpoint holds experts one by one, the model's are separated first.
    Raises CheckpointError where the checkpoint names a layer that the model does not have.
    """
    names = module_names(model, [*config.layers, *config.ignore])
    fused = [f"{name}." for name, module in model.named_modules() if is_fused(module)]
    if any(own.startswith(tuple(fused)) for own in names.values()):
        separate_experts(model)
    prefix = getattr(model, "base_model_prefix", "")
    base = bool(prefix) and not hasattr(model, prefix)
    headless = base and output_head(model) is None  # AutoModel: no head, quantized or not
    layers = {name: layer for name, layer in config.layers.items() if not headless or name.startswith(f"{prefix}.")}
    install_layers(model, {names[name]: layer for name, layer in layers.items()})


def restore_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast the floating-point parameters that have another dtype than they were built with, but for those kept in fp32.

    Of a quantized checkpoint transformers 5.17 leaves a tensor as it is stored if the model has another name for it,
    such as Mixtral's router.
    """
    fields = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    kept = {word for field in fields for word in getattr(model, field, None) or ()}
    for name, parameter in model.named_parameters():
        dtype = dtypes.get(name, parameter.dtype)
        if parameter.dtype != dtype and dtype.is_floating_point and kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def install_prefix(model: nn.Module, config: CheckpointConfig) -> None:
    """Give attention modules empty tensors for the checkpoint's prefix, in the model's dtype, on the meta device.

    Raises CheckpointError for a module that the model does not have.
    """
    if config.prefix is None:
        return
    dtype = next(tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
    names = module_names(model, config.prefix.modules)
    for name, shape in config.prefix.modules.items():
        with refusing(f"the checkpoint has a prefix for {name!r}, which this model lacks", CheckpointError):
            module = model.get_submodule(names[name])
        for field in PREFIX_FIELDS:
            module.register_buffer(field, torch.empty(shape, dtype=dtype, device="meta"))


def install_layers(model: nn.Module, layers: Mapping[str, StoredLayer]) -> None:
    """Replace Linears, by their names in the model, by empty QuantizedLinears.

    Raises CheckpointError for a layer that the model does not have.
    """
    for name, layer in layers.items():
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise CheckpointError(f"quantization_config names the layer {name!r}, which this model lacks") from error
        if not is_linear(module):
            raise CheckpointError(f"quantization_config names {name!r}, which is a {type(module).__name__}, no Linear")
        out_features, in_features = built = linear_shape(module)
        if built != layer.shape:
            raise CheckpointError(f"{name}: config.json builds it as {built}, stored is {layer.shape}")
        has_bias = module.bias is not None
        replacement = QuantizedLinear(
            layer.spec, in_features, out_features, has_bias, module.weight.dtype, device="meta"
        )
        model.set_submodule(name, replacement)


def register() -> None:
    """Make ``quantkit`` known to transformers; calling it again changes nothing."""
    if QUANT_METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(QUANT_METHOD)(QuantkitConfig)
        register_quantizer(QUANT_METHOD)(QuantkitQuantizer)


def set_layout(model: Any, layout: Layout) -> None:
    """What the order of a model's weights will be for when it comes to a GPU; experts that run at once keep theirs."""
    routed = {part for module in model.modules() if isinstance(module, RoutedExperts) for part in module.modules()}
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module not in routed:
            module.layout = layout


def load_checkpoint(folder: str, *, device: str, dtype: torch.dtype | None, layout: Layout = "latency") -> Any:
    """The model of a local quantkit checkpoint, in eval mode on the device; dtype None keeps the checkpoint's.

    layout: what its weights' order on a GPU is for. Experts that run at once have the order for latency in any case.
    Raises CheckpointError for a folder that is no quantkit checkpoint or is damaged; DeviceError where a product in
    this dtype would end the process.
    """
    if torch.device(device).type == "cpu" and (dtype or stored_dtype(folder)) in (torch.bfloat16, torch.float16):
        check_half_precision()
    model = _load(folder, dtype=dtype or "auto").eval()
    set_layout(model, layout)
    model = model.to(device)
    share_products(model)
    return model


def check_readable(folder: Path) -> None:
    """Open a checkpoint as a stranger would, every tensor's digest compared, without giving it memory.

    What was just written is compared whatever QUANTKIT_VERIFY says. Raises CheckpointError where it cannot be read.
    """
    if not verifies():
        start_verifying(read_headers(weight_files(folder)), read_document(folder)).finish()
    _load(str(folder), device_map="meta")


def _load(folder: str, **options: Any) -> Any:
    read_document(Path(folder))
    read_headers(weight_files(Path(folder)))
    with refusing(f"checkpoint {folder} cannot be loaded", CheckpointError):
        answer: Any = auto_class(folder, local_only=True).from_pretrained(
            folder, output_loading_info=True, local_files_only=True, trust_remote_code=False, **options
        )
    model, report = answer
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            names = sorted(map(str, report[problem]))
            raise CheckpointError(f"checkpoint {folder}: {problem.replace('_', ' ')} such as {names[0]}")
    return model


def attach_config(model: Any, document: dict[str, Any]) -> None:
    """Mark an in-memory model as quantized, so that save_pretrained writes quantization_config."""
    register()
    config = QuantkitConfig(**document)
    model.config.quantization_config = config
    model.hf_quantizer = QuantkitQuantizer(config)
    model.is_quantized = True


register()
