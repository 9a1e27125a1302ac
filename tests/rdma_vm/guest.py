"""What the guests of recipes.rdma_vm run: `guest.py cases NAME...` in the first, `guest.py other NAME...` in the other.

Every case is run with each binding to verbs, with processes of its own: `ctypes/two_rails`, `pyverbs/two_rails`; a NAME
is one of these, or means both. `smoke` means those of `cases.SMOKE`, and no name all. A line for each; exits with the
number of those that failed. pytest is not used: importing it takes a quarter of a minute in here, and processes must be
forked before the first thread.
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

    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent / "support")]
    import cases
    from crew import Crew

    from tensorhub_plugins.core.transports.rdma.bindings import BINDING_VARIABLE, BINDINGS

    print(f"imports took {time.monotonic() - began:.0f} s", flush=True)
    logging.basicConfig(level=logging.WARNING, format="      log: %(name)s: %(message)s")
    names = [*cases.SMOKE] if names == ["smoke"] else names
    known = {(binding, name): case for binding in BINDINGS for name, case in cases.all_cases().items()}
    wanted = {key: case for key, case in known.items() if not names or {key[1], "/".join(key)} & set(names)}
    unknown = set(names) - {name for key in known for name in (key[1], "/".join(key))}
    if unknown:
        sys.exit(f"there are no cases {sorted(unknown)}; there are {list(cases.all_cases())}")
    if role == "other":
        for there, here in zip(BINDINGS, reversed(BINDINGS), strict=True):  # each faces the other
            if (there, "two_hosts") in wanted:
                os.environ[BINDING_VARIABLE] = here
                cases.be_the_other_host()
        return
    crews = {}
    for binding in dict.fromkeys(binding for binding, _ in wanted):
        os.environ[BINDING_VARIABLE] = binding
        crews[binding] = Crew(members=cases.MEMBERS, peers=cases.PEERS)
    results = {}
    for (binding, name), case in wanted.items():
        os.environ[BINDING_VARIABLE] = binding
        crew, name = crews[binding], f"{binding}/{name}"
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
    os._exit(min(len(failed), 100))  # the crews' processes have nothing to say any more


if __name__ == "__main__":
    main()
