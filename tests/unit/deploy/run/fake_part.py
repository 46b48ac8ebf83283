"""A part of a deployment that does nothing but what a test wants: `fake_part.py SCRIPTS`, and what `part` is told.

In the folder SCRIPTS, the file of the part's name has one line for each time that it is started, of which the last one
holds for all later ones: acts, in order. It imports nothing of kvtier, so that it starts in a moment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    scripts, _, name, runtime_folder, report_fd, *_ = sys.argv[1:]
    sys.stdin.buffer.readline()
    count = Path(scripts, f"{name}.count")
    number = int(count.read_text()) if count.exists() else 0
    count.write_text(str(number + 1))
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    lines = Path(scripts, name).read_text().splitlines()
    for act in lines[min(number, len(lines) - 1)].split("; "):
        verb, _, rest = act.partition(" ")
        if verb == "report":
            os.write(int(report_fd), rest.encode() + b"\n")
        elif verb == "ready":
            os.write(int(report_fd), json.dumps({"kind": "ready", "properties": {}}).encode() + b"\n")
        elif verb == "report-half":
            os.write(int(report_fd), b'{"kind":"rea')
        elif verb == "say":
            print(rest, file=sys.stderr, flush=True)
        elif verb == "mark":  # for another part that awaits it
            Path(scripts, rest).touch()
        elif verb == "await":
            while not Path(scripts, rest).exists():
                signal.sigtimedwait([signal.SIGUSR1], 0.005)
        elif verb == "leave":
            Path(runtime_folder, rest).touch()
        elif verb == "wait":  # for one signal to end, as a part does
            signal.sigwait(_SIGNALS)
        elif verb == "hang":  # deaf to everything but SIGKILL
            while True:
                signal.sigwait([signal.SIGUSR1])
        elif verb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "exit":
            return int(rest)
        else:
            raise ValueError(act)
    return 0


if __name__ == "__main__":
    sys.exit(main())
