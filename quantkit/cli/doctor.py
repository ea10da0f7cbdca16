"""``quantkit doctor``."""

from __future__ import annotations

from quantkit.cli.common import JsonOption, check_json_path, print_facts, print_table, write_json


def doctor(json_path: JsonOption = None) -> None:
    """Show what this machine can run, and the pip line for what is missing."""
    check_json_path(json_path)
    from quantkit.cpu import failure_advice
    from quantkit.jobs.doctor import diagnose

    diagnosis = diagnose()
    failure = diagnosis.half_precision
    print_facts(
        {
            "Python": diagnosis.python,
            "system": diagnosis.system,
            "torch's CUDA": diagnosis.torch_cuda or "none (CPU build)",
            "GPUs": ", ".join(f"{gpu.name} ({gpu.verified})" for gpu in diagnosis.gpus) or "none",
            "kernels": diagnosis.kernels,
            "CPU": "half-precision products run" if failure is None else failure_advice(failure),
            "serving": diagnosis.serving,
        }
    )
    print_table(
        "packages",
        ["package", "version", "for", "if missing"],
        [[p.name, p.version or "missing", p.purpose, "" if p.version else p.pip_line] for p in diagnosis.packages],
    )
    if not diagnosis.gpus:
        columns = list(diagnosis.generations.values())
        print_table(
            "tensor-core instructions by GPU generation",
            ["instruction", *diagnosis.generations],
            [[row[0].instruction.value, *(cell.support.value for cell in row)] for row in zip(*columns, strict=True)],
        )
    for gpu in (gpu for gpu in diagnosis.gpus if gpu.capabilities):
        print_table(
            f"{gpu.name}, compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}, "
            f"{gpu.memory_bytes / 2**30:.0f} GiB",
            ["instruction", "support", "used by", "what follows"],
            [[c.instruction.value, c.support.value, c.used_by, c.consequence] for c in gpu.capabilities],
        )
        print_table(
            "bipolar-INT with many tokens (few take the GEMV on planes)", ["widths", "path", "why"], gpu.bipolar_paths
        )
    write_json(json_path, diagnosis.to_json())
