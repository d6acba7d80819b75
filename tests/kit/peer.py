#!/usr/bin/env python3
"""A stand-in of peer.py and llmc.py, as tests/kit/frit-run is one of frit-run."""

import json
import os
import sys
import time

arguments = sys.argv[1:]
call = " ".join(os.path.basename(a) for a in arguments)
with open(os.environ["STUB_LOG"], "a") as log:
    log.write(f"{os.path.basename(sys.argv[0])} {call}\n")
will = next((what for key, what in json.loads(os.environ.get("STUB_WILL", "{}")).items() if key in call), "")
if will == "hang":
    time.sleep(300)
if will == "large" and int(arguments[arguments.index("--batch") + 1]) > 4:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory")
if "--versions" in arguments:
    print(json.dumps({"torch": "2.11.0", "path": "/site/torch"}))
elif "--json" in arguments:
    steps = int(arguments[arguments.index("--steps") + 1])
    mode = arguments[arguments.index("--mode") + 1] if "--mode" in arguments else "eager"
    step_s = {"eager": 0.4, "default": 0.3, "reduce-overhead": 0.2}.get(mode, 0.25)
    found = {"losses": [3.0 - 0.1 * s for s in range(steps)], "step_s": step_s, "sdpa": "cudnn", "gap": 0.1}
    with open(arguments[arguments.index("--json") + 1], "w") as file:
        json.dump(found, file)
else:
    with open(arguments[-1], "w") as file:
        file.write("parameters")
