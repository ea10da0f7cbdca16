"""Writes a document of scripts/flattenquant/speed.py as Markdown, the paper's columns beside ours."""

from __future__ import annotations

from typing import Any

from scripts.common import titled_table

# FlattenQuant on an A100 80 GB. Table 5 in ms; Table 6 in GB by model and method: batch 1, 8, 32 of 512, 1024, 2048.
PAPER_TABLE5 = {"flatten_quantize": 0.19, "fp16": 3.12, "int8_gemm": 2.35, "int4_gemm": 1.57}
PAPER_TABLE6 = {
    ("opt-30b", "fp16"): (59.2, 60.4, 66.2, 60.1, 62.3, 72.3, 62.8, 73.4, 88.6),
    ("opt-30b", "smoothquant"): (32.3, 33.2, 38.2, 32.6, 33.5, 40.5, 37.2, 42.1, 48.9),
    ("opt-30b", "flatten-o3"): (26.1, 26.8, 31.7, 26.3, 27.5, 33.5, 31.8, 36.1, 39.8),
    ("opt-66b", "fp16"): (126.3, 126.8, 133.5, 127.2, 129.1, 140.1, 130.6, 143.5, 162.6),
    ("opt-66b", "smoothquant"): (67.4, 68.2, 73.1, 67.3, 72.2, 75.9, 69.6, 79.9, 91.2),
    ("opt-66b", "flatten-o3"): (53.7, 55.4, 60.2, 56.2, 59.6, 60.1, 55.4, 61.2, 70.5),
}
SIZES_TABLE6 = [(batch, length) for length in (512, 1024, 2048) for batch in (1, 8, 32)]
METHODS = ("fp16", "smoothquant", "flatten-o1", "flatten-o3", "flatten-o1-int8-attention")
_ROWS5, _CHANNELS5 = 16384, 4096

Row = dict[str, Any]


def markdown(document: dict[str, Any]) -> str:
    """Every table for which rows were measured, with the machine they were measured on."""
    facts = document["environment"]
    named = ", ".join(f"{name} {facts[name]}" for name in ("driver", "cuda", "torch", "cupy", "python", "commit"))
    run = "by this command, whose script is scripts/flattenquant/speed.py today"
    parts = [f"Measured on {facts['device']} ({named}) {run}\n\n    {document['command']}"]
    if "kernels" in document:
        parts += [_table5(document["kernels"]), _flattening(document["kernels"]), _products(document["kernels"])]
    if "linears" in document:
        parts.append(_linears(document["linears"]))
    if "attention" in document:
        parts.append(_attention(document["attention"]))
    if "prefill" in document:
        names = dict.fromkeys(row["model"] for row in document["prefill"])
        parts += [_prefill(name, [r for r in document["prefill"] if r["model"] == name]) for name in names]
    if "memory" in document:
        parts.append(_memory(document["memory"]))
    return "\n\n".join(parts)


def _table5(rows: list[Row]) -> str:
    def ours(what: str) -> str:
        found = [r for r in rows if r["what"] == what and r["M"] == _ROWS5]
        wide = [r for r in found if r.get("N", _CHANNELS5) == _CHANNELS5 and r["K"] in (4096, 5120)]
        texts = [f"{r['us'] / 1e3:.3f}" + (f" (K = {r['K']})" if len(wide) > 1 else "") for r in wide]
        return ", ".join(texts[:1] if what == "flatten_quantize" else texts)

    lines = [[what, ours(what), f"{paper:.2f}"] for what, paper in PAPER_TABLE5.items()]
    extra = [[what, ours(what), ""] for what in ("torch._int_mm", "fp8")]
    title = "Table 5: 8 x 2048 tokens, 4096 channels, 1024 extended, ms"
    return titled_table(title, ("operator", "ours", "paper, A100"), lines + extra)


def _flattening(rows: list[Row]) -> str:
    keys = ("M", "K", "extended", "gigabytes_per_second")
    lines = [
        [*(str(r[key]) for key in keys), f"{r['us']:.1f}", f"{r['peak_percent']:.0f} %"]
        for r in rows
        if r["what"] == "flatten_quantize"
    ]
    columns = ("rows", "channels", "extended", "GB/s", "us", "of the read bandwidth")
    return titled_table("flatten_quantize", columns, lines)


def _products(rows: list[Row]) -> str:
    products = [r for r in rows if r["what"] != "flatten_quantize"]
    fp16 = {(r["M"], r["N"], r["K"]): r["us"] for r in products if r["what"] == "fp16"}
    lines = []
    for r in products:
        shape = (r["M"], r["N"], r["K"])
        faster = f"{fp16[shape] / r['us']:.2f}" if shape in fp16 else ""
        percent = f"{r['peak_percent']:.0f} %" if "peak_percent" in r else ""
        what = r["what"] + (", uniform codes" if r["data"] == "uniform" else "")
        lines.append([" x ".join(map(str, shape)), what, f"{r['us']:.0f}", str(r["tera_ops"]), percent, faster])
    columns = ("M x N x K", "product", "us", "10^12 operations/s", "of the INT8 rate", "x fp16")
    return titled_table("Products", columns, lines)


def _linears(rows: list[Row]) -> str:
    base = {r["model"]: r["block_ms"] for r in rows if r["method"] == "fp16"}
    lines = [[r["model"], r["method"], f"{r['block_ms']:.2f}", f"{base[r['model']] / r['block_ms']:.2f}"] for r in rows]
    columns = ("model", "method", "ms per block", "x fp16")
    return titled_table("Linears of one block, 8 x 2048 tokens, flattening included", columns, lines)


def _attention(rows: list[Row]) -> str:
    def problem(row: Row) -> tuple[str, str]:
        heads = f"{row['heads']} x {row['head_dim']}"
        shared = "" if row["heads"] == row["kv_heads"] else f", {row['kv_heads']} of K and V"
        return f"{row['batch']} x {row['length']}", heads + shared

    fp16 = {problem(r): r["us"] for r in rows if r["what"] == "fp16"}
    lines = []
    for r in rows:
        percent = f"{r['peak_percent']:.0f} %" if "peak_percent" in r else ""
        faster = f"{fp16[problem(r)] / r['us']:.2f}"
        lines.append([*problem(r), r["what"], f"{r['us']:.0f}", str(r["tera_ops"]), percent, faster])
    columns = ("tokens", "heads", "", "us", "10^12 operations/s", "of the INT8 rate of warp products", "x fp16")
    return titled_table("Causal attention, quantizing included", columns, lines)


def _prefill(name: str, rows: list[Row]) -> str:
    cells = {(r["method"], r["batch"], r["length"]): r for r in rows}
    sizes = dict.fromkeys((r["batch"], r["length"]) for r in rows)
    methods = [method for method in METHODS if any(r["method"] == method for r in rows)]

    def cell(method: str, size: tuple[int, int]) -> str:
        row, base = cells[(method, *size)], cells[("fp16", *size)]
        if row["ms"] is None:
            return "does not fit"
        faster = "" if base["ms"] is None or method == "fp16" else f" ({base['ms'] / row['ms']:.2f}x)"
        return f"{row['ms']:.1f}{faster}"

    def rate(size: tuple[int, int]) -> str:
        row = cells[("flatten-o1", *size)]
        return "" if row["ms"] is None else f"{row['tokens_per_second']:.0f}, {row['tera_ops']:.0f}"

    def memory(size: tuple[int, int]) -> str:
        peak, base = (cells[(method, *size)]["peak_memory_bytes"] for method in ("flatten-o3", "fp16"))
        return "" if peak is None else f"{peak / 1e9:.1f}" + ("" if base is None else f" ({peak / base:.1%} of fp16)")

    lines = [[str(b), str(n), *(cell(m, (b, n)) for m in methods), rate((b, n)), memory((b, n))] for b, n in sizes]
    columns = ("batch", "tokens", *methods, "O1: tokens/s, 10^12 operations/s", "O3: peak memory GB")
    return titled_table(f"Fig 4: {name}, one context pass, ms (times fp16)", columns, lines)


def _memory(rows: list[Row]) -> str:
    lines = []
    for model, method in PAPER_TABLE6:
        found = {(r["batch"], r["length"]): r for r in rows if (r["model"], r["method"]) == (model, method)}
        base = {(r["batch"], r["length"]): r for r in rows if (r["model"], r["method"]) == (model, "fp16")}
        for kind in ("ours", "paper"):
            texts = []
            for index, size in enumerate(SIZES_TABLE6):
                row = found[size]
                if kind == "paper":
                    texts.append(f"{PAPER_TABLE6[model, method][index]:.1f}")
                elif row["peak_bytes"] is None:
                    texts.append("does not fit")
                else:
                    share = row["peak_bytes"] / base[size]["peak_bytes"] if base[size]["peak_bytes"] else None
                    note = "" if share is None or method == "fp16" else f" ({share:.0%})"
                    above = ", does not fit" if row["peak_bytes"] > row["device_bytes"] else ""
                    texts.append(f"{row['peak_bytes'] / 1e9:.1f}{note}{above}")
            lines.append([model, method, kind, *texts])
    sizes = tuple(f"{batch} x {length}" for batch, length in SIZES_TABLE6)
    return titled_table("Table 6: peak memory, GB (of fp16)", ("model", "method", "", *sizes), lines)
