"""Fig. 6: latency of GateUp and Down by the number of active experts and the rows of each, with
DeepGEMM's masked kernel beside it.

M2.7, 64 experts on the GPU (four GPUs). A few rows cost what reading the weights costs, so latency
follows the number of active experts, not that of rows. Weights rotate over layers.
    python benchmarks/apk/fig06.py --json benchmarks/results/apk_fig06-h200.json
"""

from __future__ import annotations

from common import arguments, report
from fig13 import masked

MODEL, EXPERTS, LAYERS = "M2.7", 64, 4
ACTIVE = (1, 2, 4, 8, 16, 32, 64)
ROWS = (1, 16, 64, 128)  # of each active expert


def main() -> None:
    args = arguments(__doc__).parse_args()
    found: list[dict] = []
    for rows in ROWS:
        masked(MODEL, EXPERTS, list(ACTIVE), rows, LAYERS, {}, found)
    report("apk_fig06", found, args.json)


if __name__ == "__main__":
    main()
