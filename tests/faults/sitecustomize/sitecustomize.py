"""Python imports this at the start of each process whose PYTHONPATH holds its directory: the processes of a case."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))

from tests.faults.hook import lie_in_wait

lie_in_wait()
