"""What the guests of recipes.rdma_vm run: `guest.py cases [NAME...]` in the first, `guest.py other` in the second.

A line for every case; exits with the number of those that failed. pytest is not used: importing it takes a quarter of a
minute in here, and processes must be forked before the first thread.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path

OUT = Path("/mnt/out")
CASE_S_MAX = 240.0


def main() -> None:
    role, *names = sys.argv[1:]
    faulthandler.enable()
    began = time.monotonic()
    os.environ["TENSORHUB_RDMA_DEVICES"] = "rxe0"
    import torch  # noqa: F401  (a minute, once for all processes)

    sys.path.insert(0, str(Path(__file__).parent))
    import cases
    from crew import Crew

    print(f"imports took {time.monotonic() - began:.0f} s", flush=True)
    logging.basicConfig(level=logging.WARNING, format="      log: %(name)s: %(message)s")
    if role == "other":
        cases.be_the_other_host()
        return
    wanted = {name: case for name, case in cases.all_cases().items() if not names or name in names}
    unknown = set(names) - set(wanted)
    if unknown or not wanted:
        sys.exit(f"there are no cases {sorted(unknown)}; there are {list(cases.all_cases())}")
    crew = Crew(members=cases.MEMBERS, peers=cases.PEERS)
    results = {}
    for name, case in wanted.items():
        started = time.monotonic()
        faulthandler.dump_traceback_later(CASE_S_MAX, exit=True)
        problem = None
        try:
            case(crew)
        except BaseException as error:
            traceback.print_exc(file=sys.stdout)
            problem = f"{type(error).__name__}: {error}"
        faulthandler.cancel_dump_traceback_later()
        seconds = time.monotonic() - started
        results[name] = {"seconds": round(seconds, 1), "problem": problem}
        print(f"{'FAILED' if problem else 'passed'}  {name}  {seconds:.1f} s", flush=True)
        (OUT / "results.json").write_text(json.dumps(results))
    failed = [name for name, result in results.items() if result["problem"]]
    print(f"{len(results) - len(failed)} of {len(results)} cases passed; failed: {failed}", flush=True)
    sys.stdout.flush()
    os._exit(min(len(failed), 100))  # the crew's processes have nothing to say any more


if __name__ == "__main__":
    main()
