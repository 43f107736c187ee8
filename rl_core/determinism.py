"""The same bits from run to run on a GPU (`trainer.deterministic`)."""

import os

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def be_deterministic(wanted: bool) -> None:
    """Let torch take deterministic algorithms only, in this process, or whatever it finds fastest.

    To be called before the first matrix product: cuBLAS reads its setting when it is first used (cuBLAS documentation, "Results
    reproducibility"; torch.use_deterministic_algorithms).
    """
    if wanted:
        os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = False
