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
            "GPUs": ", ".join(gpu.name for gpu in diagnosis.gpus) or "none",
            "kernels": diagnosis.kernels,
            "CPU": "half-precision products run" if failure is None else failure_advice(failure),
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
            ["instruction", *diagnosis.generations, "used by"],
            [
                [row[0].unit, *(cell.support.value for cell in row), row[0].used_by]
                for row in zip(*columns, strict=True)
            ],
        )
    for gpu in diagnosis.gpus:
        print_table(
            f"{gpu.name}, compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}, "
            f"{gpu.memory_bytes / 2**30:.0f} GiB",
            ["instruction", "support", "used by", "what follows"],
            [[c.unit, c.support.value, c.used_by, c.note] for c in gpu.capabilities],
        )
        print_table(
            "bipolar-INT with many tokens (few take the GEMV on planes)", ["widths", "path", "why"], gpu.bipolar_paths
        )
    write_json(json_path, diagnosis.to_json())
