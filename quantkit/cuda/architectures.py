"""GPU generations, one row each: instructions, shared memory, launch features, kernels, peak rates. Pure data.

Whether an instruction is native was read from the machine code that the compiler makes of it, and from measured rates.
A new generation is a row here, and the kernels that it brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache

from quantkit.errors import KernelError

ComputeCapability = tuple[int, int]
WARP_THREADS = 32
WARPGROUP_THREADS = 128
_BLOCK_RESERVE = 1 << 10  # bytes of shared memory that the system keeps per block


class Support(StrEnum):
    """How an instruction runs: on its own unit, rewritten by the compiler into others, or not at all."""

    NATIVE = "native"
    EMULATED = "emulated"
    MISSING = "missing"


class Instruction(StrEnum):
    """Tensor-core instructions that the kernels use, as PTX names them."""

    MMA_B1 = "mma b1 AND.POPC"
    WGMMA_B1 = "wgmma b1 AND.POPC"
    MMA_S4 = "mma s4"
    MMA_S8 = "mma s8"
    WGMMA_S8 = "wgmma s8"
    MMA_F16 = "mma f16/bf16"
    WGMMA_F16 = "wgmma f16/bf16"


class Kernel(StrEnum):
    """Kernels that a generation may use or not. The others (norms, quantizers, ...) run on every generation."""

    BCQ_BINARY_GEMV = "bcq_binary_gemv"
    BCQ_INT8_GEMV = "bcq_int8_gemv"
    BCQ_LEVEL_GEMV = "bcq_level_gemv"
    BCQ_LUT_GEMV = "bcq_lut_gemv"
    BCQ_GEMM_MMA = "bcq_gemm_mma"
    BCQ_GEMM_WGMMA = "bcq_gemm_wgmma"
    BCQ_DEQUANTIZE = "bcq_dequantize"
    BIPOLAR_GEMV = "bipolar_gemv"
    BIPOLAR_BINARY_MMA = "bipolar_gemm_mma binary"
    BIPOLAR_INT8_MMA = "bipolar_gemm_mma int8"
    BIPOLAR_BINARY_WGMMA = "bipolar_gemm_wgmma binary"
    BIPOLAR_INT8_WGMMA = "bipolar_gemm_wgmma int8"
    BIPOLAR_FUSED_WGMMA = "bipolar_gemm_fused"
    INT8_GEMM_MMA = "int8_gemm_mma"
    INT4_GEMM_MMA = "int8_gemm_mma int4"
    INT8_GEMM_WGMMA = "int8_gemm_wgmma"
    INT8_ATTENTION_MMA = "int8_attention_mma"
    INT8_ATTENTION_WGMMA = "int8_attention_wgmma"


INSTRUCTION_OF: dict[Kernel, Instruction | None] = {
    Kernel.BCQ_BINARY_GEMV: Instruction.MMA_B1,
    Kernel.BCQ_INT8_GEMV: Instruction.MMA_S8,
    Kernel.BCQ_LEVEL_GEMV: Instruction.MMA_F16,
    Kernel.BCQ_LUT_GEMV: None,
    Kernel.BCQ_GEMM_MMA: Instruction.MMA_F16,
    Kernel.BCQ_GEMM_WGMMA: Instruction.WGMMA_F16,
    Kernel.BCQ_DEQUANTIZE: Instruction.MMA_F16,  # of cuBLAS, which multiplies the weight
    Kernel.BIPOLAR_GEMV: Instruction.MMA_B1,
    Kernel.BIPOLAR_BINARY_MMA: Instruction.MMA_B1,
    Kernel.BIPOLAR_INT8_MMA: Instruction.MMA_S8,
    Kernel.BIPOLAR_BINARY_WGMMA: Instruction.WGMMA_B1,
    Kernel.BIPOLAR_INT8_WGMMA: Instruction.WGMMA_S8,
    Kernel.BIPOLAR_FUSED_WGMMA: Instruction.WGMMA_S8,
    Kernel.INT8_GEMM_MMA: Instruction.MMA_S8,
    Kernel.INT4_GEMM_MMA: Instruction.MMA_S4,
    Kernel.INT8_GEMM_WGMMA: Instruction.WGMMA_S8,
    Kernel.INT8_ATTENTION_MMA: Instruction.MMA_S8,
    Kernel.INT8_ATTENTION_WGMMA: Instruction.WGMMA_S8,
}
"""The tensor-core instruction that a kernel stands on; a generation uses a kernel only where that is native."""


_CONSEQUENCES: dict[tuple[Instruction, Support], str] = {
    (Instruction.MMA_B1, Support.EMULATED): "one binary product becomes eight INT8 products, so INT8 kernels are used",
    (Instruction.WGMMA_B1, Support.MISSING): "bipolar products use mma b1 where it is native, else mma s8",
    (Instruction.MMA_S4, Support.EMULATED): "INT4 layers are stored in 4 bits and computed in INT8",
    (Instruction.WGMMA_F16, Support.MISSING): "bcq products of many tokens use mma f16/bf16",
    (Instruction.WGMMA_S8, Support.MISSING): "INT8 products and INT8 attention use mma s8",
}


@dataclass(frozen=True)
class Peaks:
    """What a GPU can do at most, from datasheets but where said otherwise. None: not known here.

    read_bandwidth: bytes/s of its memory. fp16, fp8, int8: dense operations/s (a multiply-add is two).
    wgmma_s8, mma_s8, wgmma_b1: operations/s measured with kernels that issue that instruction alone.
    """

    read_bandwidth: float
    fp16: float | None = None
    fp8: float | None = None
    int8: float | None = None
    wgmma_s8: float | None = None
    mma_s8: float | None = None
    wgmma_b1: float | None = None


@dataclass(frozen=True, eq=False)
class Architecture:
    """One GPU generation.

    target: what the compiler is told (-arch). shared_memory: bytes per multiprocessor. overlap: a launch may start
    before its predecessor ends (programmatic dependent launch). clusters: blocks see each other's shared memory.
    native, emulated: instructions; any other is missing. kernels: which of Kernel its GPUs use. verified: how far the
    kernels are tested on it, for ``quantkit doctor``. peaks: by the name that the driver gives a GPU.
    """

    name: str
    capability: ComputeCapability
    target: str
    shared_memory: int
    native: frozenset[Instruction]
    emulated: frozenset[Instruction]
    kernels: frozenset[Kernel]
    verified: str
    overlap: bool = False
    clusters: bool = False
    peaks: Mapping[str, Peaks] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Name and compute capability, as ``Hopper 9.0``."""
        return f"{self.name} {self.capability[0]}.{self.capability[1]}"

    @property
    def tested(self) -> bool:
        """Whether the kernels are made for it and were run, on a GPU of it or of another generation."""
        return self.verified != _UNTESTED

    @property
    def heading(self) -> str:
        """The title, marked where it is untested."""
        return self.title if self.tested else f"{self.title} ({_UNTESTED})"

    def support(self, instruction: Instruction) -> Support:
        """How an instruction runs."""
        if instruction in self.native:
            return Support.NATIVE
        return Support.EMULATED if instruction in self.emulated else Support.MISSING

    def shared_limit(self, resident: int = 1) -> int:
        """Bytes of shared memory that a block may use where ``resident`` blocks share a multiprocessor."""
        return self.shared_memory // resident - _BLOCK_RESERVE


_WARP_INSTRUCTIONS = frozenset({Instruction.MMA_B1, Instruction.MMA_S4, Instruction.MMA_S8, Instruction.MMA_F16})
_PORTABLE = frozenset(
    {
        Kernel.BCQ_INT8_GEMV,
        Kernel.BCQ_LEVEL_GEMV,
        Kernel.BCQ_LUT_GEMV,
        Kernel.BCQ_GEMM_MMA,
        Kernel.BCQ_DEQUANTIZE,
        Kernel.BIPOLAR_INT8_MMA,
        Kernel.INT8_GEMM_MMA,
        Kernel.INT8_ATTENTION_MMA,
    }
)
_BINARY = frozenset({Kernel.BCQ_BINARY_GEMV, Kernel.BIPOLAR_GEMV})
_AMPERE = _PORTABLE | _BINARY | {Kernel.BIPOLAR_BINARY_MMA, Kernel.INT4_GEMM_MMA}
_HOPPER = (_PORTABLE | _BINARY) - {Kernel.BCQ_GEMM_MMA, Kernel.BIPOLAR_INT8_MMA, Kernel.INT8_GEMM_MMA} | {
    Kernel.BCQ_GEMM_WGMMA,
    Kernel.BIPOLAR_BINARY_WGMMA,
    Kernel.BIPOLAR_INT8_WGMMA,
    Kernel.BIPOLAR_FUSED_WGMMA,
    Kernel.INT8_GEMM_WGMMA,
    Kernel.INT8_ATTENTION_WGMMA,
}
_COMPILED = "compiled; the same kernels are tested on compute capability 9.0"
_UNTESTED = "untested"

_ROWS = (
    Architecture(
        name="Ampere",
        capability=(8, 0),
        target="sm_80",
        shared_memory=164 << 10,
        native=_WARP_INSTRUCTIONS,
        emulated=frozenset(),
        kernels=_AMPERE,
        verified=_COMPILED,
        peaks={
            "NVIDIA A100-SXM4-80GB": Peaks(2.039e12, fp16=312e12, int8=624e12),
            "NVIDIA A100-SXM4-40GB": Peaks(1.555e12, fp16=312e12, int8=624e12),
            "NVIDIA A100 80GB PCIe": Peaks(1.935e12),
        },
    ),
    Architecture(
        name="Ampere",
        capability=(8, 6),
        target="sm_86",
        shared_memory=100 << 10,
        native=_WARP_INSTRUCTIONS,
        emulated=frozenset(),
        kernels=_AMPERE,
        verified=_COMPILED,
        peaks={"NVIDIA GeForce RTX 3090": Peaks(0.936e12)},
    ),
    Architecture(
        name="Ada",
        capability=(8, 9),
        target="sm_86",  # sm_89 gives the same machine code for 482 of 484 instances: nothing here is new in it
        shared_memory=100 << 10,
        native=_WARP_INSTRUCTIONS,
        emulated=frozenset(),
        kernels=_AMPERE,
        verified=_COMPILED,
        peaks={
            "NVIDIA L40S": Peaks(0.864e12),
            "NVIDIA L4": Peaks(0.3e12),
            "NVIDIA GeForce RTX 4090": Peaks(1.008e12),
        },
    ),
    Architecture(
        name="Hopper",
        capability=(9, 0),
        target="sm_90a",
        shared_memory=228 << 10,
        native=_WARP_INSTRUCTIONS - {Instruction.MMA_S4}
        | {Instruction.WGMMA_B1, Instruction.WGMMA_S8, Instruction.WGMMA_F16},
        emulated=frozenset({Instruction.MMA_S4}),
        kernels=_HOPPER,
        verified="tested and measured",
        overlap=True,
        clusters=True,
        peaks={
            "NVIDIA H200": Peaks(
                4.65e12,  # measured with a read-only kernel
                fp16=989.5e12,
                fp8=1979e12,
                int8=1979e12,
                wgmma_s8=1.928e15,
                mma_s8=1.156e15,
                wgmma_b1=15.4e15,
            ),
            "NVIDIA H100 80GB HBM3": Peaks(3.35e12, fp16=989.5e12, int8=1979e12),
            "NVIDIA H100 PCIe": Peaks(2.0e12),
        },
    ),
    Architecture(
        name="Blackwell",
        capability=(10, 0),
        target="sm_100",
        shared_memory=228 << 10,
        native=frozenset({Instruction.MMA_S8, Instruction.MMA_F16}),
        emulated=frozenset({Instruction.MMA_B1, Instruction.MMA_S4}),
        kernels=_PORTABLE,
        verified=_UNTESTED,
        overlap=True,
        clusters=True,
    ),
    Architecture(
        name="Blackwell",
        capability=(12, 0),
        target="sm_120",
        shared_memory=100 << 10,
        native=frozenset({Instruction.MMA_S8, Instruction.MMA_F16}),
        emulated=frozenset({Instruction.MMA_B1, Instruction.MMA_S4}),
        kernels=_PORTABLE,
        verified=_UNTESTED,
        overlap=True,
        clusters=True,
        peaks={"NVIDIA GeForce RTX 5090": Peaks(1.792e12)},
    ),
)

ARCHITECTURES: dict[ComputeCapability, Architecture] = {row.capability: row for row in _ROWS}
"""The rows by compute capability, oldest first."""


@cache
def architecture(major: int, minor: int) -> Architecture:
    """The row of a GPU of compute capability ``major.minor``.

    A GPU without a row of its own gets the newest row that is older than it, as untested and compiled for the GPU
    itself; Hopper's is passed over, since later GPUs lack its warpgroup instructions.
    Raises KernelError below compute capability 8.0.
    """
    capability = (major, minor)
    if capability in ARCHITECTURES:
        return ARCHITECTURES[capability]
    older = [row for row in _ROWS if row.capability < capability and not row.target.endswith("a")]
    if not older:
        raise KernelError(f"the kernels need a GPU of compute capability 8.0 or later; this one has {major}.{minor}")
    return replace(older[-1], capability=capability, target=f"sm_{major}{minor}", verified=_UNTESTED)


@dataclass(frozen=True)
class Capability:
    """One line of ``quantkit doctor``: an instruction, its kernels, and what follows where it is not native."""

    instruction: Instruction
    support: Support
    used_by: str
    consequence: str


def capabilities(row: Architecture) -> tuple[Capability, ...]:
    """Every instruction on a generation, with the kernels that use it there."""
    found = []
    for instruction in Instruction:
        users = ", ".join(
            kernel for kernel, need in INSTRUCTION_OF.items() if need is instruction and kernel in row.kernels
        )
        support = row.support(instruction)
        found.append(Capability(instruction, support, users, _CONSEQUENCES.get((instruction, support), "")))
    return tuple(found)


def known_peaks(gpu_name: str) -> Peaks | None:
    """The peaks of a GPU by the name that the driver gives it; None where the rows do not have it."""
    return next((row.peaks[gpu_name] for row in _ROWS if gpu_name in row.peaks), None)
