"""How each other toolkit is called for ``peers.py``, and the bits that it stores.

Every toolkit is imported where it is called, so that only those named need to be installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quantkit.models.families import block_linears, linear_weight
from quantkit.models.loading import resolve_model
from scripts.quality.llamacpp import llamacpp
from scripts.quality.peer import Inputs, Peer, Quantized, Setting, grouped, loaded_for_peers

AUTOROUND_LIGHT = {"iters": 50, "lr": 5e-3}  # of its command auto-round-light


def hqq(inputs: Inputs, setting: Setting) -> Quantized:
    """HQQ needs no calibration text."""
    from hqq.core.quantize import Quantizer

    loaded, _ = loaded_for_peers(inputs.model, inputs.device)
    weights = {}
    for name, module in block_linears(loaded).items():
        codes, meta = Quantizer.quantize(
            linear_weight(module).detach(),
            nbits=setting.bits,
            group_size=setting.group_size,
            axis=1,
            compute_dtype=torch.float16,
            device=inputs.device,
        )
        weights[name] = Quantizer.dequantize(codes, meta).float()
    return grouped(weights, setting, 32)


def gptq(inputs: Inputs, setting: Setting) -> Quantized:
    """GPTQModel with its defaults (group-aware activation order), but asymmetric grids; read back from its checkpoint.

    The layers in memory right after quantizing hold zeros in the file's convention, one below what dequantizing takes.
    """
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=int(setting.bits), group_size=setting.group_size, sym=False, offload_to_disk=False)
    peer = GPTQModel.load(resolve_model(inputs.model).location, config, dtype=torch.float32, device=inputs.device)
    windows = inputs.calibration.windows
    rows = [{"input_ids": row[None].long(), "attention_mask": torch.ones_like(row[None])} for row in windows]
    peer.quantize(rows, batch_size=1)
    with tempfile.TemporaryDirectory() as folder:
        peer.save(folder)
        stored = GPTQModel.load(folder, device=inputs.device, dtype=torch.float16, backend=BACKEND.GPTQ_TORCH)
        found = {name: module for name, module in stored.model.named_modules() if hasattr(module, "dequantize_weight")}
        weights = {name: module.dequantize_weight().detach().t().float() for name, module in found.items()}
    return grouped(weights, setting, 16 + int(setting.bits))


def autoround(symmetric: bool, light: bool) -> Callable[[Inputs, Setting], Quantized]:
    """AutoRound with its defaults, 200 steps a block of 8 windows each, or the 50 steps of its light recipe."""

    def quantize(inputs: Inputs, setting: Setting) -> Quantized:
        from auto_round import AutoRound

        windows = inputs.calibration.windows
        batch = min(8, len(windows))  # its default
        loaded, tokenizer = loaded_for_peers(inputs.model, inputs.device)
        rounding = AutoRound(
            loaded,
            tokenizer,
            bits=int(setting.bits),
            group_size=setting.group_size,
            sym=symmetric,
            dataset=list(windows.long().split(batch)),
            nsamples=len(windows),
            seqlen=windows.shape[1],
            batch_size=batch,
            device_map=inputs.device,
            amp=False,  # which would round the weights to bf16 first
            enable_torch_compile=False,
            **(AUTOROUND_LIGHT if light else {}),
        )
        done, _ = rounding.quantize()
        weights = {name: linear_weight(module).detach().float().cpu() for name, module in block_linears(done).items()}
        return grouped(weights, setting, 16 if symmetric else 16 + int(setting.bits))

    return quantize


def exl3(own_text: bool) -> Callable[[Inputs, Setting], Quantized]:
    """EXL3 by exllamav3's converter on a GPU, calibrated on our windows, or on as many rows of its own text as it takes
    by itself. Its rows are as long as the model's context; the head, which is ours to keep, stays as it is.
    """

    def quantize(inputs: Inputs, setting: Setting) -> Quantized:
        from exllamav3.conversion import convert_model
        from safetensors.torch import save_file

        where, windows = Path(resolve_model(inputs.model).location), inputs.calibration.windows
        with tempfile.TemporaryDirectory() as folder:
            work, out, rows = (Path(folder) / name for name in ("work", "out", "rows.safetensors"))
            arguments = ["-i", str(where), "-w", str(work), "-o", str(out), "-b", str(setting.bits), "-hb", "16"]
            if own_text:
                arguments += ["-cc", str(_context(where))]
            else:
                save_file({"input_ids": windows.long().contiguous()}, rows)
                arguments += ["-cd", str(rows), "-cr", str(len(windows)), "-cc", str(windows.shape[1])]
            settings, state, fine, error = convert_model.prepare(convert_model.parser.parse_args(arguments))
            if not fine:
                raise ValueError(error)
            convert_model.main(settings, state)
            return _exl3_layers(out, inputs.device)

    return quantize


def _context(model: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).max_position_embeddings)


def _exl3_layers(folder: Path, device: str) -> Quantized:
    """The layers of a checkpoint: codes decoded by exllamav3, both Hadamard products and the scales in fp32."""
    from exllamav3.modules.quant.exl3 import LinearEXL3
    from exllamav3.modules.quant.exl3_lib.quantize import had_k, had_n, preapply_had_l, preapply_had_r
    from safetensors.torch import load_file

    layers: dict[str, dict[str, Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file, device=device).items():
            layer, _, part = name.rpartition(".")
            layers.setdefault(layer, {})[part] = tensor
    weights, stored = {}, 0
    for name, parts in layers.items():
        if "trellis" in parts:
            columns, rows = parts["suh"].numel(), parts["svh"].numel()
            linear = LinearEXL3(None, columns, rows, **parts)
            inner = preapply_had_l(linear.get_inner_weight_tensor().float(), had_k) * parts["suh"].float()[:, None]
            weights[name] = (preapply_had_r(inner, had_n) * parts["svh"].float()).t().contiguous().cpu()
            stored += 16 * sum(parts[part].numel() for part in ("trellis", "suh", "svh"))
    return Quantized(weights, stored)


_LLAMACPP = "llama-quantize --imatrix MEAN_SQUARES"
_EXL3 = "exllamav3.conversion.convert_model -b BITS -hb 16"
PEERS = {
    "hqq": Peer("hqq", "hqq", hqq, "Quantizer.quantize(weight, nbits, group_size, axis=1)"),
    "gptq": Peer("gptqmodel", "gptqmodel", gptq, "QuantizeConfig(bits, group_size, sym=False)"),
    "autoround": Peer(
        "auto-round", "auto_round", autoround(True, False), "AutoRound(model, tokenizer, bits, group_size, sym=True)"
    ),
    "autoround-asym": Peer(
        "auto-round", "auto_round", autoround(False, False), "AutoRound(model, tokenizer, bits, group_size, sym=False)"
    ),
    "autoround-light": Peer(
        "auto-round",
        "auto_round",
        autoround(True, True),
        "AutoRound(model, tokenizer, bits, group_size, sym=True, iters=50, lr=5e-3)",
    ),
    "autoround-light-asym": Peer(
        "auto-round",
        "auto_round",
        autoround(False, True),
        "AutoRound(model, tokenizer, bits, group_size, sym=False, iters=50, lr=5e-3)",
    ),
    "exl3": Peer("exllamav3", "exllamav3", exl3(own_text=False), f"{_EXL3} -cd WINDOWS", "BITS"),
    "exl3-own-text": Peer("exllamav3", "exllamav3", exl3(own_text=True), f"{_EXL3} -cc CONTEXT", "BITS"),
    "llamacpp": Peer("gguf", "gguf", llamacpp(mixed=False), f"{_LLAMACPP} --pure --tensor-type blk=TYPE", "TYPE"),
    "llamacpp-mix": Peer("gguf", "gguf", llamacpp(mixed=True), f"{_LLAMACPP} TYPE", "TYPE"),
}
