"""One of two ranks that make two scales together, of which the second fails at the second one.

python ranks_in_step.py RANK FOLDER IN_STEP
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from vllm_layers import rank_of

from tensorhub_plugins.vllm.worker.votes import OutOfStep, Steps, engine_gather

WAIT_S = 2.0


def main(rank: int, folder: Path, in_step: bool, stages: int) -> None:
    with rank_of(folder, rank, 2, stages) as config:
        from vllm.distributed import get_tp_group

        group = get_tp_group().device_group
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=WAIT_S), group)
        steps = Steps(engine_gather(config)[0], together=in_step)
        assert steps.vote(1, True)
        saw = "all"
        try:
            for layer in ("a", "b"):
                if rank == 1 and layer == "b":
                    raise MemoryError
                steps.all(layer)
                largest = torch.tensor([1.0 + rank % 2])
                torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
                assert largest.item() == 2.0
        except OutOfStep:
            saw = "out-of-step"
        except MemoryError:
            saw = "failed"
        except RuntimeError:
            saw = "waited"
        agreed = steps.vote(1, False)
        (folder / str(rank)).write_text(f"{saw}, {'agreed' if agreed else 'refused'}")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True", int(sys.argv[4]))
